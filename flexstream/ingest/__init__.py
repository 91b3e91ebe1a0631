"""How rows come in: connections, their first words, sessions' clocks, and feeding in process."""
