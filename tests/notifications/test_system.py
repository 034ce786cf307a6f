from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest

from notifications import Change, Notification, NotificationSystem
from synchronizer import ClosedError, Revision


class Joined(Notification):
    reader: str


class JoinedAgain(Joined):
    pass


class Left(Notification):
    reader: str


def change(source: str) -> Change:
    return Change(source=source, revision=Revision(0, 0), cause="join", seen_at=datetime(2026, 1, 1, tzinfo=UTC))


@pytest.fixture
def system() -> Iterator[NotificationSystem]:
    system = NotificationSystem(threads=False)
    yield system
    system.close()


def test_a_listener_hears_its_source_and_class_alone(system: NotificationSystem) -> None:
    heard: list[Notification] = []
    system.register_listener(heard.append, source="billing", kind=Joined)
    told = Joined(change=change("billing"), reader="r1")
    for notification in (
        told,
        Left(change=change("billing"), reader="r1"),
        Joined(change=change("other"), reader="r1"),
    ):
        system.publish(notification)
    system.deliver()
    assert heard == [told]


def test_a_listener_of_a_class_hears_its_subclasses_in_the_order_of_publication(system: NotificationSystem) -> None:
    every: list[Notification] = []
    joined: list[Notification] = []
    system.register_listener(every.append, source="billing")
    system.register_listener(joined.append, source="billing", kind=Joined)
    told = [kind(change=change("billing"), reader="r1") for kind in (JoinedAgain, Left, Joined, JoinedAgain)]
    for notification in told:
        system.publish(notification)
    system.deliver()
    assert every == told
    assert joined == [told[0], told[2], told[3]]


def test_an_unregistered_listener_hears_nothing_more_not_even_what_was_queued(system: NotificationSystem) -> None:
    heard: list[Notification] = []
    subscription = system.register_listener(heard.append, source="billing")
    system.publish(Left(change=change("billing"), reader="r1"))
    system.unregister(subscription)
    system.unregister(subscription)
    system.publish(Left(change=change("billing"), reader="r2"))
    system.deliver()
    subscription.deliver()
    assert heard == []


def test_a_listener_that_exits_the_process_is_a_failing_listener(system: NotificationSystem) -> None:
    heard: list[Notification] = []
    system.register_listener(lambda n: exit(3), source="billing")
    system.register_listener(heard.append, source="billing")
    system.publish(Left(change=change("billing"), reader="r1"))
    system.deliver()
    assert len(heard) == 1
    assert system.failures == 1


def test_a_closed_system_refuses_listeners(system: NotificationSystem) -> None:
    system.close()
    system.close()
    with pytest.raises(ClosedError):
        system.register_listener(print, source="billing")


@pytest.mark.filterwarnings("error")
def test_a_coroutine_that_waits_for_an_earlier_one_ends_with_its_loop(system: NotificationSystem) -> None:
    begun: list[str] = []

    async def listen(notification: Joined) -> None:
        begun.append(notification.reader)
        await asyncio.sleep(1000)

    async def main() -> None:
        system.register_listener(listen, source="billing", kind=Joined)
        for reader in ("r1", "r2"):
            system.publish(Joined(change=change("billing"), reader=reader))
        system.deliver()
        await asyncio.sleep(0.01)

    asyncio.run(main())
    gc.collect()  # Python warns of a coroutine that was never awaited then
    assert begun == ["r1"]
