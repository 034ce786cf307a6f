"""Guarantee S8 of a durable name: processes that die at any operation of the store, and whoever comes after them."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from synchronizer import ManualClock, SegmentStore, StoreUnavailableError, open_store
from synchronizer.testing import FailingStore, Operation
from tests.notifications.counting import Add, Counted, CountNotifier, counter

TIMEOUT_SECONDS = 9.0


class Killed(BaseException):
    """The process ends here."""


class Told:
    """What all processes together were told, in the order of the calls, and which of the calls returned."""

    def __init__(self) -> None:
        self.calls: list[tuple[Counted, bool]] = []

    def hear(self, process: Process, notification: Counted) -> None:
        returns = not process.dies_in_call
        self.calls.append((notification, returns))
        if not returns:
            process.kill()
            raise Killed


class Process:
    def __init__(self, store: SegmentStore, clock: ManualClock, told: Told) -> None:
        self.dies_in_call = False
        self.store = FailingStore(store)
        self.notifier = CountNotifier(counter(self.store, clock=clock), role_timeout_seconds=TIMEOUT_SECONDS)
        self.notifier.register_listener(lambda notification: told.hear(self, notification), durable="sizer")

    def kill(self) -> None:
        self.store.unavailable = True

    def kill_after(self, operations: int) -> None:
        left = operations

        def before(operation: Operation) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                self.kill()
                raise Killed

        self.store.before = before

    def survives(self, act: Callable[[], object]) -> bool:
        try:
            act()
        except StoreUnavailableError:
            pass
        except Killed:
            return False
        return True


STEPS = st.lists(
    st.one_of(
        st.sampled_from(["change", "change", "compact", "second", "seconds", "die in a call", "lose", "close"]),
        st.tuples(st.just("die"), st.integers(0, 12)),
        st.tuples(st.just("poll"), st.integers(0, 1)),
    ),
    max_size=60,
)


@given(STEPS)
def test_each_change_is_heard_at_least_once_in_order_or_covered_by_a_gap(
    steps: list[str | tuple[str, int]],
) -> None:
    clock, told = ManualClock(), Told()
    with open_store("memory://") as store:
        elsewhere = counter(store)

        def start() -> Process:
            return Process(store, clock, told)

        def poll(number: int) -> None:
            if not processes[number].survives(processes[number].notifier.poll):
                processes[number] = start()

        processes = [start(), start()]
        for step in steps:
            match step:
                case "change":
                    elsewhere.update_state_unconditionally(Add())
                case "compact":
                    elsewhere.compact()
                case "second":
                    clock.advance(1)
                case "seconds":
                    for _ in range(4):
                        clock.advance(2)
                        poll(1)
                case "die in a call":
                    processes[0].dies_in_call = True
                case "lose":
                    processes[0].store.lose_answers()
                case "close":
                    processes[0].survives(processes[0].notifier.close)
                    processes[0] = start()
                case ("die", operations):
                    processes[0].kill_after(operations)
                case ("poll", number):
                    poll(number)
        for _ in range(int(3 * TIMEOUT_SECONDS)):
            for number in range(2):
                processes[number].store.before = None
                poll(number)
            clock.advance(1)
        check(told, elsewhere.fetch_updates().value)
        for process in processes:
            process.notifier.close()


def check(told: Told, newest: int) -> None:
    keys = {}
    heard = -1
    for notification, returned in told.calls:
        value = notification.value
        assert keys.setdefault(value, notification.key) == notification.key
        # At most what was told last is told again, and nothing is left out.
        assert value in (heard, heard + 1) or (notification.gap and value > heard), (value, heard)
        if returned:
            heard = value
    assert heard == newest
