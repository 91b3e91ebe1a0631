"""A worker: the native thread pinned to a core that owns groups, their connections and their state.

Threads and who writes what
- the worker's thread writes everything in the StreamStates, Connections, Operators and Inputs that were handed to it,
  from the order that brought them until the report that gives them back (CONNECTION_CLOSED, QUERY_GONE), but for what
  Python sets in these (graph.pxd); and everything in WorkerState but for these:
- Python threads post orders and fed rows under the owner's lock, so that `mailbox.tail` and `feeds.tail` have one writer
  at a time; set `stop_wanted`; raise `sample_wanted`, from one thread (the balancer's); and read counters at any time,
  relaxed;
- the collector alone reads the out ring: it writes `out.head`, and `reader_sleeping` before it sleeps. While one of its
  callbacks waits for workers, a thread that it has started does so instead of it;
- `sleeping` is set by the worker before it blocks in epoll_wait, with a full fence, and read by whoever posts: a post
  wakes the worker by eventfd only if it sleeps. `reader_sleeping` is the same the other way: the worker clears it when
  it wakes the reader, and sets it once, when it ends, so that its last report is not slept through;
- what several workers read and write is in shared.pxd; what they send each other is in moving.pyx.

The loop: mailbox -> rings of other workers -> receive into the hot block -> decode -> kernels -> fire windows ->
flush -> quiescent point.
Nothing on that path allocates, locks, logs or takes the GIL. What it works on are tasks (below): each can stop at any
batch when an output block or memory is missing. The worker then reads no socket until it can go on, and TCP tells the
producers. Between slices, and while it waits, orders at the head of the mailbox that begin no work are obeyed: who says
HELLO is answered whatever a query does.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t, uint8_t

from flexstream.cython_ext.memory.arena cimport Arena
from flexstream.cython_ext.memory.blocks cimport Output
from flexstream.cython_ext.wire.murmur3 cimport KeySpec
from flexstream.cython_ext.operators.late_marks cimport LateMarks
from flexstream.cython_ext.operators.graph cimport Context, Input, Operator, Step
from flexstream.cython_ext.expressions.program cimport Scratch
from flexstream.cython_ext.memory.ring cimport Message, Ring
from flexstream.cython_ext.worker.shared cimport Connection, Flags, Loan, Move, Share, Shared
from flexstream.cython_ext.worker.sketch cimport Sketches

cdef enum:
    MAX_STREAMS = 64
    MAX_INPUTS = 64               # that a stream feeds; as many as a mark has bits
    MAX_OPERATORS = 4096          # of a worker
    MAX_DEPTH = 8                 # operators one behind the other

cdef enum TaskPlace:              # in Work.tasks: those at a depth d of the graph are 2 * d further on
    ROWS_TASK = 0
    ADVANCE_TASK = 1

cdef enum SessionState:
    SESSION_NONE = 0
    SESSION_LIVE = 1
    SESSION_IS_IDLE = 2


cdef struct StreamState:
    uint32_t index
    uint32_t groups
    uint32_t row_bytes
    uint32_t batch_rows
    uint32_t max_sessions
    uint32_t slots_high           # one past the highest slot in use
    uint32_t n_inputs
    uint32_t hold
    KeySpec key
    int64_t unit_ns               # of a time
    int64_t max_future            # how far ahead of the clock times may be, in that unit; -1: as far as they like
    int64_t clock                 # the time as of the worker's last look at it, if there is a bound
    int64_t latest                # and the bound: rows beyond are rejected, watermarks beyond count as `clock`
    uint64_t capped               # watermarks that did
    uint64_t *owned               # [groups]; others may read it, relaxed
    uint8_t *deferred             # [groups] a firing waits until nobody owes the group anything
    uint8_t *ends_due             # [groups] a session's end is to be counted when its firings are through
    int64_t *watermark            # [groups]
    int64_t *session_watermark    # [groups * max_sessions]
    uint64_t *next_row            # [groups * max_sessions]
    Connection **connection       # [groups * max_sessions]
    uint32_t *lent                # [groups * max_sessions] 1 + the worker that serves the connection for the owner
    uint8_t *borrowed             # [groups * max_sessions] served here, for the owner
    uint32_t *borrows             # [groups] how many of these there are
    int64_t *shared_until         # [groups] the watermark that the owner was told last
    uint8_t *counted              # [groups * max_sessions] the session's end in the group is counted
    uint8_t *session_state        # [max_sessions]
    uint64_t *session_number      # [max_sessions] the place of the slot's session among all that the stream has had
    uint64_t *seen_ns             # [max_sessions] when the session was last heard of; read by Python
    Input *inputs[MAX_INPUTS]     # that it feeds
    Output late                   # rows that came too late for some query (late_output.pxd)
    uint64_t late_slots           # bits that inputs have
    uint64_t received
    uint64_t accepted             # of these, worked off by every input that there was
    uint64_t unqueried            # of these, with no input there
    uint32_t n_done               # sessions with ends that were not reported yet
    uint32_t *session_done        # [max_sessions] in how many groups
    uint64_t *group_rows          # [groups]
    uint64_t *fed_rows            # [groups] of these, rows that were fed; read by Python
    uint64_t *counting            # [groups] room for a sample, which says:
    uint64_t *arrived             # [groups] rows that came by socket, read or not; read by Python
    uint64_t *waiting             # [groups] rows that were not worked off; read by Python
    uint64_t *links               # [groups] connections; and of their recent rows,
    uint64_t *recent              # [groups] the sum,
    uint64_t *busiest             # [groups] and those of the busiest connection; read by Python
    Sketches *sketches            # the heaviest keys of each group; read by Python


ctypedef Step (*TaskRun)(WorkerState *worker, Task *task) noexcept nogil


cdef struct Task:                 # a piece of work that can stop at every batch or slice: what is left to do is in it
    TaskRun run
    StreamState *stream           # whose inputs get rows, or come further
    uint32_t group
    uint32_t next_input           # those before it have had the batch at `done`, or the watermark
    # rows
    const unsigned char *rows
    uint64_t n
    uint64_t done
    uint64_t session              # number of the session that they are of
    uint64_t sequence             # of the first of them, within session and group
    uint32_t input_done           # rows of the batch that the next input has finished
    # watermarks, of groups up to `end`
    uint32_t end
    bint started                  # the group's watermark is worked out
    bint revise                   # only revisions, the watermark stands
    int64_t watermark


cdef struct Work:                 # what the worker is in the middle of (work_item.pxd)
    Task tasks[2 * MAX_DEPTH]     # by TaskPlace
    uint32_t pending              # a bit for each of these that has something left to do
    uint64_t later                # streams, a bit each, whose watermarks rose while something else was worked on
    bint feeding                  # the rows at hand were fed: when they are done, so is their ticket


cdef struct Net:                  # sockets, and what was received
    int epoll_fd
    uint32_t busy_poll
    unsigned char *block          # the hot block
    uint64_t block_bytes          # what one receive takes at most
    uint64_t bytes_at             # how far its bytes are decoded
    uint64_t bytes_n
    Connection *serving           # whose bytes they are
    Connection *connections
    Connection *limbo             # closed, not yet reported: the out ring was full
    uint64_t detached             # connections that were, so far: who has a pointer to one looks whether it may be gone


cdef struct Mail:                 # orders in, reports out, and who sleeps
    Ring mailbox                  # orders
    Ring feeds                    # fed rows, and the orders that must stay behind them
    Message next_feed             # taken off `feeds`, when `feed_waits`: orders of the mailbox come before it
    bint feed_waits
    Ring out
    int wake_fd
    int reader_fd
    uint64_t sleeping
    uint64_t reader_sleeping


cdef struct Migration:            # groups that come and go (moving.pxd, splitting.pxd)
    Flags *flags                  # as of the last quiescent point
    uint64_t seen                 # its version
    uint8_t *awaiting             # [groups] adopted, and DRAINED is not here yet
    Move *adopting                # moves to here that are not settled
    Connection *parked            # of groups that will be adopted here
    Connection *held_sockets      # to be forwarded: the ring was full
    Share *share                  # read, and there was no memory for it yet: the rings wait
    Loan *recalled                # to be given back, and there was no memory for the last share yet


cdef struct WorkerCounters:
    int64_t thread_id
    uint64_t rows
    uint64_t bytes_received
    uint64_t receive_calls
    uint64_t n_connections
    uint64_t fed                  # tickets done
    uint64_t stalled              # 0, or how often it has waited for memory or output by now
    uint64_t drained_ns
    uint64_t busy_ns
    uint64_t started_ns
    uint64_t cpu_ns
    uint64_t loops
    uint64_t barriers
    uint64_t sampled              # as of when `arrived` and `waiting` are
    uint64_t sampled_ns


cdef struct WorkerState:
    uint32_t index
    int cpu
    int pin_errno
    uint32_t stopping             # 1 read the sockets empty, then end; 2 end
    uint64_t drain_until_ns
    uint64_t stop_wanted          # Python sets it: 1 work off what was received, 2 do not wait for readers either
    uint64_t sample_wanted        # Python raises it
    uint64_t ended
    Shared *shared
    Arena arena
    Scratch *scratch
    LateMarks marks
    Context context
    StreamState *streams[MAX_STREAMS]
    uint32_t n_streams
    Operator *operators[MAX_OPERATORS]
    uint32_t n_operators
    Net net
    Mail mail
    Migration migration
    Work work
    WorkerCounters counters
