"""No row is lost, none counts twice: the engine against the oracle, on random streams, rows and queries."""

import random
from contextlib import ExitStack

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import flexstream as fs
from tests.property.checks import FINISH_S, Case, assert_conserved, random_batches, random_case

CHECKS = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example)


def run_fed(rnd: random.Random, case: Case) -> None:
    with fs.Engine(workers=rnd.choice((1, 2)), groups=rnd.choice((1, 7, 128))) as engine:
        engine.add(case.stream)
        for query in case.queries:
            engine.submit(query)
        for batch in random_batches(rnd, case.rows):
            engine.feed(case.stream.name, batch)
        engine.finish(timeout=FINISH_S)
        assert_conserved(engine, case)


def run_sent(rnd: random.Random, case: Case) -> None:
    """Each producer has a share of the rows, in order; they send at the same time."""
    shares = [[] for _ in range(rnd.randint(1, 4))]
    sessions = [rnd.randrange(len(shares)) for _ in case.rows]
    for i, session in enumerate(sessions):
        shares[session].append(i)
    workers, groups = rnd.choice((1, 2)), rnd.choice((1, 7, 128))
    with fs.Engine(workers=workers, groups=groups, listen="127.0.0.1:0") as engine:
        engine.add(case.stream)
        for query in case.queries:
            engine.submit(query)
        host, port = engine.data_address
        with ExitStack() as producers:
            open_ = [
                producers.enter_context(
                    fs.Producer(f"tcp://{host}:{port}", stream=case.stream.name, crc=rnd.choice((None, True)))
                )
                for _ in shares
            ]
            left = {i: random_batches(rnd, case.rows[share]) for i, share in enumerate(shares) if share}
            while left:
                turn = rnd.choice(list(left))
                open_[turn].send(left[turn].pop(0))
                if not left[turn]:
                    del left[turn]
        engine.finish(timeout=FINISH_S)
        assert_conserved(engine, case, sessions)


@settings(max_examples=60, suppress_health_check=CHECKS)
@given(rnd=st.randoms(use_true_random=False))
@pytest.mark.time_limit(180)
def test_fed_rows_give_what_the_oracle_gives(rnd):
    case = random_case(rnd)
    try:
        run_fed(rnd, case)
    except BaseException:
        print(case)
        raise


@pytest.mark.slow
def test_fed_rows_give_what_the_oracle_gives_in_a_longer_run(seed):
    for i in range(100):
        rnd = random.Random(f"{seed}/{i}")
        case = random_case(rnd, max_rows=3000 if i % 10 == 0 else 400)
        try:
            run_fed(rnd, case)
        except BaseException:
            print(f"case {i}\n{case}")
            raise


@settings(max_examples=20, suppress_health_check=CHECKS)
@given(rnd=st.randoms(use_true_random=False))
@pytest.mark.time_limit(180)
def test_sent_rows_give_what_the_oracle_gives(rnd):
    case = random_case(rnd)
    try:
        run_sent(rnd, case)
    except BaseException:
        print(case)
        raise


@pytest.mark.slow
def test_sent_rows_give_what_the_oracle_gives_in_a_longer_run(seed):
    for i in range(30):
        rnd = random.Random(f"{seed}/{i}")
        case = random_case(rnd, max_rows=3000 if i % 10 == 0 else 400)
        try:
            run_sent(rnd, case)
        except BaseException:
            print(f"case {i}\n{case}")
            raise
