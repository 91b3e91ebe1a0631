import numpy as np
from numpy.typing import NDArray

class Solver:
    groups: int
    workers: int
    evaluations: int
    tries: int
    def __init__(self, groups: int, workers: int) -> None: ...
    def solve(
        self,
        weight: NDArray[np.float64],
        placement: NDArray[np.int32],
        fixed: NDArray[np.uint8],
        active: NDArray[np.uint8],
        excess: NDArray[np.float64],
        result: NDArray[np.int32],
        *,
        beta: float,
        max_moves: int,
        budget: int,
        seed: int,
    ) -> float: ...
