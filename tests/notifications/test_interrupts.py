"""Ctrl-C anywhere while a listener is registered or unregistered: nothing is left behind, and both can be repeated."""

from __future__ import annotations

import threading

import pytest

from synchronizer import StateSynchronizer
from tests.interrupts import FEW_OR_MORE, interrupts
from tests.notifications.counting import Add, Counter, CountNotifier, Heard
from tests.waiting import until


@FEW_OR_MORE
@pytest.mark.parametrize(("durable", "one_in"), [(None, 2), ("name", 5)], ids=["plain", "durable"])
def test_an_interrupted_registration_leaves_nothing_behind(
    notifier: CountNotifier, durable: str | None, one_in: int, sparsely: int
) -> None:
    def register_and_unregister() -> None:
        notifier.register_listener(heard, durable=durable)
        notifier.unregister_listener(heard)

    heard = Heard()
    register_and_unregister()  # an interrupt while a module is loaded would leave its lock locked
    before = {*threading.enumerate()}
    for run in interrupts(register_and_unregister, one_in=one_in * sparsely, seed=durable):
        assert isinstance(run.error, KeyboardInterrupt), f"{run.error!r} after an interrupt at {run.place}"
        register_and_unregister()
        until(lambda: not living_since(before), f"threads end, interrupted at {run.place}", seconds=30)


@FEW_OR_MORE
def test_a_listener_is_registered_once_after_an_interrupt(
    visits: StateSynchronizer[Counter], notifier: CountNotifier, sparsely: int
) -> None:
    heard = [Heard()]
    notifier.register_listener(heard[0])

    def renew() -> None:
        notifier.unregister_listener(heard[0])
        heard[:] = [Heard()]

    for run in interrupts(lambda: notifier.register_listener(heard[0]), one_in=sparsely, before=renew):
        assert isinstance(run.error, KeyboardInterrupt), f"{run.error!r} after an interrupt at {run.place}"
        notifier.register_listener(heard[0])
        value = visits.update_state_unconditionally(Add()).value
        assert heard[0].wait_for(value) == [value - 1, value], run.place


@FEW_OR_MORE
def test_an_interrupted_registration_takes_no_change_from_other_listeners(
    visits: StateSynchronizer[Counter], notifier: CountNotifier, sparsely: int
) -> None:
    other, heard = Heard(), Heard()
    notifier.register_listener(other)

    def change() -> None:
        notifier.unregister_listener(heard)
        visits.update_state_unconditionally(Add())

    with notifier._polling._polling:  # the background threads tell nothing meanwhile
        for run in interrupts(lambda: notifier.register_listener(heard), one_in=sparsely, before=change):
            assert isinstance(run.error, KeyboardInterrupt), f"{run.error!r} after an interrupt at {run.place}"
            notifier.poll()
            assert other.wait_for(visits.state.value), run.place


def living_since(before: set[threading.Thread]) -> list[threading.Thread]:
    # Python lists a thread for ever that an interrupt within its `Thread.start` kept from beginning: it is not alive.
    return [thread for thread in {*threading.enumerate()} - before if thread.is_alive()]
