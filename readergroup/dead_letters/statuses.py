"""Which dead letters of a stream were replayed or discarded: all that are not here are pending.

A letter is the bytes of the stream from its offset to that of the next one. Letters with one status that follow one
another are one span, so replaying everything costs a few bytes. Spans are forgotten when the stream is truncated.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Final, Literal

from synchronizer import Map, Revision, State, Update

Status = Literal["pending", "replayed", "discarded"]
#: The bounds of spans, in order: the start and end of the first, of the second, and so on.
Spans = tuple[int, ...]


def joined(spans: Spans, added: Spans) -> Spans:
    """Return the spans that cover what either covers."""
    bounds: list[int] = []
    for start, end in sorted([*pairs(spans), *pairs(added)]):
        if bounds and start <= bounds[-1]:
            bounds[-1] = max(bounds[-1], end)
        else:
            bounds += [start, end]
    return tuple(bounds)


def from_offset(spans: Spans, offset: int) -> Spans:
    """Return what the spans cover from ``offset`` on."""
    return tuple(bound for start, end in pairs(spans) if end > offset for bound in (max(start, offset), end))


def pairs(spans: Spans) -> Iterable[tuple[int, int]]:
    return zip(spans[::2], spans[1::2], strict=True)


class LetterStatuses(State):
    """By place (a segment of the stream, and the incarnation), the letters that are no longer pending."""

    replayed: Map[str, Spans] = Map()
    discarded: Map[str, Spans] = Map()

    def status_of(self, place: str, offset: int) -> Status:
        if _covers(self.replayed.get(place, ()), offset):
            return "replayed"
        return "discarded" if _covers(self.discarded.get(place, ()), offset) else "pending"

    @property
    def places(self) -> Sequence[str]:
        return sorted({*self.replayed, *self.discarded})

    def is_before(self, place: str, offset: int) -> bool:
        """Whether there is something to forget before the offset."""
        return any(spans.get(place, (offset,))[0] < offset for spans in (self.replayed, self.discarded))


def _covers(spans: Spans, offset: int) -> bool:
    return bisect_right(spans, offset) % 2 == 1


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
