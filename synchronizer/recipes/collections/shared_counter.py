"""`SharedCounter`: an integer that all processes can add to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final, Literal, Unpack

from synchronizer.errors import InvalidArgumentError
from synchronizer.log.entries import Revision
from synchronizer.log.replica import AppliedUpdate
from synchronizer.state import State, Update
from synchronizer.store import ANY, AnyValue, SegmentStore

from .shared import Shared, SynchronizerOptions, ValueChange

#: The largest value of the stored form.
_LARGEST: Final = 2**63 - 1


class CounterState(State):
    value: int = 0


class AddToCounter(Update[CounterState], tag="add"):
    amount: int

    def apply_to(self, state: CounterState, revision: Revision) -> CounterState:
        return state.replace(value=_checked(state.value + self.amount))


class SetCounter(Update[CounterState], tag="set"):
    value: int

    def apply_to(self, state: CounterState, revision: Revision) -> CounterState:
        return state.replace(value=self.value)


COUNTER_UPDATES: Final[list[type[Update[CounterState]]]] = [AddToCounter, SetCounter]


class SharedCounter(Shared[CounterState]):
    """A shared integer of 64 bits, initially 0.

    ``value`` is the copy in this process; `refresh` brings it up to date. `add` returns when the addition is stored;
    it is stored once.

    Args:
        store: Holds the counter.
        name: The same in all processes that share it.
        **options: See `SynchronizerOptions`.
    """

    kind = "counter"

    def __init__(self, store: SegmentStore, name: str, **options: Unpack[SynchronizerOptions]) -> None:
        super().__init__(store, name, CounterState(), COUNTER_UPDATES, options)

    @property
    def value(self) -> int:
        """The value as this process knows it."""
        return self.synchronizer.state.value

    def add(self, amount: int = 1, *, timeout: float | None = None) -> int:
        """Add ``amount``, which may be negative, and return the result. Two calls that add 1 never get the same."""
        update = AddToCounter(amount=_checked(amount, "amount"))
        return self.synchronizer.update_state_unconditionally(update, timeout=timeout).value

    def put(self, value: int, *, timeout: float | None = None) -> None:
        """Set the value, whatever it is now."""
        self.replace(_checked(value), timeout=timeout)

    def replace(self, new: int, expected: int | Literal[AnyValue.ANY] = ANY, *, timeout: float | None = None) -> bool:
        """Set the value if it is ``expected``; return whether this call set it."""
        update = SetCounter(value=_checked(new, "new"))
        if expected is not ANY:
            _checked(expected, "expected")

        def decide(state: CounterState) -> tuple[Iterable[Update[CounterState]], bool]:
            return ([update], True) if expected in (ANY, state.value) else ([], False)

        return self.synchronizer.update_state_returning(decide, timeout=timeout)

    def watch(self) -> Iterator[int]:
        """Yield the value now, then the newest one after each change, until the counter is closed."""
        return (state.value for state in self.synchronizer.watch())

    def register_listener(self, listener: Callable[[ValueChange[int]], object]) -> Callable[[], None]:
        """Call ``listener`` with every change after the present copy; return a function that ends it."""

        def tell(
            told: Callable[[ValueChange[int]], object], before: int, after: int, applied: AppliedUpdate[CounterState]
        ) -> None:
            if before != after:
                told(ValueChange(before, after, applied.revision))

        return self._on_update(listener, lambda state: state.value, tell)


def _checked(value: object, name: str = "value") -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidArgumentError(f"{name} of a counter must be an int", found=type(value).__name__)
    if not -_LARGEST - 1 <= value <= _LARGEST:
        raise InvalidArgumentError("the value exceeds the 64 bits of a counter", value=value)
    return value
