/* A move of a group whose state needs the order of its rows (order_hash), for spin. See README.md beside it.
 *
 * Guarantees checked: every fold takes a session's rows in the order of their sequence, on one partial at a time; no
 * row lost, none counted twice, none after its window fired, each window fired exactly once, no deadlock (when nothing
 * can happen any more, the monitor asserts that everything has).
 * Assumes: sequential consistency, rings that never block, and the grace period: flags are seen at once here, what
 * happens when they are not is in migration.pml.
 *
 * Session 0 has a socket, which may break once, at any time, and comes back by the acceptor; session 1 is fed, so that
 * its rows wait in a queue. Configurations: MOVES (there and back and there ...), BREAKS, FEEDS. Mutants: M_..., each
 * of which must fail.
 */
#ifndef MOVES
#define MOVES 2
#endif
#define WINDOWS 2
#define NOBODY 9
#define OTHER(w) (1 - (w))

mtype = { ADOPT, SOCKET, DRAINED, SWEEP, CONNECTION, ROW, WATERMARK, DRAIN_POINT };

/* What a session sends. Row k of window n: 2 * n + k, k = 1 or 2; watermark n (windows below n are over): 10 + n. */
#define LENGTH 6
#define IS_WATERMARK(e) ((e) > 10)
/* What session 1 is fed. */
#ifndef FEEDS
#define FEEDS 5
#endif
#if FEEDS == 5
#define FED(at) ((at) == 0 -> 1 : ((at) == 1 -> 3 : ((at) == 2 -> 2 : ((at) == 3 -> 11 : 12))))
#define FED_ROWS(n) ((n) == 0 -> 2 : 1)
#else
#define FED(at) ((at) == 0 -> 1 : 12)
#define FED_ROWS(n) ((n) == 0 -> 1 : 0)
#endif
#define WINDOW_OF(e) (((e) - 1) / 2)
#define NUMBER_OF(e) (((e) - 1) % 2 + 1)
#define ELEMENT(at) ((at) == 0 -> 1 : ((at) == 1 -> 3 : ((at) == 2 -> 2 : ((at) == 3 -> 11 : ((at) == 4 -> 4 : 12)))))

/* Shared between threads. */
bool flag = false;
byte counter = 0;
byte placement = 0;
byte routing = 0;                            /* the lock: nobody, feeder or mover */
chan mailbox[2] = [3] of { mtype, byte };
chan feeds[2] = [3] of { mtype, byte };
chan ring[2] = [4] of { mtype, byte, byte, byte, byte };        /* to the worker */

/* The parcel of the move under way: it belongs to whoever has it in hand. */
byte parcel_connections = 0;                 /* bit per connection */
byte parcel_next = 0;
byte parcel_watermarks = 0;                  /* 2 bits per session */
byte parcel_fired = 0;
bool parcel_drained = false;
bool parcel_done = false;

/* One worker's own. */
bool owned[2];
bool awaiting[2];                            /* adopted, and DRAINED is not here yet */
bool adopting[2];                            /* has the parcel */
byte parked[2];                              /* bit per connection */
byte connection[2];                          /* that it serves, + 1 */
byte next_row[2];                            /* of session 0 */
byte wm[4];                                  /* [worker][session] */
byte fired[2];                               /* position of the owner */
byte fold[8];                                /* [worker][window][session]: the last row of the partial */
#define FOLD(w, n, s) fold[((w) * 2 + (n)) * 2 + (s)]
#define WM(w, s) wm[(w) * 2 + (s)]
#define REACHED(w) (WM(w, 0) < WM(w, 1) -> WM(w, 0) : WM(w, 1))
#define OWED(w) (flag && (awaiting[w] || counter != 0))
#define NO_PARTIAL(w) (fold[(w) * 4] == 0 && fold[(w) * 4 + 1] == 0 && fold[(w) * 4 + 2] == 0 && fold[(w) * 4 + 3] == 0)

/* Connections of session 0: 0, and 1 when that is broken. */
byte position[2];
bool broken = false;

/* Ghosts. */
byte emitted[2];
byte owners = 1;
bool moved = false;
bool fed = false;

inline fold_row(s, e) {
  assert(WINDOW_OF(e) >= fired[me]);                                    /* never after its window */
  assert(NUMBER_OF(e) == FOLD(me, WINDOW_OF(e), s) + 1);                /* behind the row before it, on its partial */
  FOLD(me, WINDOW_OF(e), s) = NUMBER_OF(e)
}

inline take(s, e) {
  if
  :: IS_WATERMARK(e) -> WM(me, s) = (e - 10 > WM(me, s) -> e - 10 : WM(me, s))
  :: else -> fold_row(s, e)
  fi
}

#define SERVES(c) (connection[me] == (c) + 1)
inline receive(c) {
  e = ELEMENT(position[c]);
  assert(position[c] == next_row[me]);                                  /* none lost, none twice */
  position[c]++;
  next_row[me]++;
  take(0, e);
  e = 0
}

inline serve_from_now(c) {                   /* an older connection is fenced; this one is told the row that is wanted */
  connection[me] = c + 1;
  if :: c == 1 && position[1] == 9 -> position[1] = next_row[me] :: else fi
}

#ifdef M_PARKED_SERVED
#define WAITS_FOR_ORDER(w) false
#else
#define WAITS_FOR_ORDER(w) awaiting[w]
#endif
inline take_socket(c) {
  if
  :: owned[me] && WAITS_FOR_ORDER(me) -> parked[me] = parked[me] | (1 << c)
  :: owned[me] && !WAITS_FOR_ORDER(me) -> serve_from_now(c)
  :: !owned[me] && placement == me -> parked[me] = parked[me] | (1 << c)
  :: else -> ring[OTHER(me)]!SOCKET, c, 0, 0, 0
  fi
}
inline take_parked() {
  if
  :: parked[me] == 2 -> parked[me] = 0; take_socket(1)
  :: else -> assert(parked[me] == 0)         /* the first connection never comes by the acceptor here */
  fi
}
inline take_over() {                         /* the connections of the parcel */
  if :: parcel_connections == 1 -> serve_from_now(0)
     :: parcel_connections == 2 -> serve_from_now(1)
     :: else
  fi;
  parcel_connections = 0
}

/* The old owner. */
inline sweep() {
  owned[me] = false;
  owners--;
  parcel_connections = connection[me];       /* 1 and 2 as a bit each */
  connection[me] = 0;
#ifdef M_NEXT_ROW_STAYS
  parcel_next = 0;
#else
  parcel_next = next_row[me];
#endif
  parcel_watermarks = WM(me, 0) | (WM(me, 1) << 2);
  parcel_fired = fired[me];
  next_row[me] = 0;
  ring[OTHER(me)]!ADOPT, 0, 0, 0, 0
}
inline drain() {                             /* the panes by pointer; then it counts itself out */
  ring[OTHER(me)]!DRAINED, FOLD(me, 0, 0), FOLD(me, 0, 1), FOLD(me, 1, 0), FOLD(me, 1, 1);
  FOLD(me, 0, 0) = 0; FOLD(me, 0, 1) = 0; FOLD(me, 1, 0) = 0; FOLD(me, 1, 1) = 0;
  fired[me] = 0;
  counting = true
}

/* The new owner. */
inline adopt() {
  owned[me] = true;
  owners++;
  assert(owners == 1);
  awaiting[me] = true;
  adopting[me] = true;
  next_row[me] = parcel_next;
  fired[me] = parcel_fired;
  WM(me, 0) = ((parcel_watermarks & 3) > WM(me, 0) -> parcel_watermarks & 3 : WM(me, 0));
  WM(me, 1) = ((parcel_watermarks >> 2) > WM(me, 1) -> parcel_watermarks >> 2 : WM(me, 1));
#ifdef M_READS_BEFORE_DRAINED
  take_over();
#endif
  take_parked()
}
inline absorb() {
  assert(NO_PARTIAL(me));                    /* never two partials: there is no order between their rows */
  FOLD(me, 0, 0) = parcel_fold[0]; FOLD(me, 0, 1) = parcel_fold[1];
  FOLD(me, 1, 0) = parcel_fold[2]; FOLD(me, 1, 1) = parcel_fold[3];
  parcel_fold[0] = 0; parcel_fold[1] = 0; parcel_fold[2] = 0; parcel_fold[3] = 0;
  parcel_drained = false;
  awaiting[me] = false
}
byte parcel_fold[4];

inline read_ring() {
  ring[me]?kind, a, b, c, d;
  if
  :: kind == ADOPT -> adopt()
  :: kind == SOCKET -> take_socket(a)
  :: kind == DRAINED ->
     parcel_fold[0] = a; parcel_fold[1] = b; parcel_fold[2] = c; parcel_fold[3] = d;
     parcel_drained = true;
#ifdef M_SOCKETS_BEFORE_PANES
     take_over()                             /* there may be no memory for the panes yet */
#endif
  fi;
  kind = 0; a = 0; b = 0; c = 0; d = 0
}

/* A fed row is for the group's owner, when it has what was before it. */
#ifdef M_FEEDS_BEFORE_DRAINED
#define HELD_BACK(w) (!owned[w] && placement == (w))
#elif defined(M_FEEDS_BEFORE_ADOPT)
#define HELD_BACK(w) (owned[w] && awaiting[w])
#else
#define HELD_BACK(w) ((owned[w] && awaiting[w]) || (!owned[w] && placement == (w)))
#endif
#define FEED_READY(w) (nempty(feeds[w]) && empty(mailbox[w]) && (!HELD_BACK(w) || !feeds[w]?[ROW]))

#define MAY_FIRE(w) (owned[w] && fired[w] < REACHED(w) && !OWED(w))
inline fire() {
  assert(FOLD(me, fired[me], 0) == 2 && FOLD(me, fired[me], 1) == FED_ROWS(fired[me]));     /* all of them, in order */
  emitted[fired[me]]++;
  assert(emitted[fired[me]] == 1);
  FOLD(me, fired[me], 0) = 0; FOLD(me, fired[me], 1) = 0;
  fired[me]++
}

proctype worker(byte me) {
  byte e, a, b, c, d;
  mtype kind;
  bool counting;
  do
  :: atomic { SERVES(0) && position[0] < LENGTH -> receive(0) }
  :: atomic { SERVES(1) && position[1] < LENGTH -> receive(1) }
  :: atomic { SERVES(0) && broken -> connection[me] = 0 }               /* the end of what had been sent */
  :: atomic { mailbox[me]?SWEEP, a -> sweep() }
  :: atomic { mailbox[me]?CONNECTION, a -> take_socket(a); a = 0 }
  :: atomic { mailbox[me]?DRAIN_POINT, a -> drain() }
  :: atomic { FEED_READY(me) && !counting ->
       feeds[me]?kind, e;
       if
       :: kind == DRAIN_POINT -> drain()
       :: else -> take(1, e)
       fi;
       kind = 0; e = 0 }
  :: atomic { counting -> counting = false; assert(counter > 0); counter-- }
  :: atomic { nempty(ring[me]) && empty(mailbox[me]) -> read_ring() }
  :: atomic { adopting[me] && parcel_drained && awaiting[me] -> absorb(); take_over(); take_parked() }
  :: atomic { adopting[me] && !awaiting[me] && counter == 0 && !MAY_FIRE(me) -> adopting[me] = false; parcel_done = true }
  :: atomic { MAY_FIRE(me) -> fire() }
  od
}

proctype mover() {
  byte n;
  do
  :: n < MOVES ->
     atomic { counter = 1; parcel_done = false; flag = true };
#ifndef M_FEEDS_UNROUTED
     atomic { routing == 0 -> routing = 1 };
#endif
     placement = OTHER(placement);
     mailbox[OTHER(placement)]!SWEEP, 0;
#ifdef M_DRAIN_OVERTAKES_FEEDS
     mailbox[OTHER(placement)]!DRAIN_POINT, 0;
#else
     feeds[OTHER(placement)]!DRAIN_POINT, 0;
#endif
#ifndef M_FEEDS_UNROUTED
     routing = 0;
#endif
     atomic { parcel_done -> flag = false; n++ }
  :: else -> break
  od;
  moved = true
}

proctype feeder() {
  byte at, to;
  do
  :: at < FEEDS ->
     if
     :: FED(at) > 10 ->                      /* a promise goes to all, behind the rows that each was given */
        feeds[0]!WATERMARK, FED(at);
        feeds[1]!WATERMARK, FED(at)
     :: else ->
#ifdef M_FEEDS_UNROUTED
        to = placement;
        feeds[to]!ROW, FED(at)
#else
        atomic { routing == 0 -> routing = 2; to = placement };
        feeds[to]!ROW, FED(at);
        routing = 0
#endif
     fi;
     to = 0;
     at++
  :: else -> break
  od;
  fed = true
}

#ifdef BREAKS
proctype producer() {                        /* reads the placement, and hands the new socket over later */
  byte where;
  broken = true;
  where = placement;
  mailbox[where]!CONNECTION, 1
}
#endif

proctype monitor() {
  timeout ->
  assert(emitted[0] == 1 && emitted[1] == 1 && moved && fed && !flag && counter == 0);
  assert(owners == 1 && NO_PARTIAL(0) && NO_PARTIAL(1))
}

init {
  atomic {
    owned[0] = true;
    connection[0] = 1;
    position[1] = 9;                         /* not opened */
    run worker(0); run worker(1); run mover(); run feeder();
#ifdef BREAKS
    run producer();
#endif
    run monitor()
  }
}
