"""The output of the running demo: a live table on a terminal, a line now and then elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Final, NamedTuple, Self

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

#: How often the table changes, and how often a line is printed without a terminal.
_REFRESH_SECONDS: Final = 0.25
_LINE_SECONDS: Final = 5.0
_BAR_WIDTH: Final = 36


class ReaderRow(NamedTuple):
    """A reader's row in the table."""

    name: str
    pid: int
    condition: str
    segments: Sequence[int]
    lines: int


class Display:
    """Shows a running demo. A context manager. Any thread may call ``say``; one thread calls the rest."""

    def __init__(self, console: Console, total: int) -> None:
        self._console = console
        self._total = total
        self._live = (
            Live(Text(""), console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        )
        self._next = float("-inf")
        self._lines_before: dict[str, tuple[float, int]] = {}

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, sentence: str) -> None:
        self._console.print(sentence)

    def show(self, at: float, written: int, read: int, rows: Sequence[ReaderRow]) -> None:
        """Show the present numbers, if the next update is due. ``at`` is in seconds."""
        if at < self._next:
            return
        if self._live is None:
            if self._next > 0:
                readers = "1 reader" if len(rows) == 1 else f"{len(rows)} readers"
                self.say(f"{at:5.1f} s  {written:,} lines written, {read:,} read by {readers}")
            self._next = at + _LINE_SECONDS
            return
        self._live.update(self._picture(at, written, read, rows), refresh=True)
        self._next = at + _REFRESH_SECONDS

    def _picture(self, at: float, written: int, read: int, rows: Sequence[ReaderRow]) -> RenderableType:
        bars = Table.grid(padding=(0, 2))
        for title, lines in (("written", written), ("read", read)):
            bar = ProgressBar(self._total, min(lines, self._total), width=_BAR_WIDTH)
            bars.add_row(title, bar, f"{lines:,} of {self._total:,} lines")
        readers = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
        readers.add_column("reader")
        readers.add_column("process", justify="right")
        readers.add_column("is", min_width=13)
        readers.add_column("segments", min_width=10)
        readers.add_column("lines", justify="right", min_width=9)
        readers.add_column("lines/s", justify="right", min_width=8)
        for row in rows:
            segments = ", ".join(map(str, row.segments)) or "-"
            style = {"working": "", "killed": "bold red", "declared dead": "red"}.get(row.condition, "dim")
            rate = f"{self._rate(row, at):,.0f}"
            readers.add_row(row.name, str(row.pid), row.condition, segments, f"{row.lines:,}", rate, style=style)
        return Group("", readers, "", bars)

    def _rate(self, row: ReaderRow, at: float) -> float:
        """Return the lines per second since the table was shown last."""
        since, lines = self._lines_before.get(row.name, (at, row.lines))
        self._lines_before[row.name] = (at, row.lines)
        return (row.lines - lines) / (at - since) if at > since else 0.0
