"""What a record is: field types, streams, and how rows are packed."""
