"""``readergroup dead-letters`` lists, shows, replays and discards dead letters."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import readergroup as rg
from tests.command import app
from tests.readergroup.cli.test_commands import Cli
from tests.readergroup.dead_letters.test_letters import DEAD, events, replayed, set_up


class Letters:
    def __init__(self, store: str) -> None:
        self.store = store

    def run(self, *words: str) -> Result:
        return CliRunner(env={"COLUMNS": "80"}).invoke(app, ["--url", self.store, *words])

    def ok(self, *words: str) -> str:
        result = self.run(*words)
        assert result.exit_code == 0, result.stderr
        return result.stdout

    def fails(self, exit_code: int, *words: str) -> str:
        result = self.run(*words)
        assert result.exit_code == exit_code and result.stdout == "" and result.stderr.count("\n") == 1
        return result.stderr


@pytest.fixture
def letters(tmp_path: Path) -> Letters:
    store = f"sqlite:///{tmp_path}/store.db"
    with rg.connect(store) as client:
        set_up(client)
    return Letters(store)


def test_letters_are_listed_with_their_errors_and_counted(letters: Letters) -> None:
    shown = letters.ok("dead-letters", "list", DEAD)
    assert "ValueError: odd" in shown and "6 pending, 0 replayed, 0 discarded" in shown
    assert max(map(len, shown.splitlines())) <= 80
    assert letters.ok("dead-letters", "list", DEAD, "--error", "KeyError", "--key", "ann", "--since", "1h").endswith(
        "1 pending, 0 replayed, 0 discarded\n"
    )
    assert "shown are the first 2" in letters.ok("dead-letters", "list", DEAD, "--limit", "2")
    assert letters.ok("dead-letters", "list", DEAD, "--since", "2100-01-01T00:00+00:00").startswith(
        "shop/dead: 0 pending"
    )


def test_only_the_first_line_of_an_error_is_listed(tmp_path: Path) -> None:
    cli = Cli(tmp_path)
    with rg.connect(cli.url) as client:
        for stream in ("shop/orders", "shop/dead"):
            client.streams.create(stream)
        with client.writer("shop/orders") as writer:
            writer.write(b"{}")
        client.streams.seal("shop/orders")

        def refuse(event: rg.Event[bytes]) -> None:
            raise ValueError("2 fields are wrong\nid: missing\namount: missing")

        retry = rg.RetryPolicy(attempts=1, dead_letters="shop/dead")
        client.groups.create("billing", streams=["shop/orders"]).pool(refuse, retry=retry).run()
    listed = cli.ok("dead-letters", "list", "shop/dead")
    assert "2 fields are wrong ..." in listed and "missing" not in listed
    assert "amount: missing" in cli.ok("dead-letters", "show", "shop/dead", "0:0")


def test_a_letter_is_shown_and_replayed_by_its_name(letters: Letters) -> None:
    first, second, *_ = map(json.loads, letters.ok("dead-letters", "list", DEAD, "--json").splitlines())
    name = "0:0"
    assert first["letter"].startswith("shop/dead/0:") and first["letter"].endswith(":0")
    shown = letters.ok("dead-letters", "show", DEAD, name)
    assert f"event: {first['pointer']}" in shown and f"error: {first['error']}" in shown
    assert letters.ok("dead-letters", "replay", DEAD, name, "--yes") == "shop/dead: 1 dead letter replayed\n"
    shown = letters.ok("dead-letters", "replay", DEAD, first["letter"], name, second["letter"], "--yes")
    assert shown == "shop/dead: 1 dead letter replayed; 1 of those named was no longer pending\n"
    assert json.loads(letters.ok("dead-letters", "show", DEAD, name, "--json"))["status"] == "replayed"
    with rg.connect(letters.store) as client:
        assert replayed(client) == {first["pointer"]: 1, second["pointer"]: 1}
        assert len(events(client)) == 8


def test_a_letter_is_shown_and_replayed_by_the_pointer_of_its_event(letters: Letters) -> None:
    first, second, *_ = map(json.loads, letters.ok("dead-letters", "list", DEAD, "--json").splitlines())
    assert letters.ok("dead-letters", "show", DEAD, second["pointer"]).startswith("0:")
    assert json.loads(letters.ok("dead-letters", "show", DEAD, second["pointer"], "--json")) == second
    shown = letters.ok("dead-letters", "replay", DEAD, first["pointer"], first["letter"], second["pointer"], "--yes")
    assert shown == "shop/dead: 2 dead letters replayed\n"
    shown = letters.ok("dead-letters", "replay", DEAD, first["pointer"], "--yes")
    assert shown == "shop/dead: 0 dead letters replayed; 1 of those named was no longer pending\n"
    assert "no dead letter at this pointer" in letters.fails(1, "dead-letters", "show", DEAD, "shop/orders/0:0:0")


def test_letters_are_replayed_and_discarded_by_filters(letters: Letters) -> None:
    shown = letters.ok("dead-letters", "replay", DEAD, "--error", "valueerror")
    assert shown == "shop/dead: 0 dead letters replayed; none of 6 pending letters matches\n"
    found = json.loads(letters.ok("dead-letters", "replay", DEAD, "--error", "ValueError", "--yes", "--json"))
    assert found == {"stream": DEAD, "replayed": 3}
    assert letters.ok("dead-letters", "discard", DEAD, "--yes") == "shop/dead: 3 dead letters discarded\n"
    assert letters.ok("dead-letters", "discard", DEAD) == "shop/dead: 0 dead letters discarded\n"
    assert "0 pending, 3 replayed, 3 discarded" in letters.ok("dead-letters", "list", DEAD, "--status", "all")


def test_a_bar_shows_how_far_a_replay_is_on_a_terminal_only(letters: Letters, tmp_path: Path) -> None:
    cli = Cli(tmp_path)
    exit_code, shown = cli.on_terminal("--url", letters.store, "dead-letters", "replay", DEAD, "--limit", "4", "--yes")
    assert exit_code == 0 and f"replay of {DEAD}" in shown and "4 of 4" in shown
    assert letters.run("dead-letters", "discard", DEAD, "--yes").stderr == ""


def test_a_queue_is_not_taken_for_a_stream(letters: Letters) -> None:
    assert "there is no queue jobs; the queues: none" in letters.fails(1, "dead-letters", "list", "jobs", "--queue")
    with rg.connect(letters.store) as client:
        for name in ("jobs", "shop/mail", DEAD):
            client.event_queue(name)
    for name in ("jobs", "shop/mail"):
        for command in (("list",), ("show", "0:1"), ("replay", "--yes")):
            said = letters.fails(2, "dead-letters", command[0], name, *command[1:])
            assert f"{name} is an event queue; add --queue" in said
        assert "0 pending" in letters.ok("dead-letters", "list", name, "--queue")
    assert "0 pending" not in letters.ok("dead-letters", "list", DEAD), "the stream of this name is meant"
    said = letters.fails(1, "dead-letters", "list", "job", "--queue")
    assert f"there is no queue job; the queues: jobs, {DEAD}, shop/mail" in said


def test_what_is_wrong_is_said_on_one_line(letters: Letters) -> None:
    assert "stream create" in letters.fails(1, "dead-letters", "list", "shop/typo")
    assert "no dead letter" in letters.fails(2, "dead-letters", "list", "shop/orders")
    assert "no such dead letter" in letters.fails(1, "dead-letters", "show", DEAD, "0:1")
    assert "0:1234" in letters.fails(2, "dead-letters", "show", DEAD, "first")
    assert "--yes" in letters.fails(2, "dead-letters", "replay", DEAD)
    assert "--yes" in letters.fails(2, "dead-letters", "discard", DEAD, "0:0")
    assert "not both" in letters.fails(2, "dead-letters", "replay", DEAD, "0:0", "--error", "x", "--yes")
    assert "pending, replayed" in letters.fails(2, "dead-letters", "list", DEAD, "--status", "new")
    assert "such as 2h" in letters.fails(2, "dead-letters", "list", DEAD, "--since", "yesterday")
    assert "timezone" in letters.fails(2, "dead-letters", "list", DEAD, "--since", "2026-01-01")
    letters.ok("dead-letters", "discard", DEAD, "0:0", "--yes")
    assert "was discarded" in letters.fails(2, "dead-letters", "replay", DEAD, "0:0", "--yes")


@pytest.mark.parametrize(
    "words",
    [
        ("dead-letters", "list", DEAD),
        ("dead-letters", "list", DEAD, "--json"),
        ("dead-letters", "show", DEAD, "0:0"),
        ("peek", DEAD, "--json"),
        ("peek", DEAD),
    ],
    ids=" ".join,
)
def test_half_of_a_surrogate_pair_in_a_key_is_shown_with_its_escape(tmp_path: Path, words: tuple[str, ...]) -> None:
    store = f"sqlite:///{tmp_path}/store.db"
    pointer = rg.EventPointer(rg.SegmentId("shop/orders/0"), "a1", 0)
    letter = rg.DeadLetter(data=b"x", pointer=pointer, error="ValueError", attempts=1)
    with rg.connect(store) as client:
        client.streams.create(DEAD)
        with client.writer(DEAD, serializer=rg.PydanticSerializer(rg.DeadLetter)) as writer:
            writer.write(letter, routing_key="half \ud800")
    command = [sys.executable, "-m", "readergroup.cli", "--url", store, *words]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "half \\ud800" in shown
    if "--json" in words:
        assert json.loads(shown)["routing_key"] == "half \ud800"
