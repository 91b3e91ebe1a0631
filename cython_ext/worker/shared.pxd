"""What all workers of an engine share: placement, flags, counters, and a ring from every worker to every other.

Who writes what
- `placement[g]` and the pointer `flags` are the mover's (one Python thread at a time); workers load them;
- a Flags array is never changed once it is published: the mover publishes a copy with the next version (release), and
  waits until every worker has said that version (`seen`) or sleeps, which is being at a quiescent point for as long as
  it lasts; then nobody reads the old array any more;
- `counter[g]` is stored by the mover while the group is settled, and counted down by contributors, each after it has
  published what it owed on its ring to the owner;
- ring [from * workers + to] has the worker `from` as its one producer and `to` as its one consumer. It has room for
  both messages of every move that can be under way, so a push of these never fails; sockets leave that room free.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t, uint8_t

from flexstream.cython_ext.wire.decoder cimport Decoder
from flexstream.cython_ext.operators.graph cimport MAX_PORTS
from flexstream.cython_ext.operators.pane cimport Pane, PaneSet
from flexstream.cython_ext.memory.ring cimport Ring

cdef enum:
    MAX_WORKERS = 64


cdef struct Connection:
    int fd
    uint32_t stream
    uint32_t group
    uint32_t slot
    uint64_t session              # number of the session that had the slot when the connection was first served
    Decoder decoder
    unsigned char *carry          # undecoded bytes; as large as a row (a frame, with CRC)
    uint64_t carry_n
    uint64_t carry_capacity
    unsigned char *hello_ack      # the whole ACK frame, made by the acceptor; the worker fills in the sequence
    uint64_t hello_ack_n
    uint64_t ack_bytes            # 0: no ACKs wanted
    uint64_t unacked_bytes
    uint64_t acked_row
    uint64_t rows                 # counter
    uint64_t sampled_rows         # of these, when its worker was last asked for a sample
    uint64_t recent               # rows of about the last RECENT_NS, at that time
    Connection *next
    Connection *previous
    uint64_t id
    int64_t closed_why


cdef struct Flags:
    uint64_t version
    Flags *older                  # the mover's list of arrays to free
    uint8_t flag[1]               # [groups]: the group is on the move or split


cdef struct Shared:
    uint32_t groups
    uint32_t n_workers
    uint64_t flags                # Flags *
    uint64_t *counter             # [groups] contributors that still owe something
    uint64_t *placement           # [groups] worker
    Ring *rings                   # [workers * workers]
    uint64_t *sleeping[MAX_WORKERS]
    uint64_t *seen[MAX_WORKERS]
    int wake_fd[MAX_WORKERS]


cdef struct Position:             # how far an operator has come with a group
    int64_t watermark
    int64_t late_before
    int64_t fired_until
    int64_t restored_until
    uint32_t usual_keys


cdef struct MovedOperator:
    uint64_t id
    bint absorbed                 # the new owner's
    Position position             # with ADOPT
    int64_t watermark[MAX_PORTS]  # with ADOPT: of its inputs
    PaneSet panes                 # with DRAINED: the old owner may still write it when the new one has ADOPT


cdef struct MovedStream:
    int64_t watermark
    uint32_t slots
    int64_t *session_watermark    # [slots], and so on
    uint64_t *session_number
    uint64_t *next_row
    uint8_t *counted


cdef struct Move:                 # made and freed by the mover; in between it belongs to whoever has it in hand
    uint64_t id
    uint32_t group
    uint32_t source
    uint32_t target
    uint32_t n_streams
    MovedStream *streams
    uint32_t n_operators
    MovedOperator *operators      # once each, however many streams feed them
    Connection *connections
    uint64_t n_connections
    uint64_t panes                # how much state went over
    uint64_t entries
    uint64_t bytes
    uint64_t swept_ns             # A gave the sockets away
    uint64_t adopted_ns           # B serves them
    uint64_t drained_ns           # A published its panes
    uint64_t absorbed_ns          # B has them
    const uint64_t *out_head      # how far A's reports are read,
    uint64_t out_tail             # and how far they are to be before B says anything of the group
    bint drained                  # B has read DRAINED
    uint64_t done                 # nobody owes the group anything, what was due has fired: the mover may free it
    Move *next                    # in the list of the worker that has it


cdef struct LentStream:           # of the connections of one stream
    uint8_t *wanted               # [max_sessions] lanes that are meant for the borrower
    uint8_t *lent                 # [max_sessions]
    uint64_t *session_number
    int64_t *session_watermark
    uint64_t *next_row


cdef struct Loan:                 # a split, or its end: made and freed by the mover, like a Move
    uint64_t id
    uint32_t group
    uint32_t owner
    uint32_t borrower
    uint32_t n_streams
    uint64_t share                # of the group's rows that the borrower should get, in percent
    LentStream *streams
    uint32_t n_operators
    MovedOperator *operators      # positions, of those that the borrower gets rows for
    Connection *connections
    uint64_t n_connections
    uint64_t done
    Loan *next


cdef struct SharedOperator:
    uint64_t id
    PaneSet panes             # of which only the list is used


cdef struct Share:                # complete panes and the watermarks behind them; in the borrower's arena, then the owner's
    uint64_t bytes                # of the Share itself
    uint64_t state_bytes          # of the panes
    uint32_t borrower
    uint32_t stream
    uint32_t group
    uint32_t n_slots
    uint32_t n_operators
    uint32_t taken                # operators whose panes the owner has
    SharedOperator *operators
    uint32_t *slots
    int64_t *watermarks
