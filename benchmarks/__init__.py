"""One script per question: `python -m benchmarks.ingest`, `.inmemory`, `.produce`, `.latency`."""
