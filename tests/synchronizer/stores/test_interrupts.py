"""Ctrl-C anywhere in a call of a store, one place after the other: what every thread and process does next goes on.

The frames of the call that was interrupted are kept, as a notebook keeps them.
"""

from __future__ import annotations

import gc
import itertools
import os
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import psycopg
import pytest
from psycopg import sql

from synchronizer import ClosedError, SegmentStore, open_store
from synchronizer.clock import Deadline, SystemClock
from synchronizer.log.contention import FairQueue
from synchronizer.store import ANY, Append, Appended, AttributeChange, SegmentCopy
from synchronizer.stores.postgres.connections import parse_address
from synchronizer.stores.postgres.store import PostgresStore
from synchronizer.stores.sqlite.store import SqliteStore
from tests.interrupts import FEW_OR_MORE, interrupts
from tests.waiting import CallInThread, until

pytestmark = pytest.mark.stores("memory", "sqlite", "postgresql", "nats")

Call = Callable[[SegmentStore, str], object]


def _fair_lock(store: SegmentStore, fresh: str) -> None:
    lock = store.fair_lock("s", 5.0)
    try:
        assert lock.__enter__()
    finally:
        try:
            lock.__exit__(None, None, None)
        except BaseException:
            lock.__exit__(None, None, None)
            raise


#: Where a call has many places and each run takes its time, so many are left out, as long as it takes seconds.
ONE_IN: Final = {
    ("nats", "append"): 5,
    ("nats", "append_together"): 3,
    ("nats", "create"): 3,
    ("nats", "create_together"): 3,
    ("nats", "delete"): 5,
    ("nats", "forget"): 5,
    ("nats", "forget at an offset"): 5,
    ("nats", "seal"): 3,
    ("nats", "truncate"): 3,
    ("postgresql", "append_together"): 4,
    ("postgresql", "concat"): 5,
    ("postgresql", "concat_unread"): 20,
    ("postgresql", "copy_segments"): 20,
    ("postgresql", "delete"): 8,
    ("postgresql", "forget"): 8,
    ("postgresql", "forget at an offset"): 8,
    ("postgresql", "seal"): 3,
    ("postgresql", "truncate"): 6,
    ("postgresql", "wait"): 4,
}
#: Of the store that is interrupted: so the first place in the pool that is lost is missed.
POOL_SIZE: Final = 1
IDLE_LOCK_SESSIONS: Final = 2
LISTENING_SESSIONS: Final = 1
DEADLINE: Final = 30.0

CALLS: dict[str, Call] = {
    "create": lambda store, fresh: store.create(fresh),
    "create_together": lambda store, fresh: store.create_together({fresh: b"first", f"{fresh}/0": b""}),
    "append": lambda store, fresh: store.append("s", b"data", attributes={"a": AttributeChange(ANY, b"value")}),
    "append_unread": lambda store, fresh: store.append_unread("s", b"data"),
    "append_unflushed": lambda store, fresh: store.append_unflushed(
        "s", b"data", attributes={"a": AttributeChange(ANY, b"v")}
    ),
    "append_together": lambda store, fresh: store.append_together([Append("s", b"one"), Append("t", b"two")]),
    "concat": lambda store, fresh: store.concat("t", "sealed"),
    "concat_unread": lambda store, fresh: store.concat_unread("t", "sealed"),
    "copy_segments": lambda store, fresh: store.copy_segments([SegmentCopy("sealed", fresh, 0, 5)]),
    "truncate": lambda store, fresh: store.truncate("s", store.info("s").length),
    "delete": lambda store, fresh: (store.create(fresh), store.delete(fresh)),
    "forget": lambda store, fresh: (store.create(fresh), store.forget(fresh)),
    "forget at an offset": lambda store, fresh: (
        store.create(fresh, start_offset=5),
        store.forget(fresh, expected_offset=5),
    ),
    "seal": lambda store, fresh: (store.create(fresh), store.seal(fresh)),
    "info": lambda store, fresh: store.info("s"),
    "infos": lambda store, fresh: store.infos(["s", "sealed"]),
    "read": lambda store, fresh: store.read("sealed", 0, 100),
    "read_starts": lambda store, fresh: store.read_starts(["s", "sealed"], 100),
    "list": lambda store, fresh: list(store.list()),
    "attributes": lambda store, fresh: store.attributes("s"),
    "wait": lambda store, fresh: store.wait({"t": store.info("t").length}, 0.001),
    "fair_lock": _fair_lock,
}


@pytest.fixture
def url(store_url: str) -> Iterator[str]:
    """In memory, where the system has files in memory: there are many runs, and what they store need not last."""
    if not (store_url.startswith("sqlite") and os.path.isdir("/dev/shm")):
        yield store_url
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield f"sqlite:///{folder}/store.db"


@pytest.fixture
def sessions(url: str) -> Iterator[Sessions | None]:
    """Those of the store that is interrupted, where a server has some."""
    if not url.startswith("postgresql"):
        yield None
        return
    with watched(url) as found:
        yield found


@contextmanager
def watched(url: str) -> Iterator[Sessions]:
    name = f"interrupted-{uuid.uuid4().hex[:12]}"
    with psycopg.connect(**dict(parse_address(url).conninfo), autocommit=True) as server:
        yield Sessions(f"{url}&pool_size={POOL_SIZE}&application_name={name}", server, name)


class Sessions:
    """What the server says of those who call themselves by one name."""

    def __init__(self, url: str, server: psycopg.Connection[tuple[int]], name: str) -> None:
        self.url = url
        self._schema = parse_address(url).schema
        self._server = server
        self._name = name

    def count(self, condition: str = "true") -> int:
        query = f"SELECT count(*) FROM pg_stat_activity WHERE starts_with(application_name, %s) AND ({condition})"
        return self._server.execute(query, (self._name,)).fetchone()[0]

    def drop_store(self) -> None:
        self._server.execute(sql.SQL("DROP SCHEMA IF EXISTS {} CASCADE").format(sql.Identifier(self._schema)))

    def are_in_order(self) -> bool:
        """None is in a transaction for long, and there are no more of them than the store may have at rest."""
        until(lambda: not self.count("xact_start IS NOT NULL"), "all transactions end")
        until(
            lambda: self.count() <= POOL_SIZE + IDLE_LOCK_SESSIONS + LISTENING_SESSIONS, "sessions that nobody uses end"
        )
        return True


@pytest.fixture
def stores(url: str, sessions: Sessions | None) -> Iterator[list[SegmentStore]]:
    """One that is interrupted, and one as of another process."""
    with open_store(sessions.url if sessions else url) as one, open_store(url) as other:
        for name in ("s", "t", "sealed"):
            one.create(name)
        for number in range(5):
            one.append("sealed", b"x" * 1000, attributes={str(number): AttributeChange(ANY, b"value")})
        one.seal("sealed")
        yield [one, other]


def one_in(store: SegmentStore, name: str, sparsely: int) -> int:
    scheme = urlsplit(store.url).scheme
    return 1 if scheme == "memory" else sparsely * ONE_IN.get((scheme, name), 1)


@FEW_OR_MORE
@pytest.mark.parametrize("name", CALLS)
def test_an_interrupted_call_holds_up_nobody(
    name: str, sparsely: int, stores: list[SegmentStore], sessions: Sessions | None
) -> None:
    one, other = stores
    if name in ("concat", "concat_unread", "copy_segments") and not one.guarantees.server_side_copy:
        return  # it refuses the call before it does anything
    numbers = itertools.count()
    count = 0
    call = partial(CALLS[name], one)
    for run in interrupts(lambda: call(f"fresh-{next(numbers)}"), one_in=one_in(one, name, sparsely), seed=name):
        count += 1
        assert isinstance(run.error, KeyboardInterrupt), f"{run.error!r} after an interrupt at {run.place}"
        for store in (other, one):
            assert all_go_on(store), f"{'this' if store is one else 'the other'} store, interrupted at {run.place}"
        assert isinstance(one.append("s", b"again"), Appended)
        assert sessions is None or sessions.are_in_order(), run.place
    assert count > 5 // sparsely


@FEW_OR_MORE
def test_an_interrupted_look_at_the_line_leaves_nobody_in_it(
    stores: list[SegmentStore], sparsely: int, sessions: Sessions | None
) -> None:
    one, other = stores
    queue = FairQueue(one, "s", SystemClock(), read=lambda deadline: None)

    def look() -> None:
        queue._calls_until_probe = 1
        try:
            queue.join_if_contended(Deadline(SystemClock(), DEADLINE))
        finally:
            try:
                queue.leave()
            except BaseException:  # interrupted
                queue.leave()
                raise

    for run in interrupts(look, one_in=one_in(one, "look", sparsely)):
        assert isinstance(run.error, KeyboardInterrupt), f"{run.error!r} after an interrupt at {run.place}"
        with other.fair_lock("s", 5.0) as is_held:
            assert is_held, run.place
        if isinstance(one, PostgresStore):
            assert not one._lock_connections._loans, run.place


def all_go_on(store: SegmentStore) -> bool:
    """Whether another thread can write, wait, and have the lock, and no snapshot is held."""

    def use() -> bool:
        with store.fair_lock("s", 5.0) as is_held:
            assert is_held
        assert isinstance(store.append_unread("s", b"unread"), Appended)
        assert isinstance(store.append_unflushed("s", b"unflushed"), Appended)
        answer = store.append("s", b"by another")
        assert isinstance(answer, Appended)
        assert store.wait({"s": answer.offset}, 5.0) == {"s"}
        return True

    return CallInThread(use).ended() is True


@FEW_OR_MORE
def test_together_is_together_also_when_it_is_interrupted(stores: list[SegmentStore], sparsely: int) -> None:
    one, other = stores

    def call() -> object:
        change = AttributeChange(ANY, one.info("s").length.to_bytes(8))
        return one.append_together([Append("s", b"x", None, {"n": change}), Append("t", b"x", None, {"n": change})])

    def are_equal() -> bool:
        lengths = {other.info(name).length for name in ("s", "t")}
        return len(lengths) == 1 and other.attributes("s", "n") == other.attributes("t", "n")

    for run in interrupts(call, one_in=one_in(one, "append_together", sparsely)):
        until(are_equal, f"a server ends what was interrupted at {run.place}", seconds=DEADLINE)


@FEW_OR_MORE
def test_segments_are_created_together_or_not_at_all_also_when_it_is_interrupted(
    stores: list[SegmentStore], sparsely: int
) -> None:
    one, other = stores
    numbers = itertools.count()

    def call() -> object:
        fresh = f"fresh-{next(numbers):05}"
        return one.create_together({fresh: b"first", f"{fresh}/0": b"", f"{fresh}/1": b"x"})

    def are_whole() -> bool:
        names = [name.partition("/")[0] for name in other.list("fresh")]
        return all(names.count(name) == 3 for name in names)

    for run in interrupts(call, one_in=one_in(one, "create_together", sparsely)):
        until(are_whole, f"a server ends what was interrupted at {run.place}", seconds=DEADLINE)


@pytest.mark.stores("memory", "sqlite", "postgresql")
@FEW_OR_MORE
def test_a_close_that_was_interrupted_can_be_repeated(url: str, sessions: Sessions | None, sparsely: int) -> None:
    with open_store(url) as keeper:
        keeper.create("s")

        opened: list[SegmentStore] = []

        def close() -> None:
            opened[-1].close()

        def again() -> None:
            opened.append(open_store(sessions.url if sessions else url))
            opened[-1].append("s", b"x")
            with opened[-1].fair_lock("s", 5.0) as is_held:
                assert is_held
            opened[-1].wait({"s": 0}, 1.0)

        for run in interrupts(close, one_in=sparsely, before=again):
            assert isinstance(run.error, KeyboardInterrupt), f"{run.error!r} after an interrupt at {run.place}"
            assert all_go_on(keeper), run.place
            opened[-1].close()
            with pytest.raises(ClosedError):
                opened[-1].append("s", b"x")
            until(
                lambda: sessions is None or not sessions.count(),
                f"no session, interrupted at {run.place}",
                seconds=DEADLINE,
            )


@pytest.mark.stores("sqlite")
@FEW_OR_MORE
def test_an_opening_that_was_interrupted_holds_up_nobody(url: str, sparsely: int) -> None:
    numbers = itertools.count()
    made: list[str] = []

    def make() -> None:
        made.append(f"{url}-{next(numbers)}")
        open_store(made[-1]).close()

    for run in interrupts(make, one_in=sparsely):
        with open_store(made[-1] if made else url) as store:
            store.create("s")
            assert all_go_on(store), run.place


@FEW_OR_MORE
def test_an_interrupted_opening_on_postgresql_leaves_no_session(postgres_url: str, sparsely: int) -> None:
    """Also one that makes the store. The frames are let go: one of psycopg may have a connection that no other has."""
    opened: list[SegmentStore] = []
    with watched(postgres_url) as sessions:

        def open_and_close() -> None:
            opened.append(open_store(sessions.url))
            opened[0].close()

        def renew() -> None:
            opened.clear()
            sessions.drop_store()

        for run in interrupts(open_and_close, one_in=3 * sparsely, before=renew):
            assert isinstance(run.error, KeyboardInterrupt), f"{run.error!r} after an interrupt at {run.place}"
            place = run.place
            del run
            for each in opened:
                each.close()
            with open_store(postgres_url) as store:
                store.create("s")
                assert all_go_on(store), place
            gc.collect()
            until(lambda: not sessions.count(), f"no session, interrupted at {place}", seconds=DEADLINE)


def test_an_interrupted_commit_at_the_cost_of_the_reserve_limits_no_later_one(tmp_path: Path) -> None:
    with open_store(f"sqlite:///{tmp_path / 'store.db'}") as one:
        assert isinstance(one, SqliteStore)
        one.create("s")
        for run in interrupts(lambda: at_the_cost_of_the_reserve(one)):
            assert one._log._growth_limit is None, run.place
        assert all_go_on(one)


def at_the_cost_of_the_reserve(store: SqliteStore) -> None:
    store._log.at_the_cost_of_the_reserve(store._writer, lambda: None, essential=True)
