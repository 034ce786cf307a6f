"""What one client goes through when its servers or the network fail: a store says what it knows, and recovers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest

from synchronizer import Appended, Conflict, SegmentStore, StoreUnavailableError, UnknownOutcome, open_store
from tests.chaos.evidence import RECOVERY_SECONDS
from tests.chaos.hosts import Fault, Host, ServerHost, StoreKind, left_over, open_sockets
from tests.chaos.hosts import host as host_of
from tests.chaos.recovery import try_out
from tests.servers.unavailable import ServerUnavailable
from tests.waiting import PATIENCE_SECONDS, busyness, until

LONG = PATIENCE_SECONDS
FAULT_SECONDS: Final = 0.3

#: One after the other; the rest is in the schedules. Of those that go on for long, a cluster has to do with the worst.
FAULTS: Final[dict[StoreKind, list[Fault]]] = {
    "postgresql": ["cut", "answers lost", "killed", "frozen"],
    "nats": ["cut", "answers lost", "killed", "frozen"],
    "nats-cluster": ["leader killed", "all nodes killed"],
}


@pytest.fixture(scope="module", params=["postgresql", "nats", pytest.param("nats-cluster", marks=pytest.mark.broad)])
def host(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerHost]:
    with ExitStack() as running:
        try:
            host = running.enter_context(host_of(request.param, tmp_path_factory.mktemp("host")))
        except ServerUnavailable as reason:
            pytest.skip(f"no {request.param} here: {reason}")
        assert isinstance(host, ServerHost)
        yield host


@pytest.fixture
def url(host: Host, tmp_path: Path) -> Iterator[str]:
    with host.fresh_store(tmp_path) as url:
        yield url


@pytest.fixture
def far_store(host: Host, url: str) -> Iterator[SegmentStore]:
    """By the way that network faults befall."""
    with open_store(host.through_proxy(url)) as store:
        store.create("s")
        store.append("s", b"before;")
        yield store


@pytest.fixture
def near_store(url: str) -> Iterator[SegmentStore]:
    with open_store(url) as store:
        yield store


def test_an_append_whose_answer_is_lost_has_an_unknown_outcome_and_is_stored_once(
    host: ServerHost, far_store: SegmentStore, near_store: SegmentStore
) -> None:
    with host.losing_answers(1, to=b"mine;"):
        assert isinstance(far_store.append("s", b"mine;", expected_offset=7), UnknownOutcome)
    again = far_store.append("s", b"mine;", expected_offset=7)
    assert isinstance(again, Conflict) and (again.length, again.delta) == (12, b"mine;")
    assert near_store.read("s", 0, 100) == b"before;mine;"


@pytest.mark.parametrize(
    "verb",
    [
        lambda store: store.create("new"),
        lambda store: store.truncate("s", 7),
        lambda store: store.seal("s"),
        lambda store: store.delete("s"),
    ],
    ids=["create", "truncate", "seal", "delete"],
)
def test_a_verb_whose_answer_is_lost_says_that_the_store_is_away_and_may_be_repeated(
    verb: Callable[[SegmentStore], object], host: ServerHost, far_store: SegmentStore
) -> None:
    with host.losing_answers(1):
        with pytest.raises(StoreUnavailableError):
            verb(far_store)
    verb(far_store)


def test_an_append_that_arrives_after_it_was_given_up_has_no_effect_on_what_was_decided_meanwhile(
    host: ServerHost, far_store: SegmentStore, near_store: SegmentStore
) -> None:
    answers = []
    with host.suffer("requests held back"):
        late = threading.Thread(target=lambda: answers.append(far_store.append("s", b"late;", expected_offset=7)))
        late.start()
        threading.Event().wait(0.2)
        assert isinstance(near_store.append("s", b"first;", expected_offset=7), Appended)
    late.join(LONG)
    assert near_store.read("s", 0, 100) == b"before;first;"
    (answer,) = answers
    assert isinstance(answer, Conflict | UnknownOutcome)


def test_a_wait_goes_on_over_a_cut_and_hears_of_what_was_appended_meanwhile(
    host: ServerHost, far_store: SegmentStore, near_store: SegmentStore
) -> None:
    heard: list[frozenset[str]] = []

    def wait() -> None:
        while not heard:
            try:
                if changed := far_store.wait({"s": 7}, LONG):
                    heard.append(changed)
            except StoreUnavailableError:
                threading.Event().wait(0.01)

    waiting = threading.Thread(target=wait)
    waiting.start()
    with host.suffer("cut"):
        near_store.append("s", b"meanwhile;")
        threading.Event().wait(FAULT_SECONDS)
    begun = time.monotonic()
    waiting.join(LONG)
    assert heard == [frozenset({"s"})]
    assert time.monotonic() - begun < RECOVERY_SECONDS[host.kind] * busyness()


def test_after_each_fault_appends_and_wake_ups_go_on_within_the_bound_and_nothing_is_lost_or_twice(
    host: ServerHost, tmp_path: Path
) -> None:
    threads, sockets = threading.active_count(), open_sockets()
    for fault in FAULTS[host.kind]:
        with host.fresh_store(tmp_path) as url:
            trial = try_out(host, url, fault, FAULT_SECONDS)
        print(trial)
        assert max(trial.answered, trial.heard) < RECOVERY_SECONDS[host.kind] * busyness(), trial
    assert left_over(host) == 0
    until(lambda: threading.active_count() <= threads and open_sockets() <= sockets)
