"""What comes out: from native rows to logs, readers and files."""
