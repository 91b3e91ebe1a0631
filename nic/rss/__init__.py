"""Receive side scaling: the hash, the ports that reach a queue, and the card's table and key."""
