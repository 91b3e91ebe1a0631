"""One network device: what it is, what it is set to, and changes that can be undone."""
