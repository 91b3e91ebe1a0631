"""YSB with numpy: per batch a mask, then np.unique over (window, campaign), added to a dictionary."""

import numpy as np
from common import WINDOW_MS, serve


def run(rows, batch):
    totals: dict[int, int] = {}
    for at in range(0, len(rows), batch):
        part = rows[at : at + batch]
        kept = part[part["event_type"] == b"view"]
        keys = (kept["event_time"] // WINDOW_MS << 32) | kept["campaign_id"]
        found, counts = np.unique(keys, return_counts=True)
        for key, count in zip(found.tolist(), counts.tolist(), strict=True):
            totals[key] = totals.get(key, 0) + count
    return sum(totals.values())


if __name__ == "__main__":
    serve(run)
