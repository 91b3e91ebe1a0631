"""For tests of your own: a slow, plain oracle, and the Yahoo streaming benchmark's stream and query."""

from flexstream.testing.oracle import OracleResult, run

__all__ = ["OracleResult", "run"]
