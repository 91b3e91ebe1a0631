"""Replays what fuzzing found interesting, through the decoder and against a second decoder in plain Python."""

import random
from pathlib import Path

import pytest

from tests.fuzz_corpus.frame_target import check
from tests.fuzz_corpus.make_seeds import seeds

CORPUS = sorted((Path(__file__).parent.parent / "fuzz_corpus" / "frames").iterdir())


def test_there_is_a_corpus():
    assert len(CORPUS) >= 30
    assert sum(path.stat().st_size for path in CORPUS) < 1 << 20


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.name)
def test_the_decoder_keeps_its_promises_on(path):
    check(path.read_bytes())


def test_the_decoder_keeps_its_promises_for_every_cut():
    for seed in seeds():
        for cuts in range(0, 256, 17):
            check(seed[:1] + bytes([cuts]) + seed[2:])


def test_the_decoder_keeps_its_promises_on_random_damage(seed):
    rng = random.Random(seed)
    whole = [path.read_bytes() for path in CORPUS]
    for _ in range(3000):
        data = bytearray(rng.choice(whole))
        for _ in range(rng.randint(1, 4)):
            if not data:
                break
            at = rng.randrange(len(data))
            what = rng.randrange(4)
            if what == 0:
                data[at] ^= 1 << rng.randrange(8)
            elif what == 1:
                del data[at : at + rng.choice((1, 13, 32))]
            elif what == 2:
                data[at:at] = rng.choice(whole)[2:]
            else:
                data[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF))
        check(bytes(data))
