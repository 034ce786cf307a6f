"""What a listener raises ends no thread of the SDK, also if it is no `Exception`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

import readergroup as rg
from notifications import Change
from tests.notifications.counting import Add, Counted, Counter, CountNotifier
from tests.waiting import until


class Panic(BaseException):
    """As extensions of other languages raise it."""


ERRORS = [SystemExit, asyncio.CancelledError, lambda: BaseExceptionGroup("both", [Panic()]), Panic]


@pytest.fixture(params=ERRORS, ids=["exit", "cancelled", "group", "panic"])
def error(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], BaseException]]:
    died: list[object] = []
    monkeypatch.setattr(threading, "excepthook", died.append)
    yield request.param
    assert not died


@pytest.fixture
def client(tmp_path: Path) -> Iterator[rg.Client]:
    with rg.connect(f"sqlite:///{tmp_path}/s.db") as client:
        yield client


def test_of_updates(client: rg.Client, error: Callable[[], BaseException]) -> None:
    visits = client.synchronizer("visits", initial=Counter(), updates=[Add])
    heard: list[object] = []

    def listener(applied: object) -> None:
        heard.append(applied)
        if len(heard) == 2:
            raise error()

    visits.on_update(listener)
    for _ in range(4):
        visits.update_state_unconditionally(Add())
    until(lambda: len(heard) >= 4)


@pytest.mark.parametrize("where", ["listener", "durable", pytest.param("detect", marks=pytest.mark.unexpected_errors)])
def test_of_notifications(client: rg.Client, error: Callable[[], BaseException], where: str) -> None:
    heard: list[int] = []
    raised: list[BaseException] = []

    def may_raise(value: int) -> None:
        if value == 2 and not raised:
            raised.append(error())
            raise raised[0]

    class Raising(CountNotifier):
        def detect(self, before: Counter | None, after: Counter, change: Change) -> Iterable[Counted]:
            if where == "detect":
                may_raise(after.value)
            return super().detect(before, after, change)

    def listener(notification: Counted) -> None:
        if where != "detect":
            may_raise(notification.value)
        heard.append(notification.value)

    visits = client.synchronizer("visits", initial=Counter(), updates=[Add])
    with Raising(visits, interval_seconds=0.1) as notifier:
        notifier.register_listener(listener, **({"durable": "audit"} if where == "durable" else {}))
        for value in range(1, 5):
            visits.update_state_unconditionally(Add())
            # Else the change that `detect` failed on may be told together with the next one.
            if value == 2 and where != "listener":
                until(lambda: 2 in heard)
        until(lambda: 4 in heard)
        assert raised and (2 in heard) == (where != "listener")


def test_of_an_election(client: rg.Client, error: Callable[[], BaseException]) -> None:
    elected: list[int] = []
    lost: list[bool] = []

    def on_elected(token: int) -> None:
        elected.append(token)
        raise error()

    with client.leader_election("boss", "me") as election:
        election.on_elected(on_elected)
        election.on_lost(lambda: lost.append(True))
        election.campaign(timeout=10.0)
        until(lambda: bool(elected))
        election.resign()
        until(lambda: bool(lost))
