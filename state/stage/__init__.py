"""Staged rows on the disk, and the journal of what was committed."""
