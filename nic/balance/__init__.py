"""Which groups should change their worker: pure rules over loads."""
