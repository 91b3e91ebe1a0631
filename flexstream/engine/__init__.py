"""The engine: everything below it put together, its orders and its status."""
