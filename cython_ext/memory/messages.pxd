"""What the messages on a worker's rings mean: one enum for each kind of ring.

A worker has three rings with Python: orders come on `mailbox`, fed rows and the orders that must stay behind them on
`feeds`, and its reports leave on `out`. From every other worker it has a ring of peer messages (Shared.rings). Each ring
has one writer and one reader at a time.
"""


cdef enum Order:                  # Python -> worker, on the mailbox; what must stay behind fed rows, on `feeds`
    ADD_STREAM = 1                # ptr: StreamState
    ADD_QUERY = 2                 # ptr: Operator, with its inputs
    DROP_QUERY = 3                # ptr: Operator -> QUERY_GONE
    ADD_CONNECTION = 4            # ptr: Connection
    REGISTER_SESSION = 5          # stream, slot; value: the session's number, higher than any before
    SESSION_WATERMARK = 6         # stream, slot, value; ptr: bitmap of groups it does not speak for, or NULL -> GIVEN_BACK
    SESSION_END = 7               # stream, slot; ptr: bitmap as above -> GIVEN_BACK
    SESSION_IDLE = 8              # stream, slot, value: 1 idle, 0 counts again
    SESSION_FREE = 9              # stream, slot: the slot may be given to another session
    FEED = 10                     # stream, group, slot; ptr: rows, n; value: sequence of the first
    PING = 11                     # tag -> PONG, at a quiescent point
    HOLD = 12                     # stream, value: 1 = fire nothing (not all expected producers are here)
    SWEEP = 13                    # ptr: Move: give the group's sessions and sockets to the new owner
    DRAIN_POINT = 14              # ptr: Move, on `feeds`: nothing of the group was fed behind it -> DRAINED
    ADVANCE = 15                  # group: what was deferred may go on
    LEND = 16                     # ptr: Loan, to the owner: let another worker serve some connections of the group
    RECALL = 17                   # ptr: Loan, to the borrower: give them back
    CLOSE_WINDOWS = 18            # tag: operator id; value: windows up to this end have fired in some group
    KNOCK = 19                    # nothing to do: that it is taken is what somebody wants to know


cdef enum PeerMessage:            # worker -> worker, on the ring of the two
    ADOPT = 1                     # ptr: Move: you own the group now; sessions, sockets and positions are inside
    DRAINED = 2                   # ptr: Move: my panes of the group; I have nothing more
    SOCKET = 3                    # ptr: Connection: of a group that is yours, or that you borrowed
    BORROW = 4                    # ptr: Loan: serve these connections for me
    SHARE = 5                     # ptr: Share: complete panes of what I borrowed, and how far they go
    GIVE_BACK = 6                 # ptr: Loan: the connections again; all panes were sent before


cdef enum Report:                 # worker -> Python, on the out ring
    RESULT_BLOCK = 1              # ptr: Block; tag: query id
    LATE_BLOCK = 2                # ptr: Block; tag: stream
    MARKER_SEEN = 3               # value: the marker's time stamp
    CONNECTION_CLOSED = 4         # ptr: Connection; value: why
    SESSION_DONE = 5              # stream, slot; value: in so many more groups the session has ended and all has fired
    QUERY_GONE = 6                # ptr: Operator
    GIVEN_BACK = 7                # ptr: memory that Python lent with an order
    PONG = 8                      # tag; 0: no PING asked, the thread has ended
    SESSION_AWAKE = 9             # stream, slot: an idle session sent something
    QUERY_HERE = 10               # stream; tag: query id; slot: its bit in the late blocks between this and QUERY_GONE
