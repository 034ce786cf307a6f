"""Every call to a driver or the system fails once with every kind of error, below a group that works meanwhile.

Only our errors come out, no thread ends, no lease is lost, and everything goes on and is complete.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, count

import pytest

import readergroup as rg
from synchronizer import ANY, AttributeChange, ReaderGroupError, UnknownOutcome, open_store
from tests.faults.points import Fault, Points, install
from tests.faults.workload import Workload

pytestmark = [pytest.mark.unexpected_errors, pytest.mark.timeout(600)]

#: How long a fault waits for somebody to come to its point.
REACH_SECONDS = 1.0

#: Points that are perhaps not reached again while a fault waits there, by the beginning of their names: what reaches
#: them. Of the others, one of ten may be missed on a busy machine.
SELDOM_REACHED: Mapping[str, str] = {
    "sqlite3 PRAGMA": "a new connection",
    "sqlite3.connect": "a new connection",
    "psycopg.Connection.connect": "a new connection",
    "select.poll": "a new connection, or a new watch of a file",
    "nats.TcpTransport.drain": "a new connection, or one whose buffer is full",
    "nats.TcpTransport.write": "a new connection, a subscription or a ping",
}


@pytest.fixture
def points(monkeypatch: pytest.MonkeyPatch) -> Iterator[Points]:
    points = Points()
    yield points
    points.arm(None)


def backend_of(url: str) -> str:
    return url.partition("://")[0]


def chosen(points: Points, rng: random.Random, is_all: bool) -> Sequence[Fault]:
    """In an order by chance: one fault for each point, or all of them, before and after the call."""
    faults = [points.faults_of(point) for point in sorted(points.reached)]
    if not is_all:
        faults = [[rng.choice(of_point)] for of_point in faults]
    together = list(chain.from_iterable(faults))
    rng.shuffle(together)
    return together


@pytest.mark.stores("memory", "sqlite", "postgresql", "nats")
@pytest.mark.parametrize(
    "is_all",
    [False, pytest.param(True, marks=[pytest.mark.broad, pytest.mark.timeout(1800)])],
    ids=["one", "all"],
)
def test_a_group_lives_through_every_error_of_every_call(
    store_url: str, points: Points, monkeypatch: pytest.MonkeyPatch, is_all: bool
) -> None:
    open_store(store_url).close()  # the modules are there now
    install(points, backend_of(store_url), monkeypatch)
    with Workload(rg.connect(store_url, timeout=10.0)) as workload:
        points.reached.clear()  # what only the opening needs is failed by another test
        workload.until_all_went_on()
        faults = chosen(points, random.Random(1), is_all)
        missed = {fault.point for fault in faults if not fault.point.startswith(tuple(SELDOM_REACHED))}
        often = len(missed)
        for fault in faults:
            points.arm(fault)
            if not points.fired.wait(REACH_SECONDS):
                workload.until_all_went_on()  # a busy machine takes longer for that
            if points.fired.is_set():
                missed.discard(fault.point)
                workload.until_all_went_on()
            points.arm(None)
            workload.check(fault)
        assert len(missed) <= often / 10, missed
        workload.end()


@pytest.mark.stores("sqlite", "postgresql", "nats")
@pytest.mark.parametrize("each", [4, pytest.param(1, marks=pytest.mark.broad)], ids=["some calls", "each call"])
@pytest.mark.parametrize("is_new", [True, False])
def test_a_store_that_any_call_of_its_opening_or_closing_fails_can_be_opened_again(
    store_url: str, points: Points, monkeypatch: pytest.MonkeyPatch, is_new: bool, each: int
) -> None:
    open_store(store_url).close()
    install(points, backend_of(store_url), monkeypatch)

    def use(url: str) -> None:
        with open_store(url) as store:
            store.create("s")
            answers = {
                b"x": store.append("s", b"x", attributes={"a": AttributeChange(ANY, b"1")}),
                b"y": store.append_unread("s", b"y"),
                b"z": store.append_unflushed("s", b"z"),
            }
            for data, answer in answers.items():  # what failed before may come to the server between them
                assert isinstance(answer, UnknownOutcome) or store.read("s", answer.offset, 1) == data

    for number in count(1, each):
        url = f"{store_url}{number}" if is_new else store_url
        points.fail_nth(number)
        with suppress(ReaderGroupError):
            use(url)
        if not points.fired.is_set():
            break
        use(url)  # nothing is left that keeps others out
    assert number > 5
