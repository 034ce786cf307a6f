"""Draws a run: the owner of each segment over time, what happened, and the progress of writing and reading."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from notifications import Notification

from ..group.notifiers import EndOfDataNotification, ReaderNotification, SegmentNotification
from ..streams.config import SegmentId, number_of
from .ownership import Assignment, Ownership
from .story import Story

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS: Final = ("#4477AA", "#EE7733", "#228833", "#CCBB44", "#AA3377", "#66CCEE", "#8C6D46", "#BBBBBB")
_INK: Final = "#222222"
_FAINT: Final = "#555555"
_KILL: Final = "#CC0022"
#: The height of a reader's bar in a row of height 1, and the gap between two segments in it.
_BAR: Final = 0.8
_GAP: Final = 0.03
#: Happenings that are closer than this fraction of the whole time have their titles at two heights.
_WIDE: Final = 0.13
_PAPER: Final = {"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.8}
#: Notifications that are closer than this fraction of the whole time share one label.
_NEAR: Final = 0.05
#: A bar that is narrower than this fraction of the whole time has no label.
_NARROW: Final = 0.012

_ROWS: Final[tuple[tuple[str, type[Notification], str, str], ...]] = (
    ("segments to read", SegmentNotification, "v", "#4477AA"),
    ("readers", ReaderNotification, "D", "#777777"),
    ("end of data", EndOfDataNotification, "*", "#228833"),
)


def draw(story: Story, ownership: Ownership, title: str, path: Path) -> None:
    """Write the picture of a run to ``path``, as PNG."""
    from matplotlib.figure import Figure

    end = max(sample.at for sample in story.samples)
    figure = Figure(figsize=(12, 4.6 + 0.62 * len(ownership.readers)), dpi=130, layout="constrained")
    heights = [1.15, 0.62 * len(ownership.readers), 1.7]
    notices, bars, lines = figure.subplots(3, 1, sharex=True, height_ratios=heights)
    figure.suptitle(title, fontsize=14, fontweight="bold", color=_INK)
    _draw_notifications(notices, story.notifications, end)
    _draw_bars(bars, story, ownership, end)
    _draw_lines(lines, story)
    _draw_happenings([notices, bars, lines], story, end)
    lines.set_xlim(0, end * 1.01)
    lines.set_xlabel("seconds")
    for axes in (notices, bars, lines):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(length=0)
    figure.savefig(path)


def _draw_notifications(axes: Axes, notifications: Sequence[tuple[float, Notification]], end: float) -> None:
    for row, (_, kind, marker, colour) in enumerate(_ROWS):
        told = [(at, each) for at, each in notifications if isinstance(each, kind)]
        size = 130 if kind is EndOfDataNotification else 55
        axes.scatter([at for at, _ in told], [row] * len(told), marker=marker, s=size, color=colour, zorder=3)
        for at, label in _labels(told, end):
            axes.annotate(
                label, (at, row), xytext=(7, 0), textcoords="offset points", va="center", fontsize=9, bbox=_PAPER
            )
    axes.set_yticks(range(len(_ROWS)), [label for label, *_ in _ROWS])
    axes.set_ylim(len(_ROWS) - 0.4, -0.6)
    axes.set_title("notifications", loc="left", fontsize=10, color=_FAINT, pad=22)


def _labels(told: Sequence[tuple[float, Notification]], end: float) -> Iterable[tuple[float, str]]:
    """Iterate over the labels, one for each notification or for several that are close together."""
    groups: list[list[tuple[float, Notification]]] = []
    for at, notification in told:
        if groups and at - groups[-1][-1][0] < _NEAR * end:
            groups[-1].append((at, notification))
        else:
            groups.append([(at, notification)])
    for group in groups:
        values = list(dict.fromkeys(_value(notification) for _, notification in group))
        yield group[-1][0], values[0] if len(values) == 1 else f"{values[0]} \N{RIGHTWARDS ARROW} {values[-1]}"


def _value(notification: Notification) -> str:
    match notification:
        case SegmentNotification():
            return str(notification.number_of_segments)
        case ReaderNotification():
            return str(len(notification.readers))
        case _:
            return ""


def _draw_bars(axes: Axes, story: Story, ownership: Ownership, end: float) -> None:
    kills = {happening.reader: happening.at for happening in story.happenings if happening.reader is not None}
    colour = _colours(ownership.assignments)
    for row, reader in enumerate(ownership.readers):
        pieces = _pieces([each for each in ownership.assignments if each.reader == reader], kills.get(reader), end)
        for piece in pieces:
            _draw_piece(axes, piece, row, colour[piece.assignment.segment])
        _label_pieces(axes, pieces, row, end)
        if reader in kills:
            axes.scatter([kills[reader]], [row], marker="X", s=190, color=_KILL, edgecolor="white", zorder=5)
    names = [f"{story.name(reader)}\n{'(killed)' if reader in kills else ''}".strip() for reader in ownership.readers]
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_title("which segments each reader owned", loc="left", fontsize=10, color=_FAINT)
    _draw_legend(axes, colour, bool(kills))


class _AssignmentPiece(NamedTuple):
    """The part of an assignment during which its reader owned the same segments."""

    assignment: Assignment
    start: float
    end: float
    #: Distance from the top of the reader's row, and height, as fractions of the row.
    top: float
    height: float
    #: The reader was killed but not yet declared dead.
    dead: bool


def _pieces(assignments: Sequence[Assignment], killed_at: float | None, end: float) -> list[_AssignmentPiece]:
    """Cut a reader's assignments into pieces, so that those of one moment share the row."""

    def stop(assignment: Assignment) -> float:
        return end if assignment.end is None else assignment.end

    times = {time for assignment in assignments for time in (assignment.start, stop(assignment))}
    pieces = []
    for start, until in pairwise(sorted(times | ({killed_at} if killed_at is not None else set()))):
        owned = [each for each in assignments if each.start <= start and until <= stop(each)]
        dead = killed_at is not None and start >= killed_at
        for place, assignment in enumerate(owned):
            pieces.append(_AssignmentPiece(assignment, start, until, place / len(owned), 1 / len(owned), dead))
    return pieces


def _box(piece: _AssignmentPiece, row: int) -> tuple[float, float]:
    """Return the bottom and the height of a piece on the axes."""
    return row - _BAR / 2 + piece.top * _BAR, piece.height * _BAR - _GAP


def _draw_piece(axes: Axes, piece: _AssignmentPiece, row: int, colour: str) -> None:
    span = [(piece.start, piece.end - piece.start)]
    if piece.dead:
        axes.broken_barh(span, _box(piece, row), facecolors="white", edgecolor=colour, hatch="////", zorder=2)
    else:
        axes.broken_barh(span, _box(piece, row), facecolors=colour, zorder=2)


def _label_pieces(axes: Axes, pieces: Sequence[_AssignmentPiece], row: int, end: float) -> None:
    """Write the segment's number into the largest piece of each assignment."""
    for token in {piece.assignment.fencing_token: None for piece in pieces}:
        own = [piece for piece in pieces if piece.assignment.fencing_token == token and not piece.dead]
        for segment in {piece.assignment.segment: None for piece in own}:
            largest = max(
                (piece for piece in own if piece.assignment.segment == segment),
                key=lambda piece: (piece.end - piece.start) * piece.height,
            )
            if largest.end - largest.start > _NARROW * end:
                bottom, height = _box(largest, row)
                middle = (largest.start + largest.end) / 2
                number = str(number_of(segment))
                axes.text(
                    middle, bottom + height / 2, number, ha="center", va="center", color="white", fontsize=9, zorder=4
                )


def _draw_legend(axes: Axes, colour: dict[SegmentId, str], killed: bool) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [Patch(facecolor=colour[segment], label=f"segment {number_of(segment)}") for segment in colour]
    if killed:
        handles.append(Line2D([], [], marker="X", color=_KILL, linestyle="", markersize=10, label="SIGKILL"))
        handles.append(Patch(facecolor="white", edgecolor="#777777", hatch="////", label="owner is dead"))
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.0, 1.02), frameon=False, fontsize=9)


def _draw_lines(axes: Axes, story: Story) -> None:
    at = [sample.at for sample in story.samples]
    axes.plot(at, [sample.written for sample in story.samples], color="#888888", linewidth=1.6, label="written")
    axes.plot(at, [sample.read for sample in story.samples], color=_INK, linewidth=1.6, label="read,\nrepeats included")
    axes.yaxis.set_major_formatter(_thousands)
    axes.set_ylim(bottom=0)
    axes.set_title("lines", loc="left", fontsize=10, color=_FAINT)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.02), frameon=False, fontsize=9)


def _thousands(value: float, position: object) -> str:
    return f"{value:,.0f}"


def _draw_happenings(all_axes: Sequence[Axes], story: Story, end: float) -> None:
    last, level = float("-inf"), 0
    for happening in story.happenings:
        colour = _KILL if happening.reader is not None else _INK
        for axes in all_axes:
            axes.axvline(happening.at, color=colour, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
        level = (level + 1) % 2 if happening.at - last < _WIDE * end else 0
        last = happening.at
        all_axes[0].annotate(
            happening.title,
            (happening.at, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(0, 4 + 13 * level),
            textcoords="offset points",
            ha="center",
            va="bottom",
            color=colour,
            fontsize=10,
        )


def _colours(assignments: Sequence[Assignment]) -> dict[SegmentId, str]:
    segments = sorted({assignment.segment for assignment in assignments}, key=number_of)
    return {segment: _COLOURS[index % len(_COLOURS)] for index, segment in enumerate(segments)}
