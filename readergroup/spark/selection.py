"""Which streams a read has: those that it names, or all whose names match a pattern."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from functools import partial

from synchronizer import InvalidArgumentError, NotFoundError

from ..client import Client
from ..streams.config import StreamCut, number_of
from ..streams.data.places import check_offset
from ..streams.state import StreamState
from .connection import backoff_of
from .options import ReadBound, ReadOptions


def selected(
    client: Client, options: ReadOptions, known: Collection[str] = (), *, must_exist: bool = True
) -> list[StreamState]:
    """Return the streams of the read, by name, without those that are ``known``.

    Raise if a stream that the read names does not exist, unless it need not.
    """
    named = [name for name in options.streams if name not in known]
    if options.pattern is not None:
        metadata = client.streams.metadata
        states = metadata.states(None, None, lambda name: name not in known and options.reads(name))
        named = [state.name for state in states]
    found: list[StreamState] = []
    for name in sorted(named):
        try:
            found.append(client.streams.fetch_state(name))
        except NotFoundError:
            if must_exist and options.pattern is None:
                raise
    return found


def resolved(client: Client, state: StreamState, place: ReadBound) -> StreamCut:
    """Return the cut of the place in the stream. Raise for a cut that does not stand at events of this stream.

    A stream of which the place has no cut begins at its head, as one does that is created later.
    """
    if place == "earliest":
        return state.head_cut
    if place == "latest":
        return client.streams.tail_cut(state)
    if isinstance(place, datetime):
        return client.batch.cut_at(state.name, place)
    cut = place.get(state.name, state.head_cut)
    if cut.incarnation not in (None, state.incarnation):
        raise InvalidArgumentError(
            "the cut belongs to a deleted stream of this name; use a cut of the present stream", cut=str(cut)
        )
    for segment, offset in cut.offsets.items():
        if number_of(segment) in state.segments:
            backoff_of(client).retry(partial(check_offset, client.store, segment, state.incarnation, offset))
        elif number_of(segment) >= state.next_number:
            state.record(segment)  # raises for a segment that never existed
    return cut.model_copy(update={"incarnation": state.incarnation})
