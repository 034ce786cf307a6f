"""Durable listeners in a simulation: who is told what under one name, in whichever process, and what must hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from notifications import Notification, NotificationKey, PollingNotifier
from readergroup.group.model.state import ReaderGroupState
from synchronizer import Revision

from .world import Process

if TYPE_CHECKING:
    import readergroup as rg

    from .auditor import Auditor

#: The name under which all listen.
NAME: Final = "sizer"
#: Clocks run this much faster or slower at most.
_CLOCK_SLACK: Final = 1.02


@dataclass(eq=False)
class Hearing:
    """One call of a listener."""

    process: Process
    kind: str
    key: NotificationKey
    value: Any
    gap: bool
    #: It went on to its end. What it heard may still not count, if its process did not live to say so.
    returned: bool = False


class DurableHearings:
    """All calls of the listeners under one name, in all processes."""

    def __init__(self, auditor: Auditor, role_timeout: float) -> None:
        self._auditor = auditor
        self._role_timeout = role_timeout
        self.calls: dict[str, list[Hearing]] = {"segments": [], "readers": []}
        self.listening: list[Process] = []
        self._under_way: list[Hearing] = []
        #: Told of each call, before it begins.
        self.on_call: Callable[[Hearing], None] = lambda call: None

    def listen(self, process: Process, group: rg.ReaderGroup, during: Callable[[], object]) -> None:
        """Register listeners of a process, each of whose calls does ``during``."""
        self.listening.append(process)
        self._register(process, "segments", group.segment_notifier, lambda n: frozenset(n.segments), during)
        self._register(process, "readers", group.reader_notifier, lambda n: frozenset(n.readers), during)

    def _register(
        self,
        process: Process,
        kind: str,
        notifier: PollingNotifier[ReaderGroupState, Any],
        value_of: Callable[[Any], Any],
        during: Callable[[], object],
    ) -> None:
        def hear(notification: Notification) -> None:
            call = Hearing(process, kind, notification.key, value_of(notification), notification.gap)
            self._begin(call)
            try:
                during()
                call.returned = True
            finally:
                self._under_way.remove(call)

        notifier._role_timeout_seconds = self._role_timeout
        notifier.register_listener(hear, durable=NAME)

    def _begin(self, call: Hearing) -> None:
        self.on_call(call)
        calls, auditor = self.calls[call.kind], self._auditor
        now, healthy_since = auditor.world.simulation.now, auditor.world.healthy_since
        for other in self._under_way:
            since = max(other.process.in_contact_since, healthy_since)
            is_in_contact = other.process.runs and now - since > self._role_timeout * _CLOCK_SLACK
            if other.kind == call.kind and other.process is not call.process and is_in_contact:
                auditor.broken("S8", f"{call.process.name} is told of {call.kind}, and so is {other.process.name}")
        changes = auditor.changes[call.kind]
        expected = next((value for revision, value in reversed(changes) if revision <= call.key.revision), None)
        if call.value != expected:
            auditor.broken("S8", f"{call.process.name} is told {call}, it was {expected}")
        if calls and not call.gap:
            self._check_order(call)
        calls.append(call)
        self._under_way.append(call)

    def _check_order(self, call: Hearing) -> None:
        """Nothing before this is left out: somebody has heard it."""
        for revision, value in self._auditor.changes[call.kind]:
            if self._began(call.kind) < revision < call.key.revision and not self._is_heard(call.kind, revision):
                self._auditor.broken("S8", f"{call.process.name} is told {call}, and nobody {value} at {revision}")

    def _began(self, kind: str) -> Revision:
        return self.calls[kind][0].key.revision

    def _is_heard(self, kind: str, revision: Revision) -> bool:
        return any(
            call.returned and (call.key.revision == revision or (call.gap and call.key.revision >= revision))
            for call in self.calls[kind]
        )

    @property
    def missing(self) -> str | None:
        """What somebody who listens is still to hear."""
        if not any(process.runs for process in self.listening):
            return None
        for kind, calls in self.calls.items():
            for revision, value in self._auditor.changes[kind]:
                if not calls or (revision > self._began(kind) and not self._is_heard(kind, revision)):
                    return f"nobody was told of {kind}: {value} at {revision}"
        return None
