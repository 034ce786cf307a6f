"""``readergroup config``: single commands, and prompts in processes of their own."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from pydantic import BaseModel

import readergroup as rg
from readergroup.cli.entries import Entries
from synchronizer import open_store
from synchronizer.recipes.collections.shared_config import ConfigEntries
from tests.readergroup.cli.test_commands import COMMAND, PATIENCE_SECONDS, Cli


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    return Cli(tmp_path)


@pytest.fixture
def shop(cli: Cli) -> Cli:
    """A configuration with two entries."""
    cli.ok("config", "put", "shop", "opens_at", "9")
    cli.ok("config", "put", "shop", "owner", "Ada")
    return cli


# ---------------------------------------------------------------------- single commands


def test_what_is_put_is_shown(shop: Cli) -> None:
    assert shop.ok("config", "get-all", "shop") == "opens_at = 9\nowner = Ada\n"
    assert shop.json("config", "get-all", "shop") == {"opens_at": 9, "owner": "Ada"}
    assert shop.ok("config", "get", "shop", "owner") == "Ada\n"
    assert shop.ok("config", "refresh", "shop").startswith("2 keys, revision ")


@pytest.mark.parametrize(
    ("typed", "means", "got", "shown"),
    [
        ("text", "text", "text", "text"),
        ("5", 5, "5", "5"),
        ("-5", -5, "-5", "-5"),
        ('"5"', "5", "5", '"5"'),
        ("true", True, "true", "true"),
        ("null", None, "null", "null"),
        ('[1, {"ä": 2.5}]', [1, {"ä": 2.5}], '[1, {"ä": 2.5}]', '[1, {"ä": 2.5}]'),
        ("NaN", "NaN", "NaN", "NaN"),
        ("1e999", "1e999", "1e999", "1e999"),
        ("-1e999", "-1e999", "-1e999", "-1e999"),
        ("1e99", 1e99, "1e+99", "1e+99"),
        ("[" * 5000, "[" * 5000, "[" * 5000, "[" * 5000),
        ("{", "{", "{", "{"),
        ("", "", "", ""),
        ("two\nlines", "two\nlines", "two\nlines", '"two\\nlines"'),
    ],
)
def test_values_are_json_where_they_can_be_and_else_text(typed: str, means: object, got: str, shown: str) -> None:
    with open_store("memory://") as store, ConfigEntries(store, "shop") as stored:
        entries = Entries(stored)
        assert entries.put("key", typed) == f"key = {shown}"
        assert stored["key"] == means
        assert entries.get("key") == got
        assert entries.remove("key", shown) == "key removed", "what is shown can be typed"


def test_every_command_prints_json_if_it_is_to(shop: Cli) -> None:
    assert shop.json("config", "get", "shop", "owner") == "Ada"
    assert shop.json("config", "put", "shop", "opens_at", "-5") == {"key": "opens_at", "value": -5}
    assert shop.json("config", "put-if-absent", "shop", "closes_at", "x") == {"key": "closes_at", "value": "x"}
    assert shop.json("config", "replace", "shop", "owner", "Bob", "Ada") == {"key": "owner", "value": "Bob"}
    assert shop.json("config", "remove", "shop", "owner", "Bob") == {"key": "owner", "removed": True}
    found = shop.json("config", "refresh", "shop")
    assert found.keys() == {"keys", "revision"} and found["keys"] == 2
    assert shop.json("config", "clear", "shop", "--yes") == {"removed": True}
    assert "there is no key owner" in shop.fails(1, "config", "get", "shop", "owner", "--json")
    assert shop.ok("config", "put", "shop", "--", "owner", "--json") == "owner = --json\n"


def test_values_may_begin_with_a_minus(shop: Cli) -> None:
    assert shop.ok("config", "put", "shop", "opens_at", "-5") == "opens_at = -5\n"
    assert shop.ok("config", "replace", "shop", "opens_at", "--x", "-5") == "opens_at = --x\n"
    assert shop.ok("config", "remove", "shop", "opens_at", "--x") == "opens_at removed\n"


def test_conditions_fail_with_what_is_there(shop: Cli) -> None:
    assert "nothing changed: owner = Ada" in shop.fails(1, "config", "put-if-absent", "shop", "owner", "Bob")
    assert "nothing changed: owner = Ada" in shop.fails(1, "config", "replace", "shop", "owner", "Bob", "Cyd")
    assert "nothing changed: owner = Ada" in shop.fails(1, "config", "remove", "shop", "owner", "Cyd")
    assert "nothing changed: there is no key closes_at" in shop.fails(1, "config", "replace", "shop", "closes_at", "18")
    assert "nothing changed: there is no key closes_at" in shop.fails(1, "config", "remove", "shop", "closes_at")
    assert "there is no key closes_at" in shop.fails(1, "config", "get", "shop", "closes_at")
    assert shop.ok("config", "put-if-absent", "shop", "closes_at", "18") == "closes_at = 18\n"
    assert shop.ok("config", "replace", "shop", "owner", "Bob", "Ada") == "owner = Bob\n"
    assert shop.ok("config", "replace", "shop", "owner", "Cyd") == "owner = Cyd\n"
    assert shop.ok("config", "remove", "shop", "owner", "Cyd") == "owner removed\n"
    assert shop.ok("config", "clear", "shop", "--yes") == "all keys removed\n"
    assert shop.ok("config", "get-all", "shop") == "there are no entries\n"


def test_configurations_are_listed(cli: Cli) -> None:
    cli.ok("stream", "create", "a/b")
    assert cli.ok("config", "list") == "there are no configurations\n"
    for name in ("shop/b", "shop/a"):
        cli.ok("config", "put", name, "key", "1")
    assert cli.ok("config", "list") == "shop/a\nshop/b\n"
    assert cli.json("config", "list") == ["shop/a", "shop/b"]


def test_a_name_that_is_misspelt_makes_nothing(shop: Cli) -> None:
    for command in (["get-all"], ["get", "x"], ["replace", "x", "1"], ["remove", "x"], ["clear"], ["refresh"]):
        said = shop.fails(1, "config", command[0], "shob", *command[1:])
        assert "there is no configuration shob; create it with 'readergroup config put'" in said
    with rg.connect(shop.url) as client:
        assert [name for name in client.store.list() if "shob" in name] == []


def test_a_wrong_command_line_is_told_in_a_line(shop: Cli) -> None:
    shop.fails(2, "config", "put", "shop", "owner")
    shop.fails(2, "config", "puts", "shop", "owner", "x")
    assert "belongs before the command" in shop.fails(2, "config", "get-all", "shop", "--url", "sqlite:///shop.db")
    assert "letters, digits" in shop.fails(2, "config", "put", "a b", "owner", "x")


class Shop(BaseModel):
    opens_at: int = 8
    owner: str = "nobody"


def test_it_is_the_configuration_that_applications_have(shop: Cli) -> None:
    with rg.connect(shop.url) as client:
        config = client.shared_config("shop", Shop)
        assert config.value == Shop(opens_at=9, owner="Ada")
        shop.ok("config", "put", "shop", "opens_at", "10")
        config.refresh()
        assert config.value == Shop(opens_at=10, owner="Ada")
        config.put("owner", "Bob")
    assert shop.ok("config", "get", "shop", "owner") == "Bob\n"


# ---------------------------------------------------------------------- the prompt


class Prompt:
    """A prompt in a process of its own, that lines are typed to."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def __call__(self, line: str, answers: int = 1) -> str:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        return "".join(self.process.stdout.readline() for _ in range(answers)).rstrip("\n")

    def end(self) -> tuple[int, str, str]:
        """The exit code, and what is said after the end of what is typed."""
        out, error = self.process.communicate(timeout=PATIENCE_SECONDS)
        return self.process.returncode, out, error


@contextmanager
def prompt(cli: Cli) -> Iterator[Prompt]:
    process = cli.process("config", "shell", "demo", stdin=subprocess.PIPE)
    try:
        yield Prompt(process)
    finally:
        process.kill()
        process.communicate()


def test_two_prompts_on_one_configuration(cli: Cli) -> None:
    with prompt(cli) as one, prompt(cli) as two:
        assert one("get-all") == "there are no entries"
        assert two("get-all") == "there are no entries"
        assert one("put p1 v1") == "p1 = v1"
        assert one("get p1") == "v1"
        assert two("get p1") == "there is no key p1", "it has not refreshed"
        assert two("refresh").startswith("1 key, revision ")
        assert two("get p1") == "v1"
        assert two("replace p1 newVal v1") == "p1 = newVal"
        assert one("get p1") == "v1", "it has not refreshed"
        assert one("replace p1 anotherVal v1") == "nothing changed: p1 = newVal"
        assert one("get p1") == "newVal", "the refusal has brought its copy up to date"
        assert two("remove p1 v1") == "nothing changed: p1 = newVal"
        assert two("remove p1 newVal") == "p1 removed"
        assert one("put-if-absent p1 v3") == "p1 = v3"
        assert two("put-if-absent p1 v4") == "nothing changed: p1 = v3"
        assert two("clear") == "all keys removed"
        assert one("get-all") == "p1 = v3"
        assert one("refresh").startswith("0 keys, revision ")
        assert one("get-all") == "there are no entries"
        assert one("exit", answers=0) == ""
        assert one.end() == (0, "", "")
        assert two.end() == (0, "", ""), "the end of what is typed"


def test_what_is_typed_wrong_has_one_line_as_its_answer(cli: Cli) -> None:
    with prompt(cli) as typed:
        assert typed("get") == "usage: get KEY"
        assert typed("get-all now") == "usage: get-all"
        assert typed("replace p1") == "usage: replace KEY VALUE [CURRENT]"
        assert typed("replace p1 a b c") == "usage: replace KEY VALUE [CURRENT]; quote values with spaces"
        assert typed("answer x") == "there is no command answer; type help for a list"
        assert typed("put greeting 'good day").startswith("no closing quotation; quote values")
        assert typed(f"put number {2**70}").startswith("the value cannot be stored: ")
        assert typed("\n   \nput greeting 'good day'") == "greeting = good day"
        assert "replace KEY VALUE [CURRENT]" in typed("help", answers=10)
        assert typed("get greeting") == "good day"
        assert typed.end() == (0, "", "")


def test_a_prompt_that_is_interrupted_ends_in_order(cli: Cli) -> None:
    with prompt(cli) as typed:
        assert typed("put a 1") == "a = 1"
        typed.process.send_signal(signal.SIGINT)
        assert typed.end() == (0, "", "")


def test_a_prompt_that_is_interrupted_right_after_an_answer_ends_in_order(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def print_and_interrupt(answer: str, *, flush: bool) -> None:
        sys.stdout.write(f"{answer}\n")
        raise KeyboardInterrupt  # which comes after a call of what is written in C, at the earliest

    monkeypatch.setattr("readergroup.cli.config.print", print_and_interrupt, raising=False)
    result = cli("config", "shell", "demo", input="put a 1\nput a 2\n")
    assert (result.exit_code, result.stdout) == (0, "a = 1\n")


def test_a_command_that_is_interrupted_is_not_taken_for_done(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(entries: Entries, line: str) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(Entries, "answer", interrupted)
    assert cli("config", "shell", "demo", input="put a 1\n").exit_code == 130


def _log_in(terminal: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # which is ignored where the tests run in the background of a shell
    os.login_tty(terminal)


@pytest.mark.parametrize("key", [b"\x03", b"\x04"], ids=["Ctrl-C", "Ctrl-D"])
def test_on_a_terminal_it_prompts_and_ends_at_a_key(key: bytes, cli: Cli) -> None:
    controller, terminal = pty.openpty()
    command = [*COMMAND, "config", "shell", "demo"]
    # Only keys that are typed at the terminal that controls a process are signals to it.
    process = subprocess.Popen(
        command, env={**cli.environment, "TERM": "dumb"}, preexec_fn=lambda: _log_in(terminal), pass_fds=[terminal]
    )
    os.close(terminal)
    try:
        _see(controller, b"demo> ")
        os.write(controller, b"put a 1\r")
        _see(controller, b"a = 1\r\ndemo> ")
        shown = _press_to_end(controller, key, process)
        assert process.returncode == 0
        assert b"Traceback" not in shown
    finally:
        process.kill()
        process.wait()
        os.close(controller)


def _press_to_end(controller: int, key: bytes, process: subprocess.Popen[bytes]) -> bytes:
    """Press the key, and return what the terminal shows until the process has ended.

    CPython loses a signal that comes between the prompt that readline shows and its waiting for keys (seen in
    `readline_until_enter_or_signal` of 3.11.7, 3 of 400 times under load), until another one comes or a line ends.
    """
    os.write(controller, key)
    shown, deadline = b"", time.monotonic() + PATIENCE_SECONDS
    with suppress(OSError):  # which is the end of a terminal whose processes have ended
        while time.monotonic() < deadline:
            if select.select([controller], [], [], 1.0)[0]:
                shown += os.read(controller, 65536)
            else:
                os.write(controller, b"\r")
    process.wait(max(0.0, deadline - time.monotonic()))
    return shown


def _see(controller: int, expected: bytes) -> None:
    """Read what is shown until it ends so."""
    shown = b""
    while not shown.endswith(expected):
        assert select.select([controller], [], [], PATIENCE_SECONDS)[0], shown
        shown += os.read(controller, 65536)
