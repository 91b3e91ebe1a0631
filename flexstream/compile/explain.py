"""What `Query.explain("code")` shows."""

from __future__ import annotations

from flexstream.compile.codegen import generate
from flexstream.compile.lowering import lower
from flexstream.query.analysis import why_generic
from flexstream.query.plan.rewrite import optimise
from flexstream.query.plan.stages import BoundQuery


def code_of(bound: BoundQuery) -> str:
    """The C that is compiled for the query, or why there is none. Raises QueryError for what would not run."""
    optimised = optimise(bound)
    lower(optimised)
    cannot = why_generic(optimised)
    return generate(optimised) if cannot is None else f"/* {cannot} */"
