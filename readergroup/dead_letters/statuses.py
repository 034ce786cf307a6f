"""Which dead letters of a stream were replayed or discarded: all that are not here are pending.

A letter is the bytes of the stream from its offset to that of the next one. Letters with one status that follow one
another are one span, so replaying everything costs a few bytes. Spans are forgotten when the stream is truncated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

from synchronizer import Map, Revision, State, Update
from synchronizer.spans import Spans, covers, from_offset, joined

Status = Literal["pending", "replayed", "discarded"]


class LetterStatuses(State):
    """By place (a segment of the stream, and the incarnation), the letters that are no longer pending."""

    replayed: Map[str, Spans] = Map()
    discarded: Map[str, Spans] = Map()

    def status_of(self, place: str, offset: int) -> Status:
        if covers(self.replayed.get(place, ()), offset):
            return "replayed"
        return "discarded" if covers(self.discarded.get(place, ()), offset) else "pending"

    @property
    def places(self) -> Sequence[str]:
        return sorted({*self.replayed, *self.discarded})

    def is_before(self, place: str, offset: int) -> bool:
        """Whether there is something to forget before the offset."""
        return any(spans.get(place, (offset,))[0] < offset for spans in (self.replayed, self.discarded))


class MarkLetters(Update[LetterStatuses], tag="mark-letters"):
    """Letters were replayed or discarded."""

    status: Literal["replayed", "discarded"]
    spans: Map[str, Spans]

    def apply_to(self, state: LetterStatuses, revision: Revision) -> LetterStatuses:
        marked: Map[str, Spans] = getattr(state, self.status)
        for place, spans in self.spans.items():
            marked = marked.set(place, joined(marked.get(place, ()), spans))
        return state.replace(**{self.status: marked})


class ForgetLetters(Update[LetterStatuses], tag="forget-letters"):
    """The stream has no letters before these offsets any more; None: none at all in this place."""

    starts: Map[str, int | None]

    def apply_to(self, state: LetterStatuses, revision: Revision) -> LetterStatuses:
        return state.replace(replayed=self._rest(state.replayed), discarded=self._rest(state.discarded))

    def _rest(self, marked: Map[str, Spans]) -> Map[str, Spans]:
        for place, start in self.starts.items():
            rest = () if start is None else from_offset(marked.get(place, ()), start)
            if rest:
                marked = marked.set(place, rest)
            elif place in marked:
                marked = marked.delete(place)
        return marked


LETTER_UPDATES: Final = (MarkLetters, ForgetLetters)
