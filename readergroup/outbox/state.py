"""What all processes know of an outbox: which streams its events cannot reach."""

from __future__ import annotations

from typing import Final

from synchronizer import Map, Revision, State, Update


class OutboxState(State):
    """The streams whose events wait in the outbox, with the reasons."""

    stuck: Map[str, str] = Map()


class ReportStuck(Update[OutboxState], tag="report-stuck"):
    """The events of a stream wait in the outbox."""

    stream: str
    reason: str

    def apply_to(self, state: OutboxState, revision: Revision) -> OutboxState:
        return state.replace(stuck=state.stuck.set(self.stream, self.reason))


class ReportMoving(Update[OutboxState], tag="report-moving"):
    """The events of a stream reach it again."""

    stream: str

    def apply_to(self, state: OutboxState, revision: Revision) -> OutboxState:
        return state.replace(stuck=state.stuck.delete(self.stream)) if self.stream in state.stuck else state


OUTBOX_UPDATES: Final = (ReportStuck, ReportMoving)
