"""What goes to executors says what to do when flexstream cannot be imported there.

Spark unpickles a task's objects before any code of ours runs, and a class that cannot be imported is then no more than
"No module named 'flexstream'". So these objects are pickled as a call of `opened`, which travels as code and not as a
name (cloudpickle's `register_pickle_by_value`): it needs nothing of flexstream to say what is missing, and where.
"""

from __future__ import annotations

import sys
from typing import Any


def opened(packed: bytes) -> Any:
    """The object that `Carried` has packed. Raises ImportError with host, Python and fix.

    Runs where flexstream may be missing: it uses no name of this module.
    """
    import pickle
    import platform
    import socket
    import sys

    try:
        kind, fields = pickle.loads(packed)
    except ImportError as error:
        raise ImportError(
            f"a Spark executor cannot import flexstream: {error} (host {socket.gethostname()}, "
            f"Python {platform.python_version()} at {sys.executable})\n  hint: install it there "
            f"({sys.executable} -m pip install flexstream), or ship an environment that has it with spark.archives",
            name=error.name,
        ) from error
    made = object.__new__(kind)
    vars(made).update(fields)
    return made


class Carried:
    """An object that is made on the driver and goes to executors."""

    def __reduce__(self) -> tuple[Any, ...]:
        from pyspark import cloudpickle

        cloudpickle.register_pickle_by_value(sys.modules[__name__])
        return opened, (cloudpickle.dumps((type(self), vars(self))),)
