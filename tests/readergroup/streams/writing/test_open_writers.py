"""What becomes of a writer that nobody closes: when its process ends, in whatever way, and in a forked child."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator

import pytest

import readergroup as rg
from readergroup.streams.writing import open_writers

pytestmark = pytest.mark.stores("sqlite", "postgresql", "nats")
STREAM = "shop/orders"
EVENTS = 20_000
#: Another Python, on a busy machine.
SECONDS = 120.0

WRITE = """
import sys, threading
import readergroup as rg
client = rg.connect(sys.argv[1])
writer = client.writer("shop/orders")
def write(first=0):
    for number in range(first, first + 10_000):
        writer.write(b"%06d" % number, routing_key=str(number % 7))
"""

WAYS = {
    "the last line": "write(); write(10_000)",
    "sys.exit": "write(); write(10_000); sys.exit(3)",
    "an exception": "write(); write(10_000); 1 / 0",
    "the writer is forgotten": "write(); write(10_000); del writer, write",
    "another thread writes on": "threading.Thread(target=write, args=(10_000,)).start(); write()",
    "the client is closed": "write(); write(10_000); client.close()",
}


@pytest.fixture
def client(shared_store_url: str) -> Iterator[rg.Client]:
    with rg.connect(shared_store_url) as client:
        client.streams.create(STREAM, scaling=rg.ScalingPolicy.fixed(4))
        yield client


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=SECONDS, check=False
    )


def stored(client: rg.Client) -> list[bytes]:
    return [event.data for each in client.batch.segment_ranges(STREAM) for event in client.batch.read(each)]


@pytest.mark.stores(round_robin=True)
@pytest.mark.parametrize("way", WAYS)
def test_a_process_that_ends_stores_what_its_writers_hold(client: rg.Client, shared_store_url: str, way: str) -> None:
    result = run(WRITE + WAYS[way], shared_store_url)
    assert result.returncode == {"sys.exit": 3, "an exception": 1}.get(way, 0), result.stderr
    assert "before all written events" not in result.stderr
    assert sorted(stored(client)) == [b"%06d" % number for number in range(EVENTS)]
    state = client.streams.fetch_state(STREAM)
    assert all(not client.store.attributes(state.data_segment(number), "writer/") for number in state.current)


def write_without_closing(url: str) -> None:
    client = rg.connect(url)
    writer = client.writer(STREAM)
    for number in range(EVENTS):
        writer.write(b"%06d" % number, routing_key=str(number % 7))
    globals()["kept"] = writer  # as a module might


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.stores("postgresql")
def test_a_process_of_multiprocessing_stores_what_its_writers_hold(shared_store_url: str, method: str) -> None:
    with rg.connect(shared_store_url) as client:
        client.streams.create(STREAM, scaling=rg.ScalingPolicy.fixed(4))
    process = multiprocessing.get_context(method).Process(target=write_without_closing, args=(shared_store_url,))
    process.start()
    process.join(SECONDS)
    assert process.exitcode == 0
    with rg.connect(shared_store_url) as client:
        assert sorted(stored(client)) == [b"%06d" % number for number in range(EVENTS)]


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
@pytest.mark.stores("sqlite")
def test_a_forked_child_stores_nothing_of_its_parent(client: rg.Client, shared_store_url: str) -> None:
    program = WRITE + textwrap.dedent("""
        import os
        write()
        if (child := os.fork()) == 0:
            sys.exit(0)  # as at the end of a program
        assert os.waitpid(child, 0)[1] == 0
        write(10_000)
    """)
    result = run(program, shared_store_url)
    assert result.returncode == 0, result.stderr
    assert sorted(stored(client)) == [b"%06d" % number for number in range(EVENTS)]


@pytest.mark.stores("sqlite")
def test_the_end_of_a_process_waits_for_a_store_that_is_away_only_for_a_while_and_tells_what_is_lost(
    client: rg.Client, shared_store_url: str
) -> None:
    program = textwrap.dedent("""
        import sys
        import readergroup as rg
        from readergroup.streams.writing import open_writers
        from synchronizer import ManualClock, open_store
        from synchronizer.testing import FailingStore
        open_writers.EXIT_SECONDS = 0.5
        failing = FailingStore(open_store(sys.argv[1]))
        writers = [rg.Client(failing, clock=ManualClock()).writer("shop/orders") for _ in range(2)]
        failing.unavailable = True
        for number in range(10):
            writers[number % 2].write(b"event")
    """)
    result = run(program, shared_store_url)
    assert result.returncode == 0
    assert result.stderr.count("the process ends before all written events are stored") == 2
    assert result.stderr.count("events_not_stored=5") == 2
    assert stored(client) == []


@pytest.mark.stores("sqlite")
def test_a_writer_that_is_closed_or_abandoned_is_not_remembered(client: rg.Client) -> None:
    before = len(open_writers._writers)
    with client.writer(STREAM):
        assert len(open_writers._writers) == before + 1
    assert len(open_writers._writers) == before
    assert os.getpid() == open_writers._process
