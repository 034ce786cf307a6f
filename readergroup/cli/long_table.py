"""A table of many rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions
from rich.segment import Segment

_GAP: Final = "   "


class LongTable:
    """A table of many rows, which looks like a `rich.table.Table` that is wide enough."""

    def __init__(self, columns: Sequence[str], numbers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        self._widths = [max(map(cell_len, column)) for column in zip(columns, *rows, strict=True)]
        self._is_number = [column in numbers for column in columns]
        self._columns = columns
        self._rows = rows

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        yield Segment(f"{self._line(self._columns)}\n", console.get_style("table.header"))
        yield Segment("─" * (sum(self._widths) + len(_GAP) * (len(self._widths) - 1)) + "\n")
        yield Segment("".join([f"{self._line(row)}\n" for row in self._rows]))

    def _line(self, row: Sequence[str]) -> str:
        cells = [
            " " * (width - cell_len(cell)) + cell if is_number else cell + " " * (width - cell_len(cell))
            for cell, width, is_number in zip(row, self._widths, self._is_number, strict=True)
        ]
        return _GAP.join(cells)
