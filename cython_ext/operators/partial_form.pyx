"""See partial_form.pxd."""

from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

from flexstream.cython_ext.operators.pane cimport PaneSet
from flexstream.cython_ext.operators.panes cimport pane_position
from flexstream.cython_ext.operators.table cimport Layout, Side
from flexstream.cython_ext.operators.windower cimport Windower, revises, windows_of_pane
from flexstream.cython_ext.wire.crc32c cimport crc32c_update

cdef extern from "flexstream_abi.h" nogil:
    uint64_t fs_hash_value(uint64_t bits) noexcept

cdef enum:
    MAGIC = 0x50545346            # "FSTP"
    POSITION_WORDS = 5


# What it is of


cdef inline void mix(uint64_t *hash_, uint64_t word) noexcept nogil:
    hash_[0] = fs_hash_value(hash_[0] ^ word)


cdef void form_of(Form *form, const Layout *layout, const Side *sides, uint32_t n_sides,
                  const Windower *windower) noexcept nogil:
    cdef uint32_t i
    form.layout = layout
    form.sides = sides
    form.n_sides = n_sides
    form.windower = windower
    form.n_fired = windows_of_pane(windower) if revises(windower) else 0
    form.hash = 0
    mix(&form.hash, layout.n_key_fields)
    for i in range(layout.n_key_fields):
        mix(&form.hash, layout.key[i].size)
        mix(&form.hash, layout.key[i].form)
        mix(&form.hash, layout.key[i].at)
    mix(&form.hash, layout.n_aggregates)
    for i in range(layout.n_aggregates):
        mix(&form.hash, layout.aggregates[i].fold)
        mix(&form.hash, layout.aggregates[i].slot)
    mix(&form.hash, layout.stride)
    mix(&form.hash, n_sides)
    for i in range(n_sides):
        mix(&form.hash, sides[i].fold)
        mix(&form.hash, sides[i].slot)
        mix(&form.hash, sides[i].layout.stride)
    mix(&form.hash, <uint64_t> windower.size)
    mix(&form.hash, <uint64_t> windower.slide)
    mix(&form.hash, <uint64_t> windower.pane)
    mix(&form.hash, form.n_fired)


cdef uint32_t crc_of(const unsigned char *record, uint64_t n) noexcept nogil:
    cdef Head head
    memcpy(&head, record, sizeof(Head))
    head.crc = 0
    return crc32c_update(crc32c_update(0, <const unsigned char *> &head, sizeof(Head)), record + sizeof(Head),
                         n - sizeof(Head))


cdef void write_head(const Form *form, unsigned char *out, int kind, uint64_t n, uint64_t n_bytes, int64_t start,
                     uint64_t rows, uint64_t flags) noexcept nogil:
    """Ahead of a record whose other bytes are there already."""
    cdef Head *head = <Head *> out
    memset(head, 0, sizeof(Head))
    head.magic = MAGIC
    head.version = FORM_VERSION
    head.kind = <unsigned short> kind
    head.n = <uint32_t> n
    head.bytes = n_bytes
    head.layout = form.hash
    head.start = start
    head.rows = rows
    head.flags = flags
    head.crc = crc_of(out, n_bytes)


cdef PartialStatus read_head(const Form *form, const unsigned char *record, uint64_t n, int kind,
                             Head *head) noexcept nogil:
    """PARTIAL_OK: it is a whole record of this kind and layout; nothing else is known of what follows."""
    if not is_aligned(record):
        return PARTIAL_UNALIGNED
    if n < sizeof(Head):
        return PARTIAL_TRUNCATED
    memcpy(head, record, sizeof(Head))
    if head.magic != MAGIC or head.kind != kind:
        return PARTIAL_FOREIGN
    if head.version != FORM_VERSION:
        return PARTIAL_VERSION
    if head.bytes < sizeof(Head) or head.bytes % 8:
        return PARTIAL_LENGTHS
    if head.bytes > n:
        return PARTIAL_TRUNCATED
    if crc_of(record, head.bytes) != head.crc:
        return PARTIAL_DAMAGED
    return PARTIAL_OK if head.layout == form.hash else PARTIAL_LAYOUT


# Positions


cdef inline uint64_t fired_words(const Form *form) noexcept nogil:
    """Of one pane: where it starts, and how often its windows have fired."""
    return 1 + (form.n_fired + 1) // 2


cdef PartialStatus position_encode(const Form *form, const PaneSet *panes, unsigned char *out, uint64_t room,
                                   uint64_t *size) noexcept nogil:
    """How far a group has come, and what its panes say of their windows."""
    cdef uint64_t n = panes.n if form.n_fired else 0
    cdef uint64_t *word = <uint64_t *> (out + sizeof(Head))
    cdef uint64_t i
    size[0] = sizeof(Head) + 8 * (POSITION_WORDS + n * fired_words(form))
    if size[0] > room:
        return PARTIAL_ROOM
    if not is_aligned(out):
        return PARTIAL_UNALIGNED
    word[0] = <uint64_t> panes.watermark
    word[1] = <uint64_t> panes.late_before
    word[2] = <uint64_t> panes.fired_until
    word[3] = <uint64_t> panes.restored_until
    word[4] = panes.usual_keys
    word += POSITION_WORDS
    for i in range(n):
        memset(word, 0, 8 * fired_words(form))
        word[0] = <uint64_t> panes.panes[i].start
        memcpy(word + 1, panes.panes[i].fired, form.n_fired * sizeof(uint32_t))
        word += fired_words(form)
    write_head(form, out, POSITION, n, size[0], 0, 0, 0)
    return PARTIAL_OK


cdef PartialStatus position_decode(const Form *form, const unsigned char *record, uint64_t n, PaneSet *panes,
                                   uint64_t *size) noexcept nogil:
    """The set goes on where the record says, and so do its panes. On anything but PARTIAL_OK it is as it was."""
    cdef Head head
    cdef const uint64_t *word
    cdef uint64_t i
    cdef uint32_t at
    cdef int64_t start
    cdef PartialStatus found = read_head(form, record, n, POSITION, &head)
    if found != PARTIAL_OK:
        return found
    if head.start or head.rows or head.flags or (head.n and form.n_fired == 0):
        return PARTIAL_COUNTS
    if head.bytes != sizeof(Head) + 8 * (POSITION_WORDS + <uint64_t> head.n * fired_words(form)):
        return PARTIAL_LENGTHS
    word = <const uint64_t *> (record + sizeof(Head))
    if word[4] > MOST_ENTRIES:
        return PARTIAL_COUNTS
    word += POSITION_WORDS
    for i in range(head.n):
        start = <int64_t> word[i * fired_words(form)]
        at = pane_position(panes, start)
        if at == panes.n or panes.panes[at].start != start:
            return PARTIAL_PANE
    for i in range(head.n):
        at = pane_position(panes, <int64_t> word[0])
        memcpy(panes.panes[at].fired, word + 1, form.n_fired * sizeof(uint32_t))
        word += fired_words(form)
    word = <const uint64_t *> (record + sizeof(Head))
    panes.watermark = <int64_t> word[0]
    panes.late_before = <int64_t> word[1]
    panes.fired_until = <int64_t> word[2]
    panes.restored_until = <int64_t> word[3]
    panes.usual_keys = <uint32_t> word[4]
    size[0] = head.bytes
    return PARTIAL_OK
