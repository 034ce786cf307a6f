"""What the sampler found: values that requests share and nothing changes."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field

from synchronizer import Revision

from ..group.lag import GroupLag
from ..group.model.state import ReaderGroupState
from .flow import GroupFlow, Written
from .letters import LetterCount
from .retries import NOTHING, Waiting


@dataclass(frozen=True, slots=True)
class GroupSample:
    """A group at one moment."""

    name: str
    state: ReaderGroupState
    revision: Revision
    lag: GroupLag
    #: When it was read, in seconds since 1970.
    at: float
    retries: Waiting = NOTHING
    flow: GroupFlow = GroupFlow()
    #: The readers whose leases have expired, as this process sees them. Only other readers can remove them.
    expired: Set[str] = frozenset()
    #: Why a later reading failed. The rest is then as old as `at`.
    error: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """All groups of the store, read one after the other."""

    groups: Mapping[str, GroupSample] = field(default_factory=dict)
    #: Groups that cannot be read while the store answers, and why.
    unreadable: Mapping[str, str] = field(default_factory=dict)
    #: The names of shared states, and how many bytes their logs hold.
    states: Mapping[str, int] = field(default_factory=dict)
    #: How many shared states are not in `states`, because there are too many.
    states_left_out: int = 0
    #: The streams with dead letters.
    letters: Mapping[str, LetterCount] = field(default_factory=dict)
    #: What was written to the streams that groups read.
    written: Written = field(default_factory=Written)
    #: The events that wait in the outbox, and the age of the oldest in seconds. None: there is no outbox.
    outbox: tuple[int, float] | None = None
    #: When it was complete, in seconds since 1970 and on the clock.
    at: float = 0.0
    at_monotonic: float = float("-inf")
    #: How long it took.
    seconds: float = 0.0
    #: Why the store could not be read.
    error: str | None = None
