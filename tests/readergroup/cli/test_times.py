"""All commands print times in one form, in UTC, wherever they run."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import readergroup as rg
from readergroup.cli.times import parse_time
from readergroup.cli.watching import line_of
from tests.readergroup.cli.test_commands import Cli
from tests.readergroup.dead_letters.test_letters import DEAD, ORDERS, set_up

TIME = re.compile(r"\d+[-:]\d+[-:]\d+[^ ]*")


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cli]:
    """A store of which each command has a time to show, on a machine in New York."""
    cli = Cli(tmp_path)
    with rg.connect(cli.url) as client:
        set_up(client)
        group = client.groups.create("g", streams=[ORDERS])
        with group.record_notifications(), group.reader():
            pass
    with monkeypatch.context() as context:
        context.setenv("TZ", "America/New_York")
        time.tzset()
        yield cli
    time.tzset()


def check(shown: str) -> None:
    times = TIME.findall(shown)
    assert times, shown
    for each in times:
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", each.rstrip(";,")), shown
        assert abs(parse_time("--since", each.rstrip(";,")) - datetime.now(UTC)) < timedelta(minutes=30), shown


@pytest.mark.parametrize(
    "command",
    [
        ("peek", ORDERS),
        ("dead-letters", "list", DEAD),
        ("group", "notifications", "g"),
        ("doctor",),
    ],
    ids=" ".join,
)
def test_a_command_prints_times_in_utc_as_its_options_take_them(cli: Cli, command: tuple[str, ...]) -> None:
    check(cli.ok(*command))


def test_a_letter_is_shown_with_such_a_time(cli: Cli) -> None:
    with rg.connect(cli.url) as client:
        letter = next(client.dead_letters(DEAD).list())
    check(cli.ok("dead-letters", "show", DEAD, str(letter.pointer)).splitlines()[0])


def test_a_line_of_the_watch_begins_with_such_a_time(cli: Cli) -> None:
    with rg.connect(cli.url) as client:
        recorded = list(client.groups.get("g").notification_record.read())
    assert recorded
    for notification in recorded:
        check(line_of(notification).split()[0])
