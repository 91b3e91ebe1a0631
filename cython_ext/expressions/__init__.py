"""Operator programs: what filters, maps and arguments compute, a block at a time."""
