"""AsyncProducer on asyncio and uvloop: the same rows, and a loop that never stands still."""

import asyncio

import pytest

from flexstream.client.async_producer import AsyncProducer
from flexstream.client.producer import RingFull
from flexstream.errors import ConnectError
from tests.unit.client.fake_server import FakeServer
from tests.unit.client.test_producer import CLICKS, check_rows, clicks


@pytest.fixture
def server():
    with FakeServer(CLICKS) as fake:
        yield fake


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request):
    if request.param == "asyncio":
        return asyncio.run
    return pytest.importorskip("uvloop").run


def test_rows_arrive_in_order(server, run):
    rows = clicks(20_000)

    async def main():
        async with AsyncProducer(server.address, stream="clicks") as producer:
            assert producer.state == "connected"
            for start in range(0, len(rows), 2000):
                assert await producer.send(rows[start : start + 2000]) == 2000
            await producer.flush(10)
            assert producer.stats()["rows_acked"] == 20_000
            assert await producer.marker() == 8
        assert producer.state == "closed"

    run(main())
    check_rows(server, rows)


def test_back_pressure_suspends_the_sender_and_not_the_loop(server, run):
    rows = clicks(300_000)
    server.reading.clear()

    async def main():
        async with AsyncProducer(server.address, stream="clicks", replay_bytes=65536) as producer:
            sending = asyncio.create_task(producer.send(rows))
            for _ in range(20):
                await asyncio.sleep(0.005)
            assert not sending.done()
            server.reading.set()
            assert await asyncio.wait_for(sending, 30) == len(rows)

    run(main())
    check_rows(server, rows)


def test_a_full_buffer_raises_when_so_chosen(server):
    server.reading.clear()

    async def main():
        async with AsyncProducer(server.address, stream="clicks", replay_bytes=65536, on_full="raise") as producer:
            with pytest.raises(RingFull):
                await producer.send(clicks(300_000))
            server.reading.set()

    asyncio.run(main())


def test_explicit_watermarks(server):
    async def main():
        async with AsyncProducer(server.address, stream="clicks", watermark="explicit") as producer:
            await producer.send(clicks(5))
            await producer.watermark(77)
            await producer.close()
            await producer.close()

    asyncio.run(main())
    group = int(CLICKS.group_of(clicks(1), 8)[0])
    assert 77 in server.watermarks(group)


def test_a_server_that_is_away_is_an_error():
    async def main():
        with pytest.raises(ConnectError):
            await AsyncProducer("tcp://127.0.0.1:1", stream="clicks", connect_timeout_s=0.2).open()

    asyncio.run(main())


def test_it_must_be_opened():
    async def main():
        with pytest.raises(ConnectError, match="not open"):
            await AsyncProducer("tcp://127.0.0.1:1", stream="clicks").send([])

    asyncio.run(main())
