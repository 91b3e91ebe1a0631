"""The logs that queries write: appended, numbered, kept within bounds."""
