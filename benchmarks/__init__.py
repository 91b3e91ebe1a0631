"""One script per question: `python -m benchmarks.ingest`, `.inmemory`, `.produce`, `.latency`, ...

`python -m benchmarks.versus COMMIT` asks them all at once: is this tree as fast as that one was?
"""
