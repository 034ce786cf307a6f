"""The JSON documents of the web view."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from ..group.lag import GroupLag
from ..group.model.state import ReaderGroupState
from ..group.words import condition
from ..states.kinds import is_name
from ..streams.config import SegmentId, stream_of
from .history import GroupHistory
from .sample import GroupSample, Sample

#: How many rows of a table a document has.
MAX_ROWS: Final = 200
MAX_GROUPS: Final = 500

Document = dict[str, Any]


def encode(document: object) -> bytes:
    """Return the document on one line."""
    return json.dumps(document, allow_nan=False, separators=(",", ":")).encode()


def overview(sample: Sample) -> Document:
    """Return the groups with their totals, the shared states, and the streams with dead letters."""
    groups = sorted(sample.groups.values(), key=lambda each: each.name)
    return {
        "at": sample.at,
        "seconds": round(sample.seconds, 4),
        "error": sample.error,
        "groups": [group_summary(each) for each in groups[:MAX_GROUPS]],
        "groups_left_out": max(0, len(groups) - MAX_GROUPS),
        "unreadable": [{"group": name, "error": error} for name, error in list(sample.unreadable.items())[:MAX_ROWS]],
        "states": [{"name": name, "bytes": size, "has_updates": is_name(name)} for name, size in sample.states.items()],
        "states_left_out": sample.states_left_out,
        "dead_letters": [
            {"stream": stream, "pending": found.pending, "is_partial": found.is_partial}
            for stream, found in sorted(sample.letters.items())[:MAX_ROWS]
        ],
    }


def group_summary(sample: GroupSample) -> Document:
    return {
        "group": sample.name,
        "at": sample.at,
        "error": sample.error,
        **_totals(sample.state, sample.lag),
    }


def group_document(sample: GroupSample, history: GroupHistory, readers: Mapping[str, Mapping[str, object]]) -> Document:
    """Return all that the page shows of a group. ``readers`` has what is known of their leases."""
    state, lag = sample.state, sample.lag
    rows = sorted(lag.segments, key=lambda segment: lag.segments[segment].events, reverse=True)[:MAX_ROWS]
    curves = history.curves()
    return {
        **group_summary(sample),
        "reader_timeout_seconds": state.config.reader_timeout_seconds,
        "segments": [_segment(segment, state, lag, curves.get(segment, ())) for segment in sorted(rows, key=_order)],
        "segments_left_out": len(lag.segments) - len(rows),
        "readers": [
            {"reader": reader, "segments": len(state.owned.get(reader, ())), **readers.get(reader, {})}
            for reader in sorted(state.readers)[:MAX_ROWS]
        ],
        "readers_left_out": max(0, len(state.readers) - MAX_ROWS),
        "checkpoints": [
            {
                "number": each.token,
                "name": each.name,
                "is": "completed" if each.completed else f"waits for {len(each.waiting)} readers",
            }
            for each in state.checkpoints
            if not each.silent
        ],
        "spans": [
            {
                "segment": span.segment,
                "stream": stream_of(span.segment),
                "low": span.low,
                "high": span.high,
                "owner": span.owner,
                "start": span.start,
                "end": span.end,
            }
            for span in history.spans()
        ],
    }


def _totals(state: ReaderGroupState, lag: GroupLag) -> Document:
    return {
        "streams": list(state.config.streams),
        "number_of_segments": state.number_of_segments,
        "number_of_readers": state.number_of_readers,
        "unassigned": len(state.unassigned),
        "end_of_data": state.end_of_data,
        "lag": {"events": lag.events, "bytes": lag.bytes, "seconds": round(lag.seconds, 3)},
    }


def _segment(segment: SegmentId, state: ReaderGroupState, lag: GroupLag, curve: object) -> Document:
    each, found = lag.segments[segment], state.segments.get(segment)
    return {
        "segment": segment,
        "low": found.low if found else 0.0,
        "high": found.high if found else 0.0,
        "owner": each.owner,
        "is": condition(found),
        "offset": each.offset,
        "events": each.events,
        "bytes": each.bytes,
        "seconds": round(each.seconds, 3),
        "curve": curve,
    }


def _order(segment: SegmentId) -> tuple[str, int]:
    stream, _, number = segment.rpartition("/")
    return stream, int(number)
