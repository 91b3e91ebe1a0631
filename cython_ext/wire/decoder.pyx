"""See decoder.pxd; the protocol is in docs/protocol.md."""

from libc.stdint cimport uint64_t
from libc.string cimport memset

from flexstream.cython_ext.wire.murmur3 cimport KeyHasher, group_of_hash, key_hash


cdef inline Decoded fail(Decoder *decoder, Fault fault) noexcept nogil:
    decoder.fault = fault
    return DECODE_FAULT


cdef Fault header_fault(const Decoder *decoder, const Header *header) noexcept nogil:
    """What is wrong with the header as it stands; its sequence is judged later."""
    cdef uint64_t payload = header.payload_bytes
    cdef uint64_t rows = header.value
    cdef bint whole_rows = payload == rows * decoder.row_bytes and rows <= payload
    cdef Fault fault = FAULT_NONE
    if header.magic != FRAME_MAGIC:
        fault = FAULT_BAD_MAGIC
    elif header.version != FRAME_VERSION:
        fault = FAULT_BAD_VERSION
    elif header.group != decoder.group:
        fault = FAULT_WRONG_GROUP
    elif decoder.ended or header.type not in (FRAME_DATA, FRAME_WATERMARK, FRAME_MARKER, FRAME_BARRIER, FRAME_EOS):
        fault = FAULT_BAD_TYPE
    elif header.type != FRAME_DATA:
        if payload != 0:
            fault = FAULT_BAD_LENGTH
    elif payload > (decoder.frame_bytes if decoder.crc else decoder.max_frame_bytes):
        if not decoder.crc or whole_rows:
            return FAULT_BAD_LENGTH
        fault = FAULT_BAD_LENGTH
    elif not whole_rows:
        fault = FAULT_BAD_ROW_COUNT
    if (header.flags & FLAG_CRC) != (FLAG_CRC if decoder.crc else 0) and fault == FAULT_NONE:
        fault = FAULT_BAD_CRC
    # Whoever asked for CRCs expects damage: a header that cannot be right is worth another try, and its length is
    # not to be waited for.
    return FAULT_BAD_CRC if fault != FAULT_NONE and decoder.crc else fault


cdef Decoded begin_frame(Decoder *decoder, const Header *header, uint64_t available) noexcept nogil:
    """DECODE_ROWS: the frame may be read."""
    cdef uint64_t payload = header.payload_bytes
    cdef uint64_t rows = header.value
    cdef uint64_t known
    cdef Fault fault = header_fault(decoder, header)
    if fault != FAULT_NONE:
        return fail(decoder, fault)
    if decoder.crc:
        if available < HEADER_BYTES + payload:
            return DECODE_NEED
        if frame_crc(<const unsigned char *> header, HEADER_BYTES + payload) != header.crc32c:
            return fail(decoder, FAULT_BAD_CRC)
    if header.type == FRAME_DATA:
        if header.sequence > decoder.next_row:
            return fail(decoder, FAULT_SEQUENCE_GAP)
        known = decoder.next_row - header.sequence
        decoder.skip_left = (rows if known > rows else known) * decoder.row_bytes
        decoder.frame_left = payload
        decoder.check_group = True
    decoder.frames += 1
    return DECODE_ROWS


cdef Decoded take_rows(Decoder *decoder, const unsigned char *bytes_, uint64_t n, uint64_t *at) noexcept nogil:
    cdef uint64_t available = n - at[0]
    cdef uint64_t skip
    if available > decoder.frame_left:
        available = decoder.frame_left
    available -= available % decoder.row_bytes
    if available == 0:
        return DECODE_NEED
    if decoder.check_group:
        decoder.check_group = False
        if group_of_hash(key_hash(&decoder.key, bytes_ + at[0]), decoder.groups) != decoder.group:
            return fail(decoder, FAULT_WRONG_GROUP)
    skip = decoder.skip_left if decoder.skip_left < available else available
    decoder.skip_left -= skip
    decoder.frame_left -= available
    decoder.rows = bytes_ + at[0] + skip
    decoder.n_rows = (available - skip) // decoder.row_bytes
    decoder.next_row += decoder.n_rows
    at[0] += available
    return DECODE_ROWS


cdef Decoded decoder_next(Decoder *decoder, const unsigned char *bytes_, uint64_t n, uint64_t *at) noexcept nogil:
    """The next event at bytes_[at]; moves `at` past what it used."""
    cdef const Header *header
    cdef Decoded step
    if decoder.fault:
        return DECODE_FAULT
    while True:
        if decoder.frame_left:
            step = take_rows(decoder, bytes_, n, at)
            if step == DECODE_ROWS and decoder.n_rows == 0:
                continue
            return step
        if n - at[0] < HEADER_BYTES:
            return DECODE_NEED
        header = <const Header *> (bytes_ + at[0])
        step = begin_frame(decoder, header, n - at[0])
        if step != DECODE_ROWS:
            return step
        at[0] += HEADER_BYTES
        if header.type == FRAME_DATA:
            continue
        decoder.value = header.value
        if header.type == FRAME_WATERMARK:
            return DECODE_WATERMARK
        if header.type == FRAME_MARKER:
            return DECODE_MARKER
        if header.type == FRAME_BARRIER:
            return DECODE_BARRIER
        decoder.ended = True
        return DECODE_EOS


cdef class FrameDecoder:
    """The worker's decoder for tests and fuzzing: feed bytes cut anywhere, get the events.

    Events are tuples: ("rows", bytes), ("watermark", int), ("marker", int), ("barrier", int), ("eos",),
    ("fault", code).
    """

    cdef Decoder decoder
    cdef bytes carry

    def __init__(self, stream, *, int group, int groups=128, bint crc=False, int frame_bytes=32768,
                 int max_frame_bytes=1 << 20, int next_row=0):
        cdef KeyHasher hasher = stream.key_hasher
        memset(&self.decoder, 0, sizeof(Decoder))
        self.decoder.row_bytes = stream.schema.row_bytes
        self.decoder.group = group
        self.decoder.groups = groups
        self.decoder.crc = crc
        self.decoder.frame_bytes = frame_bytes
        self.decoder.max_frame_bytes = max_frame_bytes
        self.decoder.key = hasher.spec
        self.decoder.next_row = next_row
        self.carry = b""

    def feed(self, data: bytes) -> list:
        cdef bytes whole = self.carry + data
        cdef const unsigned char *bytes_ = whole
        cdef uint64_t n = len(whole)
        cdef uint64_t at = 0
        cdef Decoded step
        events = []
        while True:
            step = decoder_next(&self.decoder, bytes_, n, &at)
            if step == DECODE_NEED:
                break
            if step == DECODE_FAULT:
                events.append(("fault", self.decoder.fault))
                break
            if step == DECODE_ROWS:
                events.append(("rows", (<char *> self.decoder.rows)[:self.decoder.n_rows * self.decoder.row_bytes]))
            elif step == DECODE_EOS:
                events.append(("eos",))
            else:
                name = {DECODE_WATERMARK: "watermark", DECODE_MARKER: "marker", DECODE_BARRIER: "barrier"}[step]
                value = self.decoder.value
                if step == DECODE_WATERMARK and value >= 1 << 63:
                    value -= 1 << 64
                events.append((name, value))
        self.carry = whole[at:]
        return events

    @property
    def carried(self) -> int:
        return len(self.carry)

    @property
    def next_row(self) -> int:
        return self.decoder.next_row
