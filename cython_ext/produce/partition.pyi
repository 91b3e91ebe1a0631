from typing import Any

import numpy as np
import numpy.typing as npt

from flexstream.cython_ext.wire.murmur3 import KeyHasher

def by_group(
    rows: Any, row_bytes: int, hasher: KeyHasher, groups: int
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint64]]: ...
