"""Random histories of a whole group: readers that come, go, stall and die, scales, and a store that fails.

Each delivery is written down outside of the product. At the end the stream is sealed, those who are left read on, and
what was delivered is held against what was written.
"""

from __future__ import annotations

import random
from collections import defaultdict

import pytest

import readergroup as rg
from tests.readergroup.processes_in_one import STREAM, Process, World, a_world
from tests.seeds import seeds

KEYS = 6
STEPS = 120
TIMEOUT = 4.0


class Life:
    """One process with one reader, and whether it runs, is stopped for a while, or is dead."""

    def __init__(self, world: World, number: int) -> None:
        self.process: Process = world.process()
        # Few ids, so that they are taken over now and then.
        self.auto_commit = number % 3 != 0
        self.reader = self.process.reader(f"r{number % 5}", auto_commit=self.auto_commit)
        self.stopped = False
        self.in_hand: list[tuple[int, int]] = []  # delivered, and not processed yet


class History:
    def __init__(self, world: World, seed: int) -> None:
        self.world = world
        self.rng = random.Random(seed)
        self.lives: list[Life] = []
        self.started = 0
        self.written: dict[int, int] = defaultdict(int)
        self.delivered: list[tuple[int, int, str, int, int]] = []  # key, number, segment, offset, token
        self.processed: set[tuple[int, int]] = set()  # key, number

    # ------------------------------------------------------------------ what happens

    def run(self) -> None:
        self.start()
        actions = [
            *[self.read] * 8,
            *[self.pass_time] * 6,
            *[self.write] * 4,
            *[self.start] * 2,
            self.close,
            self.crash,
            self.stop,
            self.go_on,
            self.split,
            self.merge,
            self.compact,
            self.remove,
        ]
        for _ in range(STEPS):
            self.rng.choice(actions)()
        self.finish()

    def running(self) -> list[Life]:
        return [life for life in self.lives if not life.stopped]

    def write(self) -> None:
        with self.world.admin.writer(STREAM) as writer:
            for _ in range(self.rng.randint(1, 40)):
                key = self.rng.randrange(KEYS)
                writer.write(f"{key}:{self.written[key]}".encode(), routing_key=f"k{key}")
                self.written[key] += 1

    def read(self) -> None:
        for life in self.rng.sample(self.running(), min(2, len(self.running()))):
            self.read_some(life, self.rng.randint(1, 30))

    def read_some(self, life: Life, count: int, *, faults: bool = True) -> bool:
        """Whether there was anything, or may be later."""
        store = life.process.store
        try:
            for _ in range(count):
                if faults and self.rng.random() < 0.1:
                    self.rng.choice([store.fail_appends, store.lose_requests, store.lose_answers, store.cut_reads])()
                if self.rng.random() < 0.2:
                    events = list(life.reader.read_batch(self.rng.randint(1, 10), timeout=0))
                else:
                    event = life.reader.read(timeout=0)
                    events = [event] if event is not None else []
                store._append_faults.clear()
                if life.auto_commit:
                    self.count_as_processed(life)
                for each in events:
                    key, number = map(int, each.raw.split(b":"))
                    self.delivered.append((key, number, each.segment, each.offset, each.fencing_token))
                    life.in_hand.append((key, number))
                if not life.auto_commit and self.rng.random() < 0.3:
                    life.reader.commit()
                    self.count_as_processed(life)
                if not events:
                    return False
        except rg.ReaderNotInGroupError:
            life.in_hand.clear()  # others go on from the last commit
            if life.reader._member._gone is not None:
                self.lives.remove(life)
        except rg.EndOfDataError:
            if life.auto_commit:
                self.count_as_processed(life)
            return False
        finally:
            store._append_faults.clear()
        return True

    def count_as_processed(self, life: Life) -> None:
        self.processed.update(life.in_hand)
        life.in_hand.clear()

    def pass_time(self) -> None:
        self.world.pass_time(self.rng.choice([0.25, 0.5, 1.0]), alive=[life.process for life in self.running()])

    def start(self) -> None:
        if len(self.lives) < 6:
            self.lives.append(Life(self.world, self.started))
            self.started += 1

    def close(self) -> None:
        if len(self.running()) > 1:
            life = self.rng.choice(self.running())
            self.lives.remove(life)
            life.reader.close()

    def crash(self) -> None:
        """It never does anything again; its lease runs out."""
        if len(self.running()) > 1:
            self.lives.remove(self.rng.choice(self.running()))

    def stop(self) -> None:
        if len(self.running()) > 1:
            self.rng.choice(self.running()).stopped = True

    def go_on(self) -> None:
        for life in self.lives:
            life.stopped = False

    def split(self) -> None:
        current = self.world.admin.streams.fetch_state(STREAM).current
        if len(current) < 6:
            self.world.admin.streams.scale(STREAM, split=[self.rng.choice(current)])

    def merge(self) -> None:
        current = self.world.admin.streams.fetch_state(STREAM).current
        if len(current) > 1:
            at = self.rng.randrange(len(current) - 1)
            self.world.admin.streams.scale(STREAM, merge=current[at : at + 2])

    def compact(self) -> None:
        self.world.group.synchronizer.compact()

    def remove(self) -> None:
        readers = self.world.group.online_readers()
        if len(readers) > 1:
            self.world.group.remove_reader(self.rng.choice(readers))

    def finish(self) -> None:
        self.world.admin.streams.seal(STREAM)
        self.go_on()
        last = Life(self.world, 1)  # one that commits, and takes over an id
        self.lives.append(last)
        for _ in range(400):
            self.world.pass_time(0.5, alive=[life.process for life in self.lives])
            for life in list(self.lives):
                self.read_some(life, 1_000, faults=False)
                self.commit(life)
            if self.world.state.end_of_data:
                return
        raise AssertionError(f"the end never came: {self.world.group.distribution()}")

    def commit(self, life: Life) -> None:
        if life in self.lives and not life.auto_commit:
            try:
                life.reader.commit()
            except rg.ReaderNotInGroupError:
                life.in_hand.clear()
            else:
                self.count_as_processed(life)

    # ------------------------------------------------------------------ what must hold

    def check(self) -> None:
        self.check_nothing_is_lost_or_early()
        self.check_assignments()

    def check_nothing_is_lost_or_early(self) -> None:
        """S2, S3: of each key every event comes, and none before the one that was written before it."""
        reached: dict[int, int] = defaultdict(lambda: -1)
        for key, number, *_ in self.delivered:
            assert number <= reached[key] + 1, f"event {key}:{number} came before {key}:{reached[key] + 1}"
            reached[key] = max(reached[key], number)
        assert {key: count - 1 for key, count in self.written.items()} == dict(reached)
        unprocessed = {(key, number) for key, count in self.written.items() for number in range(count)} - self.processed
        assert not unprocessed, f"handed to readers that died over them, and to nobody else: {sorted(unprocessed)[:5]}"

    def check_assignments(self) -> None:
        """S1: under one token the events of a segment come once, in order, without holes."""
        offsets: dict[str, set[int]] = defaultdict(set)
        assigned: dict[tuple[str, int], list[int]] = defaultdict(list)
        for _, _, segment, offset, token in self.delivered:
            offsets[segment].add(offset)
            assigned[segment, token].append(offset)
        for (segment, _), handed in assigned.items():
            between = sorted(each for each in offsets[segment] if handed[0] <= each <= handed[-1])
            assert handed == between


@pytest.mark.stores
@pytest.mark.parametrize("seed", [101])
def test_random_history_in_every_store(seed: int, store_url: str) -> None:
    test_random_history(seed, store_url)


@seeds(10, 40)
def test_random_history(seed: int, store_url: str) -> None:
    with a_world(store_url, segments=2, reader_timeout_seconds=TIMEOUT) as world:
        history = History(world, seed)
        history.run()
        history.check()
        assert len(history.delivered) >= sum(history.written.values())
