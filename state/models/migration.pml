/* The protocol that moves, splits and un-splits a group, for spin. See README.md beside it.
 *
 * Guarantees checked: no row lost, none counted twice, none after its window fired, each window fired exactly once,
 * at most one owner, no deadlock (when nothing can happen any more, the monitor asserts that everything has).
 * Assumes: sequential consistency (the memory order is for the thread sanitizer), rings that never block (overflow
 * lists in the code), each step of a worker is one atomic action except where the code's steps can be told apart.
 *
 * Configurations: WORKERS, GROUPS (1 or 2), MOVES (of group 0), SPLIT. Mutants: M_..., each of which must fail.
 */
#ifndef WORKERS
#define WORKERS 2
#endif
#ifndef GROUPS
#define GROUPS 2
#endif
#ifndef MOVES
#define MOVES 2
#endif
#define WINDOWS 2
#define NOBODY 9
#if GROUPS == 2
#define SESSIONS 3
#else
#define SESSIONS 2
#endif

/* Group 0 has sessions 0 and 1; session 1's socket comes from the acceptor, whenever it likes. Group 1 has session 2. */
#define GROUP_OF(s) ((s) == 2 -> 1 : 0)
#define AT(w, x) ((w) * 2 + (x))                       /* [worker][group] or [worker][window] */
#define PART(w, g, n) part[((w) * 2 + (g)) * 2 + (n)]
#define WM(w, s) wm[(w) * 3 + (s)]
#define FLAGGED(word, g) (((word) >> (g)) & 1)

mtype = { ADOPT, SOCKET, DRAINED, LANE, CONTRIB, RECALL, GIVEBACK };

/* What a session sends: row of window n = 1 + n; watermark n (windows below n are over) = 10 + n; the fence = 20. */
#define FENCE 20
#define IS_WATERMARK(e) ((e) > 10 && (e) < FENCE)
byte script[12];
byte script_length[3];
byte position[3];                    /* next element in the socket */
byte reader[3];                      /* which worker reads the socket */
byte parked[3];                      /* worker + 1 that holds it until ADOPT tells the session's sequence */
byte received[3];                    /* watermark as the decoder has seen it: travels with the session */

/* Shared between threads, as in the code. */
byte flags = 0;                      /* the published flag array: one bit per group */
byte counter[2];                     /* contributors that still owe rows or partials */
byte placement[2];
chan ring[9] = [8] of { mtype, byte, byte, byte, byte };         /* [from * 3 + to] */
chan handed[3] = [1] of { byte };    /* acceptor -> worker */

/* One thread's own. */
byte snapshot[3];                    /* the flag array that the worker loaded at its last quiescent point */
chan queue[6] = [2] of { byte, byte };                           /* received, not processed: [worker][group] */
byte part[12];                       /* rows counted: [worker][group][window] */
byte wm[9];                          /* processed watermark: [worker][session] */
byte next[6];                        /* the owner's next window to fire; travels with ADOPT */
bool own[6];
byte drain[6];                       /* worker + 1 that gets what is left; + 10 once published */

/* Worker <-> balancer mailbox. */
byte order[2];                       /* move to worker order - 1 */
bool adopted[2];                     /* the new owner has read DRAINED */
byte finished = 0;                   /* balancer processes that are done */
byte open_windows[2];                /* M_OPEN_ONLY: bitmap at the start of the move */

/* Ghosts: what a perfect observer knows. */
byte fired[2];
byte emitted[4];
byte expected[4];
byte owners[2];

#ifdef SPLIT
bool fenced = false;                 /* the owner's queue still holds session 1's fence */
byte done = 0;                       /* the contributor's done-watermark */
byte split_order = 0;                /* 1 split, 2 un-split */
bool split_state = false;            /* the owner has given the lane away */
bool leaving = false;                /* the contributor still owes its last partials */
bool left = false;
#endif

#ifdef M_NEW_FIRES_EARLY
#define NOTHING_OWED(w, g) true
#elif defined(M_DRAINED_OVERTAKES)
#define NOTHING_OWED(w, g) (counter[g] == 0)
#elif defined(M_OPEN_ONLY)
#define NOTHING_OWED(w, g) ((counter[g] == 0 && RINGS_READ(w)) || ((open_windows[g] >> next[AT(w, g)]) & 1) == 0)
#else
#define NOTHING_OWED(w, g) (counter[g] == 0 && RINGS_READ(w))
#endif
#define RINGS_READ(w) (empty(ring[w]) && empty(ring[3 + w]) && empty(ring[6 + w]))

#if GROUPS == 2
#define REACHED(w, g) ((g) == 1 -> WM(w, 2) : (WM(w, 0) < WM(w, 1) -> WM(w, 0) : WM(w, 1)))
#else
#define REACHED(w, g) (WM(w, 0) < WM(w, 1) -> WM(w, 0) : WM(w, 1))
#endif
#define OWNER_FIRES(w, g) (own[AT(w, g)] && (!FLAGGED(snapshot[w], g) || NOTHING_OWED(w, g)))
#ifdef M_OLD_STILL_FIRES
#define FIRES(w, g) (OWNER_FIRES(w, g) || (drain[AT(w, g)] != 0 && drain[AT(w, g)] < 10))
#else
#define FIRES(w, g) OWNER_FIRES(w, g)
#endif
#define MAY_FIRE(w, g) (next[AT(w, g)] < REACHED(w, g) && FIRES(w, g))

inline fire(g) {
  x = next[AT(me, g)];
  assert(PART(me, g, x) == expected[AT(g, x)]);              /* none lost, none twice */
  emitted[AT(g, x)]++;
  assert(emitted[AT(g, x)] == 1);
  PART(me, g, x) = 0;
  fired[g] = x + 1;
  next[AT(me, g)] = x + 1;
  x = 0
}

/* Received from the socket into a block. */
#define CAN_RECEIVE(s) (reader[s] == me && position[s] < script_length[s] && nfull(queue[AT(me, GROUP_OF(s))]))
inline receive(s) {
  e = script[s * 4 + position[s]];
  position[s]++;
  queue[AT(me, GROUP_OF(s))]!s, e;
  if :: IS_WATERMARK(e) -> received[s] = e - 10 :: else fi;
  e = 0
}

inline process(g) {
  queue[AT(me, g)]?s, e;
  if
  :: IS_WATERMARK(e) ->
     WM(me, s) = (e - 10 > WM(me, s) -> e - 10 : WM(me, s));
#ifdef SPLIT
     if
     :: !own[AT(me, g)] && drain[AT(me, g)] == 0 ->           /* a contributor */
#ifdef M_CONTRIB_COUNTS_FIRST
        ring[me * 3 + 0]!CONTRIB, 0, 0, 0, e - 10           /* the done-watermark without its panes */
#else
        ring[me * 3 + 0]!CONTRIB, 0, PART(me, g, 0), PART(me, g, 1), e - 10;
        PART(me, g, 0) = 0; PART(me, g, 1) = 0
#endif
     :: else
     fi
#endif
#ifdef SPLIT
  :: e == FENCE ->
     fenced = false;
     WM(me, 1) = (done > WM(me, 1) -> done : WM(me, 1))
#endif
  :: e < 10 ->
     assert(e - 1 >= fired[g]);                              /* never after its window */
     PART(me, g, e - 1)++
  fi;
  s = 0; e = 0
}

/* Step 2 of a move: sessions with received watermarks, and the sockets that this worker reads, in one message. */
inline hand_over(s) {
  if
  :: reader[s] == me -> x = x | (1 << s); reader[s] = NOBODY
  :: else
  fi;
#ifdef M_PROCESSED_WATERMARK
  y = y | (WM(me, s) << (2 * s))
#else
  y = y | (received[s] << (2 * s))
#endif
}
inline sweep(g) {
  to = order[g] - 1;
  order[g] = 0;
  own[AT(me, g)] = false;
  owners[g]--;
  x = 0; y = 0;
  if
  :: g == 0 -> hand_over(0); hand_over(1)
#if GROUPS == 2
  :: else -> hand_over(2)
#endif
  fi;
  ring[me * 3 + to]!ADOPT, g, x, y, next[AT(me, g)];
  drain[AT(me, g)] = to + 1;
  x = 0; y = 0; to = 0
}

/* Step 4: publish what is left on the same ring, then subtract; two steps, because others can look between them. */
#ifdef M_DRAINED_EARLY
#define CAN_DRAIN(g) (drain[AT(me, g)] != 0 && drain[AT(me, g)] < 10)
#else
#define CAN_DRAIN(g) (drain[AT(me, g)] != 0 && drain[AT(me, g)] < 10 && empty(queue[AT(me, g)]))
#endif
inline publish(g) {
  ring[me * 3 + (drain[AT(me, g)] % 10) - 1]!DRAINED, g, PART(me, g, 0), PART(me, g, 1), 0;
  PART(me, g, 0) = 0; PART(me, g, 1) = 0;
  next[AT(me, g)] = 0;
  if :: g == 0 -> WM(me, 0) = 0; WM(me, 1) = 0 :: else -> WM(me, 2) = 0 fi
}
inline subtract(g) {
  assert(counter[g] > 0);
  counter[g]--
}
inline drained_first(g) {
#ifdef M_SUBTRACT_FIRST
  subtract(g);
#else
  publish(g);
#endif
  drain[AT(me, g)] = drain[AT(me, g)] + 10
}
inline drained_second(g) {
#ifdef M_SUBTRACT_FIRST
  publish(g);
#else
  subtract(g);
#endif
  drain[AT(me, g)] = 0
}

inline take_socket(s) {              /* of the acceptor, or forwarded */
#ifdef M_NO_FORWARD
  reader[s] = me
#else
  if
  :: own[AT(me, GROUP_OF(s))] -> reader[s] = me
  :: !own[AT(me, GROUP_OF(s))] && placement[GROUP_OF(s)] == me -> parked[s] = me + 1
  :: else -> ring[me * 3 + placement[GROUP_OF(s)]]!SOCKET, s, 0, 0, 0
  fi
#endif
}

inline adopt_session(s) {
  if :: ((x >> s) & 1) || parked[s] == me + 1 -> reader[s] = me; parked[s] = 0 :: else fi;
  WM(me, s) = (y >> (2 * s)) & 3
}

inline read_ring(from) {
  ring[from * 3 + me]?kind, g, x, y, z;
  if
  :: kind == ADOPT ->
     own[AT(me, g)] = true;
     next[AT(me, g)] = z;
     owners[g]++;
     assert(owners[g] == 1);
     if
     :: g == 0 -> adopt_session(0); adopt_session(1)
#if GROUPS == 2
     :: else -> adopt_session(2)
#endif
     fi
  :: kind == SOCKET -> take_socket(g)
  :: kind == DRAINED ->
     PART(me, g, 0) = PART(me, g, 0) + x;
     PART(me, g, 1) = PART(me, g, 1) + y;
     adopted[g] = true
#ifdef SPLIT
  :: kind == LANE -> reader[1] = me
  :: kind == CONTRIB || kind == GIVEBACK ->
     PART(me, 0, 0) = PART(me, 0, 0) + x;
     PART(me, 0, 1) = PART(me, 0, 1) + y;
     done = (z > done -> z : done);
     if :: !fenced && done > WM(me, 1) -> WM(me, 1) = done :: else fi;
     if :: kind == GIVEBACK -> reader[1] = me; split_state = false :: else fi
  :: kind == RECALL ->
     reader[1] = NOBODY;
     ring[me * 3 + from]!GIVEBACK, 0, 0, 0, received[1];
     leaving = true
#endif
  fi;
  kind = 0; g = 0; x = 0; y = 0; z = 0
}

proctype worker(byte me) {
  byte s, e, g, x, y, z, to;
  mtype kind;
  do
  :: atomic { CAN_RECEIVE(0) -> receive(0) }
  :: atomic { CAN_RECEIVE(1) -> receive(1) }
  :: atomic { nempty(queue[AT(me, 0)]) -> process(0) }
  :: atomic { MAY_FIRE(me, 0) -> fire(0) }
  :: atomic { own[AT(me, 0)] && order[0] != 0 -> sweep(0) }
  :: atomic { CAN_DRAIN(0) -> drained_first(0) }
  :: atomic { drain[AT(me, 0)] > 10 -> drained_second(0) }
#if GROUPS == 2
  :: atomic { CAN_RECEIVE(2) -> receive(2) }
  :: atomic { nempty(queue[AT(me, 1)]) -> process(1) }
  :: atomic { MAY_FIRE(me, 1) -> fire(1) }
  :: atomic { own[AT(me, 1)] && order[1] != 0 -> sweep(1) }
  :: atomic { CAN_DRAIN(1) -> drained_first(1) }
  :: atomic { drain[AT(me, 1)] > 10 -> drained_second(1) }
#endif
  :: atomic { snapshot[me] != flags -> snapshot[me] = flags }       /* a quiescent point */
  :: atomic { handed[me]?s -> take_socket(s); s = 0 }
  :: atomic { nempty(ring[0 + me]) -> read_ring(0) }
  :: atomic { nempty(ring[3 + me]) -> read_ring(1) }
#if WORKERS == 3
  :: atomic { nempty(ring[6 + me]) -> read_ring(2) }
#endif
#ifdef SPLIT
  :: atomic { split_order == 1 && own[AT(me, 0)] && reader[1] == me && nfull(queue[AT(me, 0)]) ->
       split_order = 0; split_state = true; reader[1] = NOBODY; done = 0;
       ring[me * 3 + 1 - me]!LANE, 0, 0, 0, 0;
#ifndef M_NO_FENCE
       queue[AT(me, 0)]!1, FENCE; fenced = true
#endif
     }
  :: atomic { split_order == 2 && own[AT(me, 0)] && split_state ->
       split_order = 0; ring[me * 3 + 1 - me]!RECALL, 0, 0, 0, 0 }
  :: atomic { leaving && empty(queue[AT(me, 0)]) && !own[AT(me, 0)] && !left ->
       left = true; ring[me * 3 + 1 - me]!DRAINED, 0, PART(me, 0, 0), PART(me, 0, 1), 0;
       PART(me, 0, 0) = 0; PART(me, 0, 1) = 0; WM(me, 1) = 0 }
  :: atomic { left && !own[AT(me, 0)] -> left = false; leaving = false; subtract(0) }
#endif
  od
}

#if WORKERS == 3
#define GRACE(g) (FLAGGED(snapshot[0], g) && FLAGGED(snapshot[1], g) && FLAGGED(snapshot[2], g))
#else
#define GRACE(g) (FLAGGED(snapshot[0], g) && FLAGGED(snapshot[1], g))
#endif

inline open_now(w, g) {
  open_windows[g] = open_windows[g] | (PART(w, g, 0) > 0 -> 1 : 0) | (PART(w, g, 1) > 0 -> 2 : 0)
}

inline raise_flag(g) {               /* step 1 */
  atomic {
#ifdef M_SECOND_MOVE_EARLY
    counter[g]++;                    /* even with a counter that adds up */
#else
    counter[g] = 1;
#endif
    adopted[g] = false; flags = flags | (1 << g);
#ifdef M_OPEN_ONLY
    open_windows[g] = 0; open_now(0, g); open_now(1, g);
#endif
  }
#ifndef M_NO_GRACE
  atomic { GRACE(g) -> skip };
#endif
}
inline settle(g) {                   /* step 5: the flag falls when all has been adopted *and* counted */
#ifdef M_CLEAR_BEFORE_COUNT
  atomic { adopted[g] -> flags = flags & ~(1 << g); adopted[g] = false }
#else
  atomic { adopted[g] && counter[g] == 0 -> flags = flags & ~(1 << g); adopted[g] = false }
#endif
}

inline order_move(g) {
  atomic { placement[g] = (placement[g] + 1) % WORKERS; order[g] = placement[g] + 1 }
}

/* One per group, because the balancer interleaves the moves of different groups as it likes. */
proctype mover(byte g) {
  byte n = 0;
  do
  :: n < MOVES && (g == 0 || n == 0) ->
     raise_flag(g);
     order_move(g);
#ifdef M_SECOND_MOVE_EARLY
     atomic { order[g] == 0 -> n++ }
#else
     settle(g);
     n++
#endif
  :: else -> break
  od;
#ifdef M_SECOND_MOVE_EARLY
  settle(g);
#endif
  finished++
}

#ifdef SPLIT
proctype splitter() {
  atomic { flags = 1; counter[0] = 0 };
  atomic { GRACE(0) -> split_order = 1 };
  if
  :: atomic { split_order == 0 -> counter[0] = 1; adopted[0] = false; split_order = 2 };
     settle(0);
     if
     :: raise_flag(0); order_move(0); settle(0)       /* and it moves */
     :: skip
     fi
  :: skip                             /* or it stays split for good */
  fi;
  finished++
}
#endif

proctype acceptor() {                /* reads the placement, and hands over later: by then it may be another */
  byte where;
  where = placement[0];
  handed[where]!1
}

proctype monitor() {
  timeout ->
  assert(fired[0] == WINDOWS && position[0] == script_length[0] && position[1] == script_length[1]);
#if GROUPS == 2
  assert(fired[1] == WINDOWS && position[2] == script_length[2]);
#endif
#ifdef SPLIT
  assert(finished == 1)
#else
  assert(finished == GROUPS && flags == 0 && counter[0] == 0 && counter[1] == 0)
#endif
}

init {
  atomic {
    script[0] = 1; script[1] = 11; script[2] = 2; script[3] = 12; script_length[0] = 4;
    script[4] = 2; script[5] = 1; script[6] = 12; script_length[1] = 3;       /* out of order */
    expected[0] = 2; expected[1] = 2;
    own[AT(0, 0)] = true; owners[0] = 1; reader[0] = 0; reader[1] = NOBODY; reader[2] = NOBODY;
#if GROUPS == 2
    script[8] = 2; script[9] = 12; script_length[2] = 2;                      /* a window that nobody opens */
    expected[3] = 1;
    own[AT(1, 1)] = true; owners[1] = 1; placement[1] = 1; reader[2] = 1;
    run mover(1);
#endif
    run worker(0); run worker(1);
#if WORKERS == 3
    run worker(2);
#endif
#ifdef SPLIT
    reader[1] = 0;
    run splitter();
#else
    run mover(0);
    run acceptor();
#endif
    run monitor()
  }
}
