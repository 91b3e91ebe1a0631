/* Further lanes of a split group, their slots and connections, for spin. See README.md beside it.
 *
 * A producer spreads the rows of a group over its first connection (slot 0) and a further lane (slot 1), each with row
 * numbers of its own. The owner lends one of them, the borrower sends shares and gives it back; meanwhile the lane
 * opens, ends, breaks, or has its slot used again, whenever it likes.
 * Guarantees checked: no row lost, none counted twice, none after its window fired, each window fired exactly once,
 * every connection served by one worker, and the slot's by the one that answers for it; no deadlock (when nothing can
 * happen any more, the monitor asserts that everything has).
 * Assumes: sequential consistency, rings that never block, flags that are seen at once (the grace period is in
 * migration.pml), and that a message is read behind the orders that were posted before it was sent (run_peers).
 *
 * Configurations: BREAKS (the lane's connection breaks once), REUSE (the slot goes to the next lane, and there is
 * with SPLITS=2 a second split), MOVE (the group moves when it is joined). Mutants: M_..., each of which must fail.
 */
#ifndef SPLITS
#define SPLITS 1
#endif
#define NOBODY 9
#define OTHER(w) (1 - (w))
#define AT(w, s) ((w) * 2 + (s))

mtype = { REGISTER, FREE, CONNECTION, LEND, RECALL, SWEEP, BORROW, SHARE, GIVE_BACK, SOCKET, ADOPT, DRAINED };

/* What lane l carries: row of window n = 1 + n, watermark 1 (window 0 is over) = 11, EOS = 13. */
#define END 3
#define IS_PROMISE(e) ((e) > 10)
#define ROOM 5
byte content[15];
byte length[3];
bool linked[3];                              /* gets rows */
bool retired[3];                             /* got its EOS */
#define LANE_OF(c) ((c) == 0 -> 0 : LANE_OF_LAST(c))
#ifdef REUSE
#define LANE_OF_LAST(c) (c)                  /* connection 2 is the next lane's */
#else
#define LANE_OF_LAST(c) 1                    /* connection 2 is the lane's second */
#endif
#define SLOT_OF(c) ((c) == 0 -> 0 : 1)
byte rows = 0;                               /* put so far */
bool promised = false;
bool closed = false;

/* Connections: 0 of the first lane, 1 of the further lane, 2 of the same or of the next. */
byte position[3];                            /* next element: the decoder's */
byte reader[3];                              /* whose epoll has it */
bool answered[3];                            /* HELLO has its ACK */
byte cut = NOBODY;                           /* connection 1 is broken: what had been sent by then */
#define LIMIT(c) ((c) == 1 && cut != NOBODY -> cut : length[LANE_OF(c)])
#define SAID_EOS(c) (position[c] > 0 && content[LANE_OF(c) * ROOM + position[c] - 1] == 13)

/* Shared between threads. */
byte placement = 0;
chan mailbox[2] = [6] of { mtype, byte, byte };
chan ring[2] = [4] of { mtype, byte, byte, byte };               /* to the worker */

/* The parcel of the split or of its end, and that of the move. */
byte loan_slot = 0;
byte loan_connection = 0;                    /* + 1 */
byte loan_number = 0;
byte loan_watermark = 0;
byte loan_next = 0;
byte loan_fired = 0;
bool loan_lent = false;
bool loan_done = false;

/* One worker's own; [worker][slot]. */
bool owned[2];
byte fired[2];
byte part[4];                                /* [worker][window] */
bool live[4];
byte number[4];                              /* the slot's session */
byte watermark[4];
byte next_row[4];
byte connection[4];                          /* + 1 */
bool lent[4];
bool borrowed[4];
bool counted[4];
bool ends_due[2];
byte shared_until[2];
bool recalled[2];
#ifdef MOVE
bool flag = false;
byte counter = 0;
bool awaiting[2];
byte parked = 0;                             /* worker + 1 that keeps connection 2, or 1 */
byte parked_connection = 0;
byte moved_connection[2];
byte moved_number[2];
byte moved_watermark[2];
byte moved_next[2];
bool moved_counted[2];
bool draining[2];
bool move_done = false;
#endif

/* Ghosts. */
byte emitted[2];
byte ended = 0;                              /* the book: the slot's session of this number has ended everywhere */
bool booked = false;
bool settled = false;

/* Firing */

#define COUNTS(w, s) (live[AT(w, s)] && watermark[AT(w, s)] != END)
#define REACHED(w) (COUNTS(w, 0) && COUNTS(w, 1) -> (watermark[AT(w, 0)] < watermark[AT(w, 1)] -> watermark[AT(w, 0)] : watermark[AT(w, 1)]) : \
  (COUNTS(w, 0) -> watermark[AT(w, 0)] : (COUNTS(w, 1) -> watermark[AT(w, 1)] : END)))
#ifdef MOVE
#define OWED(w) (flag && (awaiting[w] || counter != 0))
#else
#define OWED(w) false
#endif
#ifndef ROWS
#define ROWS 3                               /* the last one is of window 1 */
#endif
#define EXPECTED(n) ((n) == 0 -> ROWS - 1 : 1)
inline fire(n) {
  assert(part[AT(me, n)] == EXPECTED(n));    /* none lost, none twice */
  emitted[n]++;
  assert(emitted[n] == 1);
  part[AT(me, n)] = 0;
  fired[me] = n + 1
}
inline count_end(s) {
  if
  :: watermark[AT(me, s)] == END && !counted[AT(me, s)] ->
     counted[AT(me, s)] = true;
     if :: s == 1 -> ended = number[AT(me, s)] :: else fi
  :: else
  fi
}
inline advance() {
  if
  :: owned[me] && !OWED(me) ->
     if :: fired[me] == 0 && REACHED(me) >= 1 -> fire(0) :: else fi;
     if :: fired[me] == 1 && REACHED(me) >= 2 -> fire(1) :: else fi;
     if :: ends_due[me] -> ends_due[me] = false; count_end(0); count_end(1) :: else fi
  :: !owned[me] && (borrowed[AT(me, 0)] || borrowed[AT(me, 1)]) -> contribute(false)
  :: else
  fi
}
inline note(s, value) {
  if
  :: value > watermark[AT(me, s)] ->
     watermark[AT(me, s)] = value;
     if :: value == END && owned[me] -> ends_due[me] = true :: else fi
  :: else
  fi
}

/* Connections */

inline detach(c) {
  reader[c] = NOBODY;
  if :: connection[AT(me, SLOT_OF(c))] == c + 1 ->
        connection[AT(me, SLOT_OF(c))] = 0; next_row[AT(me, SLOT_OF(c))] = position[c]
     :: else
  fi
}
inline attach(c) {
  assert(connection[AT(me, SLOT_OF(c))] == 0);                          /* one that is served is not forgotten */
  connection[AT(me, SLOT_OF(c))] = c + 1;
  assert(reader[c] == NOBODY);
  reader[c] = me
}
#define NUMBER_OF(c) (SLOT_OF(c) == 0 -> 1 : LANE_OF(c))
inline take_over(c) {                        /* of a parcel */
#ifndef M_STALE_CONNECTION
  if
  :: number[AT(me, SLOT_OF(c))] != NUMBER_OF(c) || !live[AT(me, SLOT_OF(c))] -> skip      /* another session has the slot: closed */
  :: else -> attach(c)
  fi
#else
  attach(c)
#endif
}
inline add_connection(c) {
  assert(live[AT(me, SLOT_OF(c))] && number[AT(me, SLOT_OF(c))] == NUMBER_OF(c));
  if
  :: connection[AT(me, SLOT_OF(c))] != 0 ->                            /* fenced */
     old = connection[AT(me, SLOT_OF(c))] - 1; detach(old); old = 0
  :: else
  fi;
  position[c] = next_row[AT(me, SLOT_OF(c))];
  attach(c);
  answered[c] = true
}
inline take_socket(c) {
  if
  :: borrowed[AT(me, SLOT_OF(c))] || (owned[me] && !lent[AT(me, SLOT_OF(c))]) -> add_connection(c)
#ifdef M_LENT_SOCKET_SERVED
  :: owned[me] && lent[AT(me, SLOT_OF(c))] -> add_connection(c)
#else
  :: owned[me] && lent[AT(me, SLOT_OF(c))] -> ring[OTHER(me)]!SOCKET, c, 0, 0
#endif
#ifdef MOVE
  :: !owned[me] && !borrowed[AT(me, SLOT_OF(c))] && placement == me ->
     assert(parked == 0); parked = me + 1; parked_connection = c
#endif
  :: !owned[me] && !borrowed[AT(me, SLOT_OF(c))] && placement != me -> ring[OTHER(me)]!SOCKET, c, 0, 0
  fi
}
inline receive(c) {
  e = content[LANE_OF(c) * ROOM + position[c]];
  position[c]++;
  if
  :: IS_PROMISE(e) ->
     if :: !lent[AT(me, SLOT_OF(c))] -> note(SLOT_OF(c), e - 10) :: else fi;
     e = 0;
     advance()
  :: else ->
     assert(e - 1 >= fired[me]);             /* never after its window */
     part[AT(me, e - 1)]++;
     e = 0
  fi
}

/* Orders of the book */

inline forget_loan(s) { lent[AT(me, s)] = false; borrowed[AT(me, s)] = false }
inline register(s, life) {
  watermark[AT(me, s)] = 0; next_row[AT(me, s)] = 0; connection[AT(me, s)] = 0; counted[AT(me, s)] = false;
  forget_loan(s);
  live[AT(me, s)] = true;
  number[AT(me, s)] = life
}
inline free(s) {
  if
  :: connection[AT(me, s)] != 0 ->
     if
     :: SAID_EOS(connection[AT(me, s)] - 1) -> connection[AT(me, s)] = 0      /* closing is the producer's turn */
     :: else -> old = connection[AT(me, s)] - 1; detach(old); old = 0
     fi
  :: else
  fi;
  forget_loan(s);
  live[AT(me, s)] = false
}

/* Splits */

#define CAN_LEND(s) (connection[AT(me, s)] != 0 && !SAID_EOS(connection[AT(me, s)] - 1))
inline lend(s) {
  loan_slot = s;
  loan_connection = connection[AT(me, s)];
  old = loan_connection - 1; detach(old); old = 0;
  loan_number = number[AT(me, s)];
  loan_watermark = watermark[AT(me, s)];
  loan_next = next_row[AT(me, s)];
  loan_fired = fired[me];
  lent[AT(me, s)] = true;
  ring[OTHER(me)]!BORROW, 0, 0, 0
}
inline borrow() {
  if
  :: number[AT(me, loan_slot)] <= loan_number ->          /* or another session has the slot by now */
     borrowed[AT(me, loan_slot)] = true;
     next_row[AT(me, loan_slot)] = loan_next;
     note(loan_slot, loan_watermark);
     shared_until[me] = 0;
     fired[me] = loan_fired
  :: else
  fi;
  take_over(loan_connection - 1);
  loan_connection = 0; loan_number = 0; loan_watermark = 0; loan_next = 0; loan_fired = 0;
  loan_done = true
}

/* The least of what is borrowed, of which there is one slot at a time. */
#define BORROWED_WATERMARK(w) (borrowed[AT(w, 0)] -> watermark[AT(w, 0)] : (borrowed[AT(w, 1)] -> watermark[AT(w, 1)] : END))
#define BORROWED_SLOT(w) (borrowed[AT(w, 0)] -> 1 : (borrowed[AT(w, 1)] -> 2 : 0))
inline contribute(everything) {
  least = BORROWED_WATERMARK(me);
  if
  :: everything || (least != shared_until[me] && least != 0) ->
     first = (everything || least >= 1 -> part[AT(me, 0)] : 0);
     second = (everything || least == END -> part[AT(me, 1)] : 0);
     part[AT(me, 0)] = part[AT(me, 0)] - first;
     part[AT(me, 1)] = part[AT(me, 1)] - second;
#ifdef M_PROMISE_BEFORE_PANES
     ring[OTHER(me)]!SHARE, 0, 0, BORROWED_SLOT(me) * 4 + least;
     ring[OTHER(me)]!SHARE, first, second, 0;
#else
     ring[OTHER(me)]!SHARE, first, second, BORROWED_SLOT(me) * 4 + least;
#endif
     shared_until[me] = least;
     if :: least != END && least > fired[me] -> fired[me] = least :: else fi    /* what is late here from now on */
  :: else
  fi;
  first = 0; second = 0; least = 0
}
inline absorb_share() {
  part[AT(me, 0)] = part[AT(me, 0)] + c;
  part[AT(me, 1)] = part[AT(me, 1)] + x;
#ifdef M_STALE_SHARE
  if :: y >= 4 -> note((y / 4) - 1, y % 4) :: else fi;
#else
  if :: y >= 4 && lent[AT(me, (y / 4) - 1)] -> note((y / 4) - 1, y % 4) :: else fi;
#endif
  advance()
}
inline give_back() {
  recalled[me] = false;
#ifndef M_PANES_STAY
  if
  :: borrowed[AT(me, 0)] || borrowed[AT(me, 1)] || part[AT(me, 0)] > 0 || part[AT(me, 1)] > 0 -> contribute(true)
  :: else
  fi;
#endif
  if
  :: borrowed[AT(me, loan_slot)] ->
     loan_connection = connection[AT(me, loan_slot)];
     if :: loan_connection != 0 -> old = loan_connection - 1; detach(old); old = 0 :: else fi;
     loan_lent = true;
#ifndef M_NEXT_ROW_STAYS
     loan_next = next_row[AT(me, loan_slot)];
#endif
     borrowed[AT(me, loan_slot)] = false
  :: else
  fi;
  fired[me] = 0; shared_until[me] = 0;
  ring[OTHER(me)]!GIVE_BACK, 0, 0, 0
}
inline take_back() {
  if
  :: lent[AT(me, loan_slot)] ->
     lent[AT(me, loan_slot)] = false;
     if :: loan_lent -> next_row[AT(me, loan_slot)] = loan_next :: else fi
  :: else
  fi;
  if :: loan_connection != 0 -> take_over(loan_connection - 1) :: else fi;
  loan_connection = 0; loan_next = 0; loan_lent = false; loan_slot = 0;
  loan_done = true
}

/* Moves */

#ifdef MOVE
inline sweep_slot(s) {
  moved_connection[s] = connection[AT(me, s)];
  if :: moved_connection[s] != 0 -> old = moved_connection[s] - 1; detach(old); old = 0 :: else fi;
  moved_number[s] = number[AT(me, s)];
  moved_watermark[s] = watermark[AT(me, s)];
  moved_next[s] = next_row[AT(me, s)];
  moved_counted[s] = counted[AT(me, s)]
}
inline sweep() {
  owned[me] = false; ends_due[me] = false;
  sweep_slot(0); sweep_slot(1);
  loan_fired = fired[me];
  draining[me] = true;
  ring[OTHER(me)]!ADOPT, 0, 0, 0
}
inline adopt_slot(s) {
  if
  :: number[AT(me, s)] <= moved_number[s] ->
     note(s, moved_watermark[s]);
     next_row[AT(me, s)] = moved_next[s];
     counted[AT(me, s)] = moved_counted[s]
  :: else
  fi;
  if :: moved_connection[s] != 0 -> take_over(moved_connection[s] - 1) :: else fi;
  moved_connection[s] = 0; moved_number[s] = 0; moved_watermark[s] = 0; moved_next[s] = 0; moved_counted[s] = false
}
inline adopt() {
  awaiting[me] = true;
  fired[me] = loan_fired; loan_fired = 0;
  adopt_slot(0); adopt_slot(1);
  ends_due[me] = true;
  owned[me] = true;
  if :: parked == me + 1 -> parked = 0; c = parked_connection; parked_connection = 0; take_socket(c); c = 0 :: else fi
}
#endif

inline obey() {
  mailbox[me]?kind, c, x;
  if
  :: kind == REGISTER -> register(c, x)
  :: kind == FREE -> free(c)
  :: kind == CONNECTION -> take_socket(c)
  :: kind == LEND ->
     if
     :: CAN_LEND(0) && CAN_LEND(1) -> lend(1)
     :: CAN_LEND(0) && CAN_LEND(1) -> lend(0)
     :: else -> loan_done = true             /* one connection is one worker's */
     fi
  :: kind == RECALL -> recalled[me] = true
#ifdef MOVE
  :: kind == SWEEP -> sweep()
#endif
  fi;
  kind = 0; c = 0; x = 0
}

/* Between the look at the mailbox and the look at the ring only orders can come, and these commute with the message. */
#ifdef M_MESSAGE_BEFORE_ORDERS
#define MAY_READ(w) nempty(ring[w])
#else
#define MAY_READ(w) (nempty(ring[w]) && empty(mailbox[w]))
#endif

inline read_ring() {
  ring[me]?kind, c, x, y;
  if
  :: kind == BORROW -> borrow()
  :: kind == SHARE -> absorb_share()
  :: kind == GIVE_BACK -> take_back()
  :: kind == SOCKET -> take_socket(c)
#ifdef MOVE
  :: kind == ADOPT -> adopt()
  :: kind == DRAINED ->
     part[AT(me, 0)] = part[AT(me, 0)] + c; part[AT(me, 1)] = part[AT(me, 1)] + x;
     awaiting[me] = false
#endif
  fi;
  kind = 0; c = 0; x = 0; y = 0
}

proctype worker(byte me) {
  byte c, x, y, e, old, least, first, second;
  mtype kind;
  do
  :: atomic { reader[0] == me && position[0] < LIMIT(0) -> receive(0) }
  :: atomic { reader[1] == me && position[1] < LIMIT(1) -> receive(1) }
  :: atomic { reader[2] == me && position[2] < LIMIT(2) -> receive(2) }
  :: atomic { reader[1] == me && (cut != NOBODY || SAID_EOS(1)) -> detach(1) }    /* the peer has closed */
  :: atomic { reader[2] == me && SAID_EOS(2) -> detach(2) }
  :: atomic { nempty(mailbox[me]) -> obey() }
  :: atomic { MAY_READ(me) -> read_ring() }
  :: atomic { recalled[me] -> give_back() }
#ifdef MOVE
  :: atomic { draining[me] -> draining[me] = false;
       ring[OTHER(me)]!DRAINED, part[AT(me, 0)], part[AT(me, 1)], 0;
       part[AT(me, 0)] = 0; part[AT(me, 1)] = 0; fired[me] = 0; counter-- }
  :: atomic { owned[me] && flag && !awaiting[me] && counter == 0 && !move_done -> advance(); move_done = true }
#endif
  od
}

proctype mover() {
  mailbox[placement]!LEND, 0, 0;
  atomic { loan_done -> loan_done = false };
  mailbox[OTHER(placement)]!RECALL, 0, 0;
  atomic { loan_done -> loan_done = false };
#if SPLITS == 2
  mailbox[placement]!LEND, 0, 0;
  atomic { loan_done -> loan_done = false };
  mailbox[OTHER(placement)]!RECALL, 0, 0;
  atomic { loan_done -> loan_done = false };
#endif
#ifdef MOVE
  atomic { counter = 1; flag = true };
  atomic { placement = 1; mailbox[0]!SWEEP, 0, 0 };
  atomic { move_done -> flag = false };
#endif
  settled = true
}

/* The acceptor, and the book of sessions: a lane is registered with all before its socket is handed to one. */
proctype book() {
  byte where;
#ifdef M_REGISTERED_AT_OWNER_ONLY
  mailbox[placement]!REGISTER, 1, 1;
#else
  mailbox[0]!REGISTER, 1, 1;
  mailbox[1]!REGISTER, 1, 1;
#endif
  where = placement;
  mailbox[where]!CONNECTION, 1, 0;
#ifdef BREAKS
  cut != NOBODY;
  where = placement;
  mailbox[where]!CONNECTION, 2, 0;
#endif
#ifdef REUSE
#ifdef M_FREED_EARLY
  retired[1];                                /* the producer has said EOS: that is not enough */
#else
  ended == 1;
#endif
  mailbox[0]!FREE, 1, 0;
  mailbox[1]!FREE, 1, 0;
  mailbox[0]!REGISTER, 1, 2;
  mailbox[1]!REGISTER, 1, 2;
  where = placement;
  mailbox[where]!CONNECTION, 2, 0;
#endif
  booked = true
}

/* The producer */

inline put(l, e) { content[(l) * ROOM + length[l]] = e; length[l]++ }
#define NEXT_ROW_OF (rows == ROWS - 1 -> 2 : 1)
#define MAY_PUT (rows < ROWS && (rows != ROWS - 1 || promised))
#ifdef M_ROWS_BEFORE_ACK
#define MAY_LINK(c) true
#else
#define MAY_LINK(c) answered[c]
#endif
inline link(l) {                             /* it learns how far the session has come */
  linked[l] = true;
  if :: promised -> put(l, 11) :: else fi
}
inline promise(l) { if :: linked[l] && !retired[l] -> put(l, 11) :: else fi }
inline retire(l) { put(l, 13); retired[l] = true }

proctype producer() {
  do
  :: atomic { MAY_PUT -> put(0, NEXT_ROW_OF); rows++ }
  :: atomic { MAY_PUT && linked[1] && !retired[1] -> put(1, NEXT_ROW_OF); rows++ }
  :: atomic { rows == ROWS - 1 && !promised -> promised = true; promise(0); promise(1); promise(2) }
  :: atomic { rows == ROWS && !closed -> closed = true; retire(0) }
  :: atomic { MAY_LINK(1) && !linked[1] -> link(1) }
  :: atomic { linked[1] && !retired[1] -> retire(1) }
#ifdef REUSE
  :: atomic { MAY_PUT && linked[2] && !retired[2] -> put(2, NEXT_ROW_OF); rows++ }
  :: atomic { MAY_LINK(2) && !linked[2] -> link(2) }
  :: atomic { linked[2] && !retired[2] -> retire(2) }
#endif
#ifdef BREAKS
  :: atomic { answered[1] && linked[1] && cut == NOBODY -> cut = length[1] }
#endif
  od
}

proctype monitor() {
  timeout ->
  assert(emitted[0] == 1 && emitted[1] == 1 && settled && booked && closed);
  assert(position[0] == length[0] && !lent[0] && !lent[1] && !lent[2] && !lent[3]);
#ifdef REUSE
  assert(ended == 2)
#else
  assert(ended == 1)
#endif
}

init {
  atomic {
    owned[0] = true;
    live[AT(0, 0)] = true; live[AT(1, 0)] = true; number[AT(0, 0)] = 1; number[AT(1, 0)] = 1;
    connection[AT(0, 0)] = 1;
    reader[1] = NOBODY; reader[2] = NOBODY;
    answered[0] = true; linked[0] = true;
    run worker(0); run worker(1); run mover(); run book(); run producer(); run monitor()
  }
}
