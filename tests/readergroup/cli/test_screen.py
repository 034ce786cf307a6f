"""How commands print."""

from __future__ import annotations

import pytest

from readergroup.cli import screen, tables


@pytest.mark.parametrize("rows", [[], [("a", "5", "open")], [("shop/orders", "10,000", "sealed"), ("日本", "1", "")]])
def test_a_table_looks_the_same_on_a_terminal_in_a_pipe_and_if_it_is_long(
    rows: list[tuple[str, ...]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def lines() -> list[str]:
        return [line.rstrip() for line in capsys.readouterr().out.splitlines()]

    table = tables.Table("stream", "segments", "is", numbers=["segments"], rows=rows)
    screen.say(table)
    in_a_pipe = lines()
    screen.out().print(table)
    assert lines() == in_a_pipe
    monkeypatch.setattr(tables, "_MOST_FOLDED_ROWS", -1)
    screen.out().print(table)
    assert lines() == in_a_pipe
    assert len(in_a_pipe) == 2 + len(rows)


def test_a_row_in_a_pipe_is_one_line_however_long_its_cells_are(capsys: pytest.CaptureFixture[str]) -> None:
    screen.say(tables.Table("key", "data", rows=[("a\nb", "x" * 5_000)]))
    assert capsys.readouterr().out.splitlines()[2] == f"a b   {'x' * 5_000}"


def test_text_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    screen.say(":smile: [bold]")
    screen.say(tables.Table(":key:", rows=[(":smile: [bold]",)]))
    screen.out().print(tables.Table(":key:", rows=[(":smile: [bold]",)]))
    assert capsys.readouterr().out.count(":smile: [bold]") == 3
