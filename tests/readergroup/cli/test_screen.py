"""How commands print."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Final

import pytest
from rich.console import Console
from rich.live import Live

import readergroup as rg
from readergroup.cli import screen, tables
from readergroup.cli.app import _Words
from synchronizer.recipes.collections.shared_config import ConfigEntries
from tests.readergroup.cli.test_commands import Cli

STREAM: Final = "shop/orders"
#: It gives a terminal a title, changes its colour, and writes over the line.
HOSTILE: Final = "a\x1b]0;title\x07b\x9b31mc\x7fd\re"
ESCAPED: Final = r"a\u001b]0;title\u0007b\u009b31mc\u007fd\u000de"
CONTROLS: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


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


def test_a_long_table_is_shown_in_a_live_picture(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("LINES", "40")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    table = tables.Table("segment", "events", rows=[(f"shop/orders/{number}", "0") for number in range(501)])
    with Live(table, console=Console(), auto_refresh=False):
        pass
    shown = capsys.readouterr().out
    assert "shop/orders/0 " in shown and "─" in shown


def test_a_row_in_a_pipe_is_one_line_however_long_its_cells_are(capsys: pytest.CaptureFixture[str]) -> None:
    screen.say(tables.Table("key", "data", rows=[("a\nb", "x" * 5_000)]))
    assert capsys.readouterr().out.splitlines()[2] == f"a b   {'x' * 5_000}"


def test_a_terminal_of_no_width_gets_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "0")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert screen.out().width == 80


def test_so_does_the_help(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "0")
    shown = Cli(tmp_path).shell("stream --help").stdout
    assert "Usage:" in shown and max(map(len, shown.splitlines())) <= 80


def test_text_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    screen.say(":smile: [bold]")
    screen.say(tables.Table(":key:", rows=[(":smile: [bold]",)]))
    screen.out().print(tables.Table(":key:", rows=[(":smile: [bold]",)]))
    assert capsys.readouterr().out.count(":smile: [bold]") == 3


def test_control_characters_are_printed_as_escapes(capsys: pytest.CaptureFixture[str]) -> None:
    table = tables.Table("key", "data", rows=[("a", HOSTILE.removesuffix("\re"))])
    for show in (screen.say, screen.out().print):
        show(table)
        assert ESCAPED.removesuffix(r"\u000de") in capsys.readouterr().out
    screen.say(f"{HOSTILE}\tx\ny")
    screen.warn(HOSTILE)
    assert capsys.readouterr() == (f"{ESCAPED}\tx\ny\n", f"readergroup: {ESCAPED}\n")
    screen.print_json({"key": HOSTILE})
    printed = capsys.readouterr().out
    assert json.loads(printed) == {"key": HOSTILE} and not CONTROLS.search(printed)
    assert _Words().format(logging.makeLogRecord({"msg": HOSTILE})) == ESCAPED


def _fill(url: str) -> None:
    """Put control characters where a writer can put them: names of streams, groups and readers have none."""
    with rg.connect(url) as client:
        client.streams.create(STREAM, tags={"team": HOSTILE})
        with client.writer(STREAM) as writer:
            writer.write(HOSTILE.encode(), HOSTILE, {HOSTILE: HOSTILE.encode()})
        client.streams.create("shop/dead")
        with client.writer("shop/dead", serializer=rg.PydanticSerializer(rg.DeadLetter)) as letters:
            pointer = rg.EventPointer(rg.SegmentId("shop/orders/0"), "a1", 0)
            letter = rg.DeadLetter(data=HOSTILE.encode(), pointer=pointer, error=HOSTILE, attempts=1)
            letters.write(letter, HOSTILE, {HOSTILE: HOSTILE.encode()})
        client.shared_map("prices", str)[HOSTILE] = HOSTILE
        with ConfigEntries(client.store, "demo") as entries:
            entries.put(HOSTILE, HOSTILE)
            entries.put("key", HOSTILE)


COMMANDS: Final = (
    "dead-letters list shop/dead",
    "dead-letters list shop/dead --json",
    "dead-letters show shop/dead 0:0",
    "dead-letters show shop/dead 0:0 --json",
    "peek shop/orders",
    "peek shop/orders --json",
    "read shop/orders --from head --json",
    "stream export shop/orders",
    "stream info shop/orders",
    "stream info shop/orders --json",
    "state show map/prices",
    "state show map/prices --json",
    "state history map/prices",
    "state history map/prices --json",
    "config get-all demo",
    "config get-all demo --json",
    "config get demo key --json",
)


def test_no_command_prints_control_characters_of_a_writer(tmp_path: Path) -> None:
    cli = Cli(tmp_path)
    _fill(cli.url)
    for command in COMMANDS:
        printed = cli.ok(*command.split())
        assert r"a\u001b]0;title\u0007b" in printed, command
        assert not CONTROLS.search(printed), command


@pytest.mark.parametrize("command", ["read shop/orders --from head", "config get demo key"])
def test_data_is_printed_as_it_is_except_on_a_terminal(tmp_path: Path, command: str) -> None:
    cli = Cli(tmp_path)
    _fill(cli.url)
    assert cli.ok(*command.split()) == f"{HOSTILE}\n"
    assert ESCAPED in cli.on_terminal(*command.split())[1]
