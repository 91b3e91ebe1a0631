from typing import Any

import numpy as np
import numpy.typing as npt

MAX_KEY_FIELDS: int
SEED: int

class KeyHasher:
    def __init__(self, stream: Any) -> None: ...

def group_ids(
    rows: Any, n: int, row_bytes: int, key_spec: KeyHasher, groups: int
) -> npt.NDArray[np.uint16]: ...
def hashes(rows: Any, n: int, row_bytes: int, key_spec: KeyHasher) -> npt.NDArray[np.int32]: ...
