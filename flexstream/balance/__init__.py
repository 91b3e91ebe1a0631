"""Which worker has which group: loads, moves, splits, and the rebalancer that decides."""
