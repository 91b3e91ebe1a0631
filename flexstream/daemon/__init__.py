"""The daemon: an Engine behind an HTTP control API, a catalog that survives restarts, and systemd manners.

It owns no part of the data path: rows go from the data port to the engine's workers without passing here.
"""
