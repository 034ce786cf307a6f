"""What a notifier observes outside of its log: told at each poll, after the changes of the log."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from notifications import OBSERVATION, Change
from synchronizer import InvalidArgumentError, ManualClock, SegmentStore
from tests.notifications.counting import Add, Counted, Counter, CountNotifier, Heard, counter


class Thermometer(CountNotifier):
    """Also tells each temperature that is put into it."""

    temperatures: list[int | Exception]

    def look(self, state: Counter, change: Change) -> Iterable[Counted]:
        while self.temperatures:
            found = self.temperatures.pop(0)
            if isinstance(found, Exception):
                raise found
            yield Counted(change=change, value=found)


@pytest.fixture
def thermometer(store: SegmentStore) -> Iterable[Thermometer]:
    with Thermometer(counter(store, clock=ManualClock())) as notifier:
        notifier.temperatures = []
        yield notifier


def test_observations_are_told_once_after_the_changes_of_the_log(thermometer: Thermometer) -> None:
    heard = Heard()
    thermometer.register_listener(heard)
    thermometer.temperatures = [20, 21]
    thermometer.synchronizer.update_state_unconditionally(Add(amount=5))
    thermometer.poll()
    thermometer.poll()
    assert heard.values == [0, 5, 20, 21]
    assert [each.cause for each in heard.notifications[2:]] == [OBSERVATION] * 2
    thermometer.temperatures = [22]
    thermometer.poll()
    assert thermometer.wait(timeout=0).value == 5
    keys = [each.key for each in heard.notifications]
    assert keys == sorted(set(keys))


def test_nobody_observes_for_nobody(thermometer: Thermometer) -> None:
    thermometer.temperatures = [20]
    thermometer.poll()
    assert thermometer.temperatures == [20]


def test_an_error_of_an_observation_is_one_of_the_poll_and_loses_no_change(thermometer: Thermometer) -> None:
    heard = Heard()
    thermometer.register_listener(heard)
    thermometer.temperatures = [OSError("broken"), 20]
    thermometer.synchronizer.update_state_unconditionally(Add(amount=5))
    with pytest.raises(OSError, match="broken"):
        thermometer.poll()
    thermometer.poll()
    assert heard.values == [0, 5, 20]


@pytest.mark.parametrize("method", ["look", "detect", "before_poll", "watched"])
def test_no_method_of_a_notifier_is_a_coroutine(store: SegmentStore, method: str) -> None:
    async def wrong(*arguments: object) -> Any:
        return ()

    notifier = type("Wrong", (CountNotifier,), {method: wrong})
    with pytest.raises(InvalidArgumentError, match=f"{method} must not be async"):
        notifier(counter(store, clock=ManualClock()))
