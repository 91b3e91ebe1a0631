"""The thread of a core: its loop, sockets, orders, and groups that come and go."""
