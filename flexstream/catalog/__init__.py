"""What runs: streams, queries and sessions, as the engine knows them."""
