/* Whether groups can move. 0: built for benchmarks.statecost, without what only moves and the balancer need. */
#ifndef FLEXSTREAM_MOVES_H
#define FLEXSTREAM_MOVES_H

#ifdef FS_NO_MOVES
#define FS_MOVES 0
#else
#define FS_MOVES 1
#endif

#endif
