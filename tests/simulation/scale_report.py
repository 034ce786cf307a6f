"""Measures groups of several sizes, keeps the figures in a file, and shows them as a table and a picture."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from .scale_costs import costs
from .scaled_group import Change, group_of

#: Readers and segments.
SIZES: Final = ((10, 100), (100, 1_000), (1_000, 10_000))

Figures = dict[str, Any]


def measure(readers: int, segments: int, say: Any = lambda line: None) -> Figures:
    """All figures of a group of this size."""
    changes: list[Figures] = []

    def note(change: Change) -> None:
        counts = {"entries": dict(change.entries), "updates": dict(change.updates)}
        changes.append({**vars(change), **counts, "conflicts_per_success": change.conflicts_per_success})
        say(f"{readers} x {segments}: {_line(changes[-1])}")

    with group_of(segments) as group:
        names = [f"reader-{number:04d}" for number in range(readers)]
        note(group.start(names))
        sizes = {"state_bytes": group.state_bytes, "snapshot_bytes": group.snapshot_bytes}
        rest = vars(group.rest())
        say(f"{readers} x {segments}: at rest {rest}")
        note(group.join("newcomer"))
        note(group.leave(names[0]))
        note(group.kill(names[1]))
        group.merge(0, 1)  # so that there may be one more
        note(group.split(segments))
        group.join("another")  # as many as at first
        note(group.restart_closed())
        note(group.restart_killed(same_ids=True))
        note(group.restart_killed(same_ids=False))
    return {
        "readers": readers,
        "segments": segments,
        **sizes,
        "rest": rest,
        "changes": changes,
        "costs": costs(readers, segments),
    }


def _line(change: Figures) -> str:
    return (
        f"{change['what']}: {change['seconds']:.2f} s, {change['since_last_join']:.2f} s from the last join; "
        f"{_entries(change)} entries; "
        f"{change['conflicts']} conflicts ({change['conflicts_per_success']:.2f} per success), "
        f"{change['log_bytes']} bytes of log, {change['calls']} calls"
    )


def load(path: Path) -> list[Figures]:
    return json.loads(path.read_text()) if path.exists() else []  # type: ignore[no-any-return]


def save(path: Path, found: Sequence[Figures]) -> None:
    path.write_text(json.dumps(sorted(found, key=lambda size: int(size["readers"])), indent=1) + "\n")


# ---------------------------------------------------------------------- the table


def table(found: Sequence[Figures]) -> str:
    """Markdown, one column for each size."""
    heads = [f"{size['readers']:,} × {size['segments']:,}" for size in found]
    lines = [f"| readers × segments | {' | '.join(heads)} |", "|---" * (len(found) + 1) + "|"]
    rows = [_rows(size) for size in found]
    for row in rows[0]:
        lines.append(f"| {row} | {' | '.join(each.get(row, '') for each in rows)} |")
    return "\n".join(lines)


def _rows(size: Figures) -> Mapping[str, str]:
    rest, cost = size["rest"], size["costs"]
    rows = {"state; its snapshot": f"{_bytes(size['state_bytes'])}; {_bytes(size['snapshot_bytes'])}"}
    for name, change in zip(_CHANGES, size["changes"], strict=True):
        rows[f"**{name}**: entries"] = _entries(change)
        if name.startswith("all"):
            rows[f"{name}: balanced after the last join"] = f"{change['since_last_join']:.2f} s"
            rows[f"{name}: conflicts per success"] = f"{change['conflicts_per_success']:.2f}"
            rows[f"{name}: log"] = _bytes(change["log_bytes"])
        else:
            rows[f"{name}: balanced after"] = f"{change['seconds']:.2f} s"
    calls = ", ".join(f"{calls:.1f} {verb}" for verb, calls in rest["calls"].items())
    rows["**at rest**: entries in 10 s"] = str(rest["entries"])
    rows["at rest: calls of a reader a second"] = f"{sum(rest['calls'].values()):.1f}: {calls}"
    rows["at rest: a reader reads a minute; a watcher"] = (
        f"{_bytes(rest['bytes_a_minute'])}; {_bytes(rest['bytes_a_minute_of_a_watcher'])}"
    )
    rows["at rest: processor, a minute"] = f"{cost['an idle minute, s']:.2f} s"
    rows |= {f"{name}: processor": f"{took:.2g} ms" for name, took in cost.items() if name in _STEPS}
    rows["memory of a replica"] = f"{cost['memory of a replica, MB']:.2g} MB"
    return rows


def _entries(change: Figures) -> str:
    kinds = ", ".join(f"{count:,} {_KINDS[kind]}" for kind, count in sorted(change["entries"].items()))
    return f"{sum(change['entries'].values()):,}: {kinds}"


_KINDS: Final = {
    "join": "join",
    "leave": "removal",
    "release": "release",
    "plan": "planner's",
    "other": "scaling",
}
_CHANGES: Final = (
    "all start",
    "one joins",
    "one leaves",
    "one is killed",
    "a segment is split",
    "all leave and start again",
    "all are killed and start again",
    "all are killed, others start",
)
_STEPS: Final = (
    "a join with its moves is applied",
    "a release is applied",
    "a completion is applied",
    "plan, balanced",
    "plan, after a join",
    "a snapshot is written",
    "a snapshot is read",
)


def _bytes(count: float) -> str:
    for unit, size in (("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"


# ---------------------------------------------------------------------- the picture


def draw(found: Sequence[Figures], path: Path) -> None:
    """What grows with the number of readers, and what does not, on logarithmic axes."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    readers = [size["readers"] for size in found]
    ticks = [f"{size['readers']:,}\n× {size['segments']:,}" for size in found]
    figure = Figure(figsize=(9.5, 6.5), layout="constrained")
    for axes, (title, bounds, lines) in zip(figure.subplots(2, 2).flat, _panels(found), strict=True):
        for label, values in lines.items():
            axes.plot(readers, values, "o-", label=label, linewidth=1.5, markersize=4)
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_xscale("log")
        axes.set_xticks(readers, ticks)
        axes.minorticks_off()
        if bounds is None:
            axes.set_yscale("log")
        else:
            axes.set_ylim(*bounds)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
    with rc_context({"svg.hashsalt": path.name, "svg.fonttype": "none"}):  # the same figures give the same file
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _panels(found: Sequence[Figures]) -> Iterator[tuple[str, tuple[float, float] | None, Mapping[str, list[float]]]]:
    """Titles, bounds of the vertical axis (None: logarithmic), and values by what they are."""
    changes = [dict(zip(_CHANGES, size["changes"], strict=True)) for size in found]
    yield (
        "entries in the log for one change",
        (0, 14),
        {name: [sum(each[name]["entries"].values()) for each in changes] for name in _CHANGES[1:5]},
    )
    restarts = [_CHANGES[0], *_CHANGES[5:]]
    yield (
        "restart of all: seconds from the last join",
        (0, 14),
        {name: [each[name]["since_last_join"] for each in changes] for name in restarts},
    )
    yield (
        "one reader at rest",
        None,
        {
            "calls of the store a second": [sum(size["rest"]["calls"].values()) for size in found],
            "kB read a minute": [size["rest"]["bytes_a_minute"] / 1000 for size in found],
            "kB read a minute, one of the eight watchers": [
                size["rest"]["bytes_a_minute_of_a_watcher"] / 1000 for size in found
            ],
            "ms of processor a minute": [size["costs"]["an idle minute, s"] * 1000 for size in found],
        },
    )
    yield (
        "what one process holds and computes",
        None,
        {
            "kB of the state": [size["state_bytes"] / 1000 for size in found],
            "MB of memory": [size["costs"]["memory of a replica, MB"] for size in found],
            "ms to plan after a join": [size["costs"]["plan, after a join"] for size in found],
            "ms to apply a join": [size["costs"]["a join with its moves is applied"] for size in found],
            "ms to read a snapshot": [size["costs"]["a snapshot is read"] for size in found],
        },
    )
