"""For tests in the tree only: native parts as Python objects."""
