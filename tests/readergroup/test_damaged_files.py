"""One bit of a SQLite file is flipped: whoever asks gets the same answer as before, or hears of the damage."""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Final

import pytest

import readergroup as rg
from readergroup.errors import CorruptDataError
from readergroup.streams.data.segment_reader import SegmentReader
from synchronizer import (
    AttributeChange,
    CorruptStateError,
    CorruptStoreError,
    EventProcessor,
    EventQueue,
    SegmentCopy,
    SegmentStore,
    UnsupportedError,
    open_store,
)

STREAM, GROUP, QUEUE = "shop/orders", "billing", "jobs"
#: What may be said of damage. The last one is of a file that says it is of a newer format.
TOLD: Final = (CorruptStoreError, CorruptStateError, CorruptDataError, UnsupportedError)
LAST: Final = "what is left"
#: The share of flips in pages of rows: those of large data are full, and the data has checksums of its own.
AT_ROWS: Final = 0.9
PAGE_BYTES: Final = 16 * 1024
MANY: Final = 400
LARGE: Final = 140_000
SEED: Final = 20260101


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with some of everything, which nobody has open, and which has no log beside it."""
    path = tmp_path_factory.mktemp("damaged") / "original.db"
    with rg.connect(f"sqlite:///{path}") as client:
        fill(client)
    with open_store(f"sqlite:///{path}") as store:
        fill_segments(store)
        with EventQueue(store, QUEUE) as queue:
            queue.add_many([b"job %d" % number for number in range(20)])
        handle_some(store, 7)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return path


def fill(client: rg.Client) -> None:
    client.streams.create(STREAM, scaling=rg.ScalingPolicy.fixed(2))
    with client.writer(STREAM) as writer:
        for number in range(60):
            writer.write(b"event %d" % number, routing_key=f"key-{number % 7}")
            if number % 10 == 0:
                writer.flush()
        with writer.transaction() as transaction:
            transaction.write(b"together", "key-1")
            transaction.write(bytes(50_000), "key-2")
    client.streams.scale(STREAM, split=[0])
    with client.shared_map("prices", int) as prices, client.counter("visits") as visits:
        for number in range(40):
            prices[f"article {number}"] = number
            visits.add(number)
    with client.groups.create(GROUP, streams=[STREAM]).reader("reader-1") as reader:
        for _ in range(25):
            event = reader.read(10)
            assert event is not None
            reader.commit(event)


def fill_segments(store: SegmentStore) -> None:
    for number in range(30):
        name = f"raw/{number:02}"
        store.create(name)
        for each in range(number % 4):
            store.append(name, b"%d" % each, attributes={f"a/{each}": AttributeChange(None, b"value %d" % each)})
    for number in range(MANY):
        store.create(f"many/{number}")  # so that the tables have inner pages
    changes = {f"attribute {number}": AttributeChange(None, b"%d" % number * 9) for number in range(MANY)}
    store.append("many/7", b"", attributes=changes)
    store.create("raw/large")
    store.append("raw/large", bytes(number % 251 for number in range(LARGE)))
    store.copy_segments([SegmentCopy("raw/large", "raw/copy", 0, LARGE)])
    store.truncate("raw/03", 1)
    store.seal("raw/02")
    store.delete("raw/04")
    store.forget("raw/05")


def handle_some(store: SegmentStore, count: int) -> None:
    with EventProcessor(store, QUEUE, lambda event: None, threads=False, max_batch=count) as processor:
        while processor.processed_events < count:
            processor.step()


def waiting_jobs(store: SegmentStore) -> list[bytes]:
    jobs: list[bytes] = []
    with EventProcessor(store, QUEUE, lambda event: jobs.append(event.data), threads=False) as processor:
        while processor.step():
            pass
    return jobs


def events(client: rg.Client, store: SegmentStore) -> list[object]:
    state = client.streams.fetch_state(STREAM)
    found: list[object] = [sorted(state.segments), state.epoch]
    for number in sorted(state.segments):
        for block in iter(SegmentReader(store, state.data_segment(number)).next_block, None):
            found += zip(block.keys, block.data, strict=True)
    return found


def questions(client: rg.Client, store: SegmentStore) -> Mapping[str, Callable[[], object]]:
    """What does not write comes first. Not the bytes of segments: who stores them adds checksums."""

    def of_segments(ask: Callable[[str], object]) -> Callable[[], object]:
        def ask_all() -> object:
            answers = {}
            for name in ("raw/00", "raw/02", "raw/03", "raw/17", "raw/large", "raw/copy", "many/7", "many/123"):
                answers[name] = ask(name)
            return answers

        return ask_all

    def is_used_up(name: str) -> object:
        with suppress(rg.AlreadyExistsError):
            return store.create(name)
        return "used up"

    return {
        "names": lambda: list(store.list()),
        "some names": lambda: list(store.list("raw/1")),
        "infos": of_segments(store.info),
        "attributes": of_segments(store.attributes),
        "some attributes": of_segments(lambda name: store.attributes(name, "a/1")),
        "named attributes": of_segments(
            lambda name: store.attributes(
                name, names=["a/0", "a/1", "a/9", "attribute 1", "attribute 123", "attribute 399", "b"]
            )
        ),
        "how many bytes": of_segments(lambda name: len(store.read(name, store.info(name).start_offset, 1 << 20))),
        "waiting": lambda: store.wait({"raw/00": 0, "raw/01": 1, "raw/07": 2}, 0),
        "streams": lambda: [(each, client.streams.info(each)) for each in client.streams.list("shop")],
        "events": lambda: events(client, store),
        "map": lambda: client.shared_map("prices", int).copy(),
        "counter": lambda: client.counter("visits").value,
        "queue": lambda: client.event_queue(QUEUE).handled_upto,
        "groups": lambda: list(client.groups.list()),
        "positions": lambda: client.groups.get(GROUP).stream_cuts(),
        "deleted names": lambda: is_used_up("raw/04"),
        "jobs": lambda: waiting_jobs(store),
        "an append": lambda: store.append("raw/19", b"more", expected_offset=3),
        "a new attribute": lambda: store.append("raw/18", b"", attributes={"a/05": AttributeChange(None, b"1")}),
        "an old attribute": lambda: store.append("raw/17", b"", attributes={"a/0": AttributeChange(b"value 0", None)}),
        "a name": lambda: store.create("raw/04a"),
        "a deletion": lambda: store.delete("raw/large"),
        "the bytes of a copy": lambda: len(store.read("raw/copy", 0, 1 << 20)),
        LAST: lambda: list(store.list()),
    }


def answers(path: Path) -> dict[str, Any]:
    """What each question is answered, or that the damage was told."""
    found: dict[str, Any] = {}
    with suppress(*TOLD), open_store(f"sqlite:///{path}") as store:
        with rg.connect(f"sqlite:///{path}", timeout=5) as client:
            for name, ask in questions(client, store).items():
                if name == LAST and "damaged" in found.values():
                    break  # what was to be done was not done
                try:
                    found[name] = ask()
                except TOLD:
                    found[name] = "damaged"
                except Exception as error:
                    found[name] = error
    return found


def flipped(original: Path, path: Path, rng: random.Random) -> str:
    """Copy the file but for one bit, near something that is not zero; says which."""
    data = bytearray(original.read_bytes())
    pages = range(0, len(data), PAGE_BYTES)
    rows = [page for page in pages if PAGE_BYTES // 10 < data.count(0, page, page + PAGE_BYTES) < PAGE_BYTES]
    page = rng.choice(rows if rng.random() < AT_ROWS else pages)
    while True:
        at = page + rng.randrange(PAGE_BYTES)
        if any(data[max(0, at - 8) : at + 8]):
            break
    bit = rng.randrange(8)
    data[at] ^= 1 << bit
    path.write_bytes(data)
    return f"byte {at}, bit {bit}"


def check(original: Path, folder: Path, rng: random.Random, count: int) -> Counter[str]:
    path = folder / "intact.db"
    shutil.copy(original, path)
    expected = answers(path)
    assert not any(isinstance(answer, Exception) for answer in expected.values()), expected
    told: Counter[str] = Counter()
    for number in range(count):
        path = folder / f"{number}.db"
        which = flipped(original, path, rng)
        found = answers(path)
        wrong = {name: found[name] for name in found if found[name] not in ("damaged", expected[name])}
        assert not wrong, (which, wrong, {name: expected[name] for name in wrong})
        told["opening" if not found else "damage" if "damaged" in found.values() else "nothing"] += 1
        for each in folder.glob(f"{number}.db*"):
            each.unlink()
    return told


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("flips", [200, pytest.param(1500, marks=pytest.mark.broad)])
def test_a_flipped_bit_changes_no_answer(original: Path, flips: int) -> None:
    # In memory, where the system has files in memory: no copy has to last.
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        told = check(original, Path(folder), random.Random(SEED), flips)
    assert told["damage"] > flips / 10
