"""Rings, arenas, blocks and the thread that fills them ahead of time: nothing above allocates."""
