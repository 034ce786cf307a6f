"""Tables for people: folded to the width of a terminal, or with each row on one line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from .escaping import printable

if TYPE_CHECKING:  # a pipe needs none of it
    from rich.console import Console, ConsoleOptions, RenderResult

_GAP: Final = "   "
_MOST_FOLDED_ROWS: Final = 500


class Table:
    """A table that stays readable at 80 columns of a terminal: long names are folded, numbers are not.

    A long table is not folded, because folding takes seconds for ten thousand rows.
    """

    def __init__(self, *columns: str, numbers: Sequence[str] = (), rows: Iterable[Sequence[str]] = ()) -> None:
        self._columns = columns
        self._is_number = [column in numbers for column in columns]
        self._rows = list(rows)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.box import SIMPLE_HEAD
        from rich.segment import Segment
        from rich.table import Table as Folded

        if len(self._rows) > _MOST_FOLDED_ROWS:
            # In a live picture, sys.stdout is a stand-in without an encoding.
            yield Segment("\n".join(self._lines(getattr(console.file, "encoding", None))) + "\n")
            return
        made = Folded(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
        for column, is_number in zip(self._columns, self._is_number, strict=True):
            if is_number:
                made.add_column(column, justify="right", no_wrap=True)
            else:
                made.add_column(column, overflow="fold")
        for row in self._rows:
            made.add_row(*map(printable, row))
        yield made

    def __str__(self) -> str:
        """The head, a rule, and a line for each row, however wide they are."""
        return "\n".join(self._lines(sys.stdout.encoding))

    def _lines(self, encoding: str | None) -> Iterator[str]:
        rows = [[_on_one_line(cell) for cell in row] for row in (self._columns, *self._rows)]
        width = _width_of(rows)
        widths = [max(map(width, column)) for column in zip(*rows, strict=True)]
        for number, row in enumerate(rows):
            pads = [" " * (most - width(cell)) for cell, most in zip(row, widths, strict=True)]
            cells = zip(row, pads, self._is_number, strict=True)
            yield _GAP.join(pad + cell if is_number else cell + pad for cell, pad, is_number in cells)
            if number == 0:
                yield _rule(encoding) * (sum(widths) + len(_GAP) * (len(widths) - 1))


def _on_one_line(cell: str) -> str:
    return printable(" ".join(cell.splitlines()))


def _width_of(rows: Iterable[Iterable[str]]) -> Callable[[str], int]:
    """Return what measures these cells: Rich knows the width of characters beyond ASCII."""
    if all(cell.isascii() for row in rows for cell in row):
        return len
    from rich.cells import cell_len

    return cell_len


def _rule(encoding: str | None) -> str:
    return "─" if (encoding or "").lower().startswith("utf") else "-"
