"""The JSON documents of the web view."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ..group.conditions import condition
from ..group.lag import GroupLag
from ..group.model.state import ReaderGroupState
from ..states.kinds import is_name
from ..streams.config import SegmentId, stream_of
from .history import CURVE, GroupHistory
from .sample import GroupSample, Sample

#: How many rows of a table a document has.
MAX_ROWS: Final = 200
MAX_GROUPS: Final = 500
#: How many rows of a full table give way to others at once. The browser takes long to make many.
_EXCHANGED: Final = 10

Document = dict[str, Any]

#: The tables in the document of a group, and what names a row of each.
_KEYS: Final = {"segments": "segment", "readers": "reader", "checkpoints": "number", "spans": "span"}
_UNCHANGED: Final[Mapping[str, Sequence[Any]]] = {"gone": [], "changed": [], "added": []}


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
        "retries": {
            "waiting": sample.retries.events,
            "is_partial": sample.retries.is_partial,
            "next_at": sample.retries.next_at,
        },
    }


def group_document(
    sample: GroupSample,
    history: GroupHistory,
    readers: Mapping[str, Mapping[str, object]],
    before: Document | None = None,
) -> Document:
    """Return all that the page shows of a group.

    Args:
        sample: The group.
        history: Its past.
        readers: What is known of their leases.
        before: The last document. In a full table only some segments give way to others that are more behind.
    """
    state, lag = sample.state, sample.lag
    shown = {row["segment"] for row in before["segments"]} if before else set()
    ranked = sorted(lag.segments, key=lambda segment: lag.segments[segment].events, reverse=True)
    staying = [segment for segment in ranked if segment in shown]
    new = [segment for segment in ranked[:MAX_ROWS] if segment not in shown][: MAX_ROWS - len(staying) + _EXCHANGED]
    rows = staying[: MAX_ROWS - len(new)] + new
    points, curves = history.curves()
    return {
        **group_summary(sample),
        "points": points,
        "is_weighed": state.config.balance == "load" or any(found.weight for found in state.segments.values()),
        "reader_timeout_seconds": state.config.reader_timeout_seconds,
        "segments": [_segment(segment, state, lag, curves.get(segment, [])) for segment in sorted(rows, key=_order)],
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
                "is": "completed" if each.completed else _awaited(len(each.waiting)),
            }
            for each in state.checkpoints
            if not each.silent
        ],
        "spans": [
            {
                "span": f"{span.segment} {span.start}",
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


def changes(before: Document, after: Document) -> Document:
    """Return what the page needs to make ``after`` of ``before``, both documents of one group."""
    points = max(0, after["points"] - before["points"])  # less after the history was begun anew
    found = {name: value for name, value in after.items() if name not in _KEYS and before[name] != value}
    for name, key in _KEYS.items():
        change = _changed_rows(before[name], after[name], key, points)
        if change != _UNCHANGED:
            found[name] = after[name] if change is None else change
    return found


def _changed_rows(
    before: Sequence[Document], after: Sequence[Document], key: str, points: int
) -> Mapping[str, Sequence[Any]] | None:
    """Return the keys of rows that are gone, changed fields with their keys, and new rows with their indexes.

    None if the rows that stay have changed their order.
    """
    old, new = {row[key]: row for row in before}, {row[key]: row for row in after}
    staying = [each for each in old if each in new and old[each].keys() == new[each].keys()]
    if staying != [each for each in new if each in set(staying)]:
        return None
    fields = {each: _changed_fields(old[each], new[each], points) for each in staying}
    return {
        "gone": [each for each in old if each not in fields],
        "changed": [{key: each, **found} for each, found in fields.items() if found],
        "added": [(index, row) for index, (each, row) in enumerate(new.items()) if each not in fields],
    }


def _changed_fields(before: Document, after: Document, points: int) -> Document:
    """Return the fields that have changed. A curve to which the page adds its last value so often is none of them."""
    found = {name: value for name, value in after.items() if name != "curve" and before[name] != value}
    if "curve" in after:
        old, new = before["curve"], after["curve"]
        added = new[-points:] if points else []
        if not old or [*old, *added][-CURVE:] != new:
            found |= {"curve": new} if old != new else {}
        elif any(value != old[-1] for value in added):
            found["added"] = added
    return found


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
        "load": found.load if found else 1,
        "curve": curve,
    }


def _awaited(readers: int) -> str:
    return "waits for 1 reader" if readers == 1 else f"waits for {readers} readers"


def _order(segment: SegmentId) -> tuple[str, int]:
    stream, _, number = segment.rpartition("/")
    return stream, int(number)
