"""The producer's process of test_record_path.py: each line "ROWS" on standard input sends about so many, then answers.

Event time goes on by half a second with every batch; half of the batches bring campaigns that were never seen
before, more and more of them.
"""

from __future__ import annotations

import json
import sys

import numpy as np

import flexstream as fs
from flexstream.testing.ysb import YSB_STREAM, generate

BATCH = 100_000
KNOWN_KEYS = 2_000
STEP_MS = 500


def main(address: str) -> None:
    base = generate(BATCH, keys=KNOWN_KEYS, seed=3, rate=1_000_000, start=0)
    batches = 0
    with fs.Producer(address, stream=YSB_STREAM) as producer:
        for line in sys.stdin:
            for _ in range(int(line) // BATCH):
                rows = base.copy()
                rows["event_time"] += batches * STEP_MS
                if batches % 2:
                    spread = np.arange(BATCH) % (1 + batches // 10)
                    rows["campaign_id"] += KNOWN_KEYS * (batches * 100 + spread)
                producer.send(rows)
                batches += 1
            producer.flush(60)
            print(json.dumps({"rows": batches * BATCH}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
