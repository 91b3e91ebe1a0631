"""Bytes of the line: decoding frames, checksums, and the hash from key to group."""
