"""Each row comes into its stream once, and those of a key in order, wherever a relay stops and another takes over."""

from __future__ import annotations

import random
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

import readergroup as rg
from readergroup.outbox.moving import StreamMover
from readergroup.outbox.publishing import Published, Publisher
from readergroup.outbox.session import Session
from readergroup.outbox.table import OutboxTable
from readergroup.sql.connections import wrap
from readergroup.telemetry.counters import OutboxCounters
from synchronizer.testing import FailingStore, Operation
from tests.dying import Died
from tests.seeds import seeds

STREAM = "shop/orders"
TABLE = OutboxTable("outbox")


class Scene:
    """A stream, an outbox, and relays that come one after the other."""

    def __init__(self, file: Path) -> None:
        self.failing = FailingStore(rg.connect("memory://").store)
        self.client = rg.Client(self.failing, timeout=5)
        self.client.streams.create(STREAM, scaling=rg.ScalingPolicy.fixed(2))
        self.database = sqlite3.connect(file)
        self.own = Session(sqlite3.connect(file))
        for each in (self.database, self.own):
            each.execute("PRAGMA synchronous = OFF")  # no test here switches the power off
        TABLE.create(self.own)
        self.outbox_id = TABLE.outbox_id(self.own)
        self.token = 0
        self.written = 0

    def write(self, count: int, *, keyless: bool = False) -> None:
        with self.database:
            for _ in range(count):
                key = None if keyless or not self.written % 6 else f"key-{self.written % 5}"
                TABLE.insert(wrap(self.database), STREAM, key, b"%d" % self.written, None)
                self.written += 1

    def relay(self) -> StreamMover:
        """The next relay, which has a greater token."""
        self.token += 1
        publisher = Publisher(self.client.streams, STREAM, self.outbox_id, self.token)
        return StreamMover(TABLE, publisher, OutboxCounters())

    def rest(self) -> int:
        return sum(each.events for each in TABLE.lag(self.own))

    def drain(self, relay: StreamMover) -> None:
        for _ in range(20):
            if not self.rest():
                return
            with suppress(rg.StoreUnavailableError):  # a fault that is left
                relay.move(self.own)
        raise AssertionError("the relay does not empty the outbox")

    def stored(self) -> list[rg.Event[bytes]]:
        ranges = self.client.batch.segment_ranges(STREAM)
        return [event for part in ranges for event in self.client.batch.read(part)]

    def check(self) -> None:
        """All written events are in the stream once, and those of each key in order."""
        assert self.rest() == 0
        found: dict[str | None, list[int]] = {}
        for event in self.stored():
            found.setdefault(event.routing_key, []).append(int(event.data))
        assert Counter(n for numbers in found.values() for n in numbers) == Counter(range(self.written))
        # A key that was moved by a scale is in several segments, in the order of which ranges are listed.
        for key, numbers in found.items():
            assert key is None or numbers == sorted(numbers)

    def close(self) -> None:
        self.own.close()
        self.database.close()
        self.client.close()
        self.failing.inner.close()


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    with closing(Scene(tmp_path / "app.db")) as scene:
        yield scene


def die() -> None:
    raise Died


class At:
    """Acts once, at the operation of the store with this number."""

    def __init__(self, number: int, act: Callable[[], None]) -> None:
        self.left = number
        self._act = act

    def __call__(self, _: Operation) -> None:
        self.left -= 1
        if self.left == -1:
            self._act()


def scenes(folder: Path, *, keyless: bool = False) -> Iterator[tuple[int, Scene]]:
    """Yield, for each operation of the first round of a relay, its number, and a scene before this round."""

    def written(name: object) -> Scene:
        scene = Scene(folder / f"{name}.db")
        scene.write(1 if keyless else 20, keyless=keyless)
        return scene

    with closing(written("counted")) as counted:
        before = len(counted.failing.operations)
        counted.relay().move(counted.own)
        operations = len(counted.failing.operations) - before
    assert operations > 5
    for number in range(operations):
        with closing(written(number)) as scene:
            yield number, scene


@pytest.mark.parametrize("scales", [False, True], ids=["", "scaled"])
@pytest.mark.parametrize("place", ["before", "after"])
def test_a_relay_that_dies_at_any_operation_is_followed_by_one_that_repeats_nothing(
    tmp_path: Path, place: str, scales: bool
) -> None:
    for number, scene in scenes(tmp_path):
        first = scene.relay()
        setattr(scene.failing, place, At(number, die))
        with pytest.raises(Died):
            while True:
                first.move(scene.own)
        setattr(scene.failing, place, None)
        if scales:
            scene.client.streams.scale(STREAM, split=[0])
        scene.write(5)
        scene.drain(scene.relay())
        scene.check()


@pytest.mark.parametrize("scales", [False, True], ids=["", "scaled"])
def test_a_relay_that_pauses_at_any_operation_puts_nothing_into_the_stream_after_a_later_one(
    tmp_path: Path, scales: bool
) -> None:
    for number, scene in scenes(tmp_path):
        first = scene.relay()

        def let_another_work(scene: Scene = scene) -> None:
            later = scene.relay()
            scene.drain(later)
            if scales:
                scene.client.streams.scale(STREAM, split=[0])
            scene.write(5)
            later.move(scene.own)

        scene.failing.before = pausing = At(number, let_another_work)
        with suppress(rg.LeaseLostError):
            while pausing.left >= 0:
                first.move(scene.own)
        scene.failing.before = None
        with suppress(rg.LeaseLostError):
            for _ in range(3):
                first.move(scene.own)
        scene.drain(scene.relay())
        scene.check()


def test_a_row_without_a_key_is_moved_once_also_if_the_relays_choose_different_segments(tmp_path: Path) -> None:
    for number, scene in scenes(tmp_path, keyless=True):
        first = scene.relay()
        scene.failing.before = At(number, lambda scene=scene: scene.drain(scene.relay()))
        with suppress(rg.LeaseLostError):
            for _ in range(3):
                first.move(scene.own)
        scene.failing.before = None
        scene.drain(scene.relay())
        scene.check()


@seeds(15, 400)
def test_random_histories_move_each_row_once(scene: Scene, seed: int) -> None:
    rng = random.Random(seed)
    relays = [scene.relay()]
    for _ in range(40):
        step = rng.choice(["write", "move", "move", "move", "new", "lose", "fail", "die", "scale"])
        if step == "write":
            scene.write(rng.randrange(1, 8))
        elif step == "new":
            relays.append(scene.relay())
        elif step == "lose":
            rng.choice([scene.failing.lose_requests, scene.failing.lose_answers])()
        elif step == "fail":
            scene.failing.fail_appends()
        elif step == "scale":
            current = scene.client.streams.fetch_state(STREAM).current
            if len(current) < 6:
                scene.client.streams.scale(STREAM, split=[rng.choice(current)])
            else:
                scene.client.streams.scale(STREAM, merge=current[:2])
        else:
            dying = At(rng.randrange(12), die)
            setattr(scene.failing, rng.choice(["before", "after"]), dying if step == "die" else None)
            relay = rng.choice(relays[-3:])
            try:
                relay.move(scene.own)
            except (rg.ReaderGroupError, Died):
                if step == "die":
                    relays.remove(relay)
                    relays = relays or [scene.relay()]
            scene.failing.before = scene.failing.after = None
    scene.drain(scene.relay())
    scene.check()


def test_a_relay_ends_when_a_later_one_has_begun_with_the_stream(scene: Scene) -> None:
    first, second = scene.relay(), scene.relay()
    scene.write(3)
    first.move(scene.own)
    scene.write(3)
    second.move(scene.own)
    scene.write(3)
    with pytest.raises(rg.LeaseLostError):
        for _ in range(2):
            first.move(scene.own)
    scene.drain(second)
    scene.check()


def test_a_row_that_has_the_id_of_a_lost_one_is_moved(scene: Scene) -> None:
    """The database lost its last commits when the power failed, and so did the relay before it could delete."""
    scene.write(2)
    rows = scene.database.execute("SELECT id, stream, routing_key, data FROM outbox WHERE id > 0").fetchall()
    publisher = Publisher(scene.client.streams, STREAM, scene.outbox_id, 1)
    publisher.begin()
    publisher.publish(TABLE.rows(scene.own, STREAM, (), 10, 1000))
    with scene.database:
        scene.database.execute("DELETE FROM outbox WHERE id = ?", (rows[1][0],))
        scene.database.execute(
            "INSERT INTO outbox (id, stream, routing_key, data) VALUES (?, ?, ?, ?)", (*rows[1][:3], b"another")
        )
    scene.token = 1
    scene.drain(scene.relay())
    assert sorted(event.data for event in scene.stored()) == [b"0", b"1", b"another"]


def test_a_stream_that_was_created_again_gets_the_rows(scene: Scene) -> None:
    relay = scene.relay()
    scene.write(3)
    scene.drain(relay)
    scene.client.streams.delete(STREAM)
    scene.write(4)
    with pytest.raises(rg.NotFoundError):
        for _ in range(2):
            relay.move(scene.own)
    assert scene.rest() == 4
    scene.client.streams.create(STREAM)
    scene.drain(relay)
    assert len(scene.stored()) == 4


def test_a_value_is_read_as_it_was_written() -> None:
    for rows in ({}, {5: 0}, {1: 65535, 2: 7, 1_000_000_007: 300}):
        value = Published(3, 8, rows)
        assert Published.decode(value.encode()) == value
    assert len(Published(1, 1, dict.fromkeys(range(10**9, 10**9 + 5000), 1)).encode()) < 16_000


def test_what_a_scale_interrupts_is_moved_at_once(scene: Scene) -> None:
    relay = scene.relay()
    scene.write(5)
    assert relay.move(scene.own) == 5
    scene.client.streams.scale(STREAM, split=[0])
    scene.write(10)
    assert relay.move(scene.own) == 10
    scene.check()
    scene.client.streams.seal(STREAM)
    scene.write(1)
    with pytest.raises(rg.SealedError):
        relay.move(scene.own)
