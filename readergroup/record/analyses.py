"""Analyses of recorded notifications: how often a group scaled, how soon its readers followed, how its backlog grew.

Each analysis is a pure function from a table with the columns of `arrow.SCHEMA`, in any order and of any number of
groups, to a table with a schema of its own. It analyses each group separately. ``DataFrame.toArrow`` of Spark returns
such a table.

Times are those of the recording processes, each by its own clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from synchronizer import InvalidArgumentError, UnsupportedError
from synchronizer.extras import install_hint

try:
    import pyarrow
    import pyarrow.compute as pc
except ImportError as error:
    raise UnsupportedError(f"Arrow is not installed; {install_hint('arrow')}") from error

HOUR_SECONDS: Final = 3600
DAY_SECONDS: Final = 24 * HOUR_SECONDS

_TIME: Final = pyarrow.timestamp("us", "UTC")

SCALING_FREQUENCY: Final = pyarrow.schema(
    {
        "group": pyarrow.string(),
        "start": _TIME,  # of the window
        "scales": pyarrow.int64(),  # splits and merges of the group's streams
        "reader_changes": pyarrow.int64(),  # how often readers joined or left
        "gaps": pyarrow.int64(),  # how often some changes were missed, so that the counts may be too low
    }
)
REACTION_TIMES: Final = pyarrow.schema(
    {
        "group": pyarrow.string(),
        "changed_at": _TIME,
        "revision": pyarrow.int64(),
        "index": pyarrow.int64(),
        "segments_before": pyarrow.int64(),
        "segments_after": pyarrow.int64(),
        "readers_before": pyarrow.int64(),
        "readers_after": pyarrow.int64(),  # null, like the next two, if the readers did not follow
        "answered_at": _TIME,
        "seconds": pyarrow.float64(),
    }
)
BACKLOG_TREND: Final = pyarrow.schema(
    {
        "group": pyarrow.string(),
        "start": _TIME,  # of the window
        "samples": pyarrow.int64(),
        "bytes": pyarrow.float64(),  # the mean
        "bytes_per_second": pyarrow.float64(),  # growth; null if all samples are of one moment
        "events": pyarrow.float64(),
        "events_per_second": pyarrow.float64(),
    }
)


def scaling_frequency(table: pyarrow.Table, *, window_seconds: int = HOUR_SECONDS) -> pyarrow.Table:
    """Return how often each group scaled, per window in which anything changed.

    A scale is a change of segments that a new epoch of a stream caused, not the completion of segments. The first
    entries of a record, which hold the present state, count as no change.

    Args:
        table: Recorded notifications.
        window_seconds: The length of a window, counted from 1970 in UTC. Default: an hour.

    Returns:
        A table with the schema `SCALING_FREQUENCY`.
    """
    causes, kinds = table["cause"], table["kind"]
    is_scale = pc.and_(pc.equal(kinds, "segments"), pc.match_substring_regex(causes, r"(^|, )add_epoch(,|$)"))
    has_joined_or_left = pc.greater(pc.add(_lengths(table["joined"]), _lengths(table["left"])), 0)
    is_change = pc.invert(pc.or_(pc.equal(causes, "present value"), table["gap"]))
    is_reader_change = pc.and_(pc.and_(pc.equal(kinds, "readers"), is_change), has_joined_or_left)
    # A gap always has a notification of readers, and others only if they have something to report: count readers' once.
    is_gap = pc.and_(pc.equal(kinds, "readers"), table["gap"])
    counted = _windows(table, window_seconds)
    for name, mask in {"scales": is_scale, "reader_changes": is_reader_change, "gaps": is_gap}.items():
        counted = counted.append_column(name, pc.cast(mask, pyarrow.int64()))
    names = ["scales", "reader_changes", "gaps"]
    counted = counted.group_by(["group", "start"]).aggregate([(name, "sum") for name in names])
    counted = counted.rename_columns({f"{name}_sum": name for name in names})
    is_empty = pc.equal(pc.add(pc.add(counted["scales"], counted["reader_changes"]), counted["gaps"]), 0)
    return _in_order(counted.filter(pc.invert(is_empty)), SCALING_FREQUENCY)


def reaction_times(table: pyarrow.Table) -> pyarrow.Table:
    """Return how long the number of readers took to follow each change of the number of segments.

    The readers follow with the next change of their number in the same direction. There is no such time if the number
    of segments changes in the other direction first.

    Args:
        table: Recorded notifications.

    Returns:
        A table with the schema `REACTION_TIMES`.
    """
    names = ["group", "offset", "revision", "index", "kind", "seen_at", "number_of_segments", "number_of_readers"]
    rows = table.select(names).sort_by([("group", "ascending"), ("offset", "ascending")]).to_pylist()
    return pyarrow.Table.from_pylist(list(_reactions(rows)), schema=REACTION_TIMES)


class _Numbers(NamedTuple):
    segments: int | None = None
    readers: int | None = None


def _reactions(rows: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Iterate over the changes of segments, in order, with the changes of readers that followed."""
    group, now = None, _Numbers()
    changes: list[dict[str, Any]] = []
    open_changes: list[dict[str, Any]] = []
    for row in rows:
        if row["group"] != group:
            group, now, open_changes = row["group"], _Numbers(), []
        segments, readers = row["number_of_segments"], row["number_of_readers"]
        if row["kind"] == "segments" and now.segments is not None and segments != now.segments:
            change = {
                "group": group,
                "changed_at": row["seen_at"],
                "revision": row["revision"],
                "index": row["index"],
                "segments_before": now.segments,
                "segments_after": segments,
                "readers_before": readers,
            }
            open_changes = [each for each in open_changes if _direction(each) == (segments > now.segments)]
            open_changes.append(change)
            changes.append(change)
        if row["kind"] == "readers" and now.readers is not None and readers != now.readers:
            for each in [each for each in open_changes if _direction(each) == (readers > now.readers)]:
                each["readers_after"], each["answered_at"] = readers, row["seen_at"]
                each["seconds"] = (row["seen_at"] - each["changed_at"]).total_seconds()
                open_changes.remove(each)
        now = _Numbers(now.segments if segments is None else segments, now.readers if readers is None else readers)
    yield from changes


def _direction(change: Mapping[str, Any]) -> bool:
    """Whether the number of segments grew."""
    return bool(change["segments_after"] > change["segments_before"])


def backlog_trend(table: pyarrow.Table, *, window_seconds: int = HOUR_SECONDS) -> pyarrow.Table:
    """Return the backlog of each group and its growth, per window with samples.

    The growth is the slope of the straight line through the samples of the window, by least squares.

    Args:
        table: Recorded notifications.
        window_seconds: The length of a window, counted from 1970 in UTC. Default: an hour.

    Returns:
        A table with the schema `BACKLOG_TREND`.
    """
    table = table.filter(pc.equal(table["kind"], "lag"))
    windows = _windows(table, window_seconds)
    seconds = pc.divide(pc.cast(pc.microseconds_between(windows["start"], table["seen_at"]), pyarrow.float64()), 1e6)
    names = ("bytes", "events")
    columns = {"x": seconds, "xx": pc.multiply(seconds, seconds)}
    for name in names:
        columns[name] = pc.cast(table[f"backlog_{name}"], pyarrow.float64())
        columns[f"x_{name}"] = pc.multiply(seconds, columns[name])
    for name, column in columns.items():
        windows = windows.append_column(name, column)
    aggregates: list[tuple[str | list[str], str]] = [([], "count_all"), ("x", "min_max")]
    aggregates += [(name, "mean") for name in columns]
    means = windows.group_by(["group", "start"]).aggregate(aggregates)
    trend = means.select(["group", "start"]).append_column("samples", means["count_all"])
    for name in names:
        trend = trend.append_column(name, means[f"{name}_mean"])
        trend = trend.append_column(f"{name}_per_second", _slope(means, name))
    return _in_order(trend, BACKLOG_TREND)


def _slope(means: pyarrow.Table, name: str) -> pyarrow.ChunkedArray:
    """Return the slope of each window, from the means of x, y, x y and x squared; null for a single moment."""
    x, y = means["x_mean"], means[f"{name}_mean"]
    variance = pc.subtract(means["xx_mean"], pc.multiply(x, x))
    covariance = pc.subtract(means[f"x_{name}_mean"], pc.multiply(x, y))
    is_line = pc.less(pc.struct_field(means["x_min_max"], "min"), pc.struct_field(means["x_min_max"], "max"))
    return pc.divide(covariance, pc.if_else(is_line, variance, None))


def _windows(table: pyarrow.Table, window_seconds: int) -> pyarrow.Table:
    """Return the group of each row and the start of its window; windows count from 1970, in UTC."""
    if window_seconds < 1:
        raise InvalidArgumentError("window_seconds must be >= 1", window_seconds=window_seconds)
    micros = pc.cast(table["seen_at"], pyarrow.int64())
    width = window_seconds * 1_000_000
    start = pc.cast(pc.multiply(pc.divide(micros, width), width), _TIME)
    return pyarrow.table({"group": table["group"], "start": start})


def _lengths(lists: pyarrow.ChunkedArray) -> pyarrow.ChunkedArray:
    return pc.fill_null(pc.list_value_length(lists), 0)


def _in_order(table: pyarrow.Table, schema: pyarrow.Schema) -> pyarrow.Table:
    return table.select(schema.names).sort_by([("group", "ascending"), ("start", "ascending")]).cast(schema)
