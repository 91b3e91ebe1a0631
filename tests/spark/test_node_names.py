"""The translation to Spark knows every kind of node in a plan."""

from __future__ import annotations

from flexstream.query.plan.nodes import KINDS
from flexstream.spark import translate


def test_every_kind_of_node_is_known_by_its_name() -> None:
    assert set(translate.NODES) == set(KINDS)
