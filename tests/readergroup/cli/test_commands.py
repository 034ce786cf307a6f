"""The command ``readergroup``: most of it in this process, signals, pipes and terminals with processes of its own."""

from __future__ import annotations

import ast
import fcntl
import json
import logging
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

import readergroup as rg
from readergroup.cli.app import _is_of_use, _words_in, app_with
from readergroup.cli.escaping import printable
from readergroup.cli.session import one_line
from readergroup.group.model.updates import CreateCheckpoint
from synchronizer import open_store
from synchronizer.testing import FailingStore
from tests.command import app
from tests.places import DOCS
from tests.servers.nats import NatsServer, nats_server_binary
from tests.servers.unavailable import ServerUnavailable
from tests.waiting import PATIENCE_SECONDS, until

COMMAND = (sys.executable, "-m", "readergroup.cli")


class Cli:
    """Runs commands on one store."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = f"sqlite:///{folder / 'cli.db'}"

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "READERGROUP_URL": self.url}

    def __call__(self, *args: str, input: str | bytes | None = None) -> Any:
        return CliRunner(env={"READERGROUP_URL": self.url, "COLUMNS": "80"}).invoke(app, list(args), input=input)

    def ok(self, *args: str, input: str | bytes | None = None) -> str:
        result = self(*args, input=input)
        assert result.exit_code == 0, (result.stderr, result.exception)
        return result.stdout

    def json(self, *args: str) -> object:
        return json.loads(self.ok(*args, "--json"))

    def fails(self, exit_code: int, *args: str, input: str | bytes | None = None) -> str:
        """What is on stderr, which is one line."""
        result = self(*args, input=input)
        assert result.exit_code == exit_code, (result.stdout, result.stderr, result.exception)
        assert result.stdout == ""
        assert result.stderr.startswith("readergroup: ")
        assert result.stderr.count("\n") == 1
        assert isinstance(result.exception, SystemExit)
        return result.stderr

    def process(self, *args: str, **options: object) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*COMMAND, *args],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **options,  # type: ignore[call-overload]
        )

    def shell(self, command: str) -> subprocess.CompletedProcess[str]:
        """What Bash makes of the command line, which begins after ``readergroup``."""
        return subprocess.run(
            ["/bin/bash", "-c", f"{' '.join(COMMAND)} {command}"],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
        )

    def on_terminal(
        self,
        *args: str,
        input: bytes | None = None,
        seeing: str | None = None,
        do: Callable[[], object] = lambda: None,
    ) -> tuple[int, str]:
        """The exit code and what was shown on a terminal of 80 columns. When ``seeing`` is there, ``do`` is called."""
        controller, terminal = pty.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 80, 0, 0))
        environment = {name: value for name, value in self.environment.items() if name not in ("COLUMNS", "NO_COLOR")}
        process = subprocess.Popen(
            [*COMMAND, *args],
            env={**environment, "TERM": "xterm"},
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            close_fds=True,
        )
        os.close(terminal)
        try:
            if input is not None:
                os.write(controller, input)
            shown = b""
            while True:
                try:
                    part = os.read(controller, 65536)
                except OSError:  # the other side is closed
                    break
                if not part:
                    break
                shown += part
                if seeing is not None and seeing in shown.decode(errors="replace"):
                    seeing = None
                    do()
            return process.wait(PATIENCE_SECONDS), shown.decode()
        finally:
            process.kill()
            process.wait()
            os.close(controller)


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    return Cli(tmp_path)


@pytest.fixture
def orders(cli: Cli) -> Cli:
    """A store with a stream of two segments."""
    cli.ok("stream", "create", "shop/orders", "--segments", "2")
    return cli


def plain(shown: str) -> list[str]:
    """The lines on a terminal, without what moves its cursor and colours them."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown).replace("\r", "").split("\n")


# ---------------------------------------------------------------------- streams


def test_a_stream_is_created_listed_and_shown(cli: Cli) -> None:
    assert "2 segments (0, 1)" in cli.ok("stream", "create", "shop/orders", "--segments", "2")
    assert "shop/orders" in cli.ok("stream", "list")
    shown = cli.ok("stream", "info", "shop/orders")
    assert "shop/orders/0" in shown and "[0.5, 1)" in shown


def test_creating_what_exists_is_no_error_unless_it_differs(orders: Cli) -> None:
    orders.ok("stream", "create", "shop/orders", "--segments", "2")
    assert "the stream has 2 segments" in orders.fails(1, "stream", "create", "shop/orders", "--segments", "3")


def test_streams_are_listed_by_scope(orders: Cli) -> None:
    orders.ok("stream", "create", "bank/accounts")
    found = orders.json("stream", "list", "bank")
    assert isinstance(found, list)
    assert [each["name"] for each in found] == ["bank/accounts"]
    assert orders.json("stream", "list", "nobody") == []


def test_streams_are_listed_by_tag(orders: Cli) -> None:
    orders.ok("stream", "create", "bank/accounts", "--tag", "team=money", "--tag", "tier=1")
    assert orders.json("stream", "list", "--tag", "team=money") != []
    assert orders.json("stream", "list", "--tag", "team=shop") == []
    assert "team=shop" in orders.ok("stream", "configure", "bank/accounts", "--tag", "team=shop")
    assert "tier" not in orders.ok("stream", "info", "bank/accounts")
    assert "bank/accounts" in orders.ok("stream", "list", "--tag", "team=shop")
    assert "team" not in orders.ok("stream", "configure", "bank/accounts", "--no-tags")
    for wrong in (("--tag", "team"), ("--tag", "a=b", "--no-tags"), ()):
        orders.fails(2, "stream", "configure", "bank/accounts", *wrong)


def test_the_watermark_and_event_times_are_shown(cli: Cli) -> None:
    with rg.connect(cli.url) as client:
        client.streams.create("shop/orders")
        assert "Watermark" not in cli.ok("stream", "info", "shop/orders")
        with client.writer("shop/orders") as writer:
            writer.write(b"x", event_time=datetime(2026, 1, 1, tzinfo=UTC))
            writer.note_time(datetime(2026, 1, 2, tzinfo=UTC))
    assert "Watermark of event time: 2026-01-02T00:00:00.000Z" in cli.ok("stream", "info", "shop/orders")
    info = json.loads(cli.ok("stream", "info", "shop/orders", "--json"))
    assert info["watermark"] == "2026-01-02T00:00:00Z"
    read = json.loads(cli.ok("read", "shop/orders", "--group", "g", "--json"))
    assert read["event_time"] == "2026-01-01T00:00:00+00:00"


def test_streams_are_listed_by_what_they_hold(orders: Cli) -> None:
    orders.ok("stream", "create", "shop/clicks")
    orders.ok("write", "shop/clicks", input="one\n" * 1000)
    lines = orders.ok("stream", "list", "--size").splitlines()
    largest, other = (line.split() for line in lines if line.startswith("shop/"))
    assert (largest[0], other[:2]) == ("shop/clicks", ["shop/orders", "0"])
    orders.ok("stream", "truncate", "--yes", "shop/clicks", "tail")
    assert "They hold 0 bytes" in orders.ok("stream", "list", "--size")
    assert "has the head and the tail" in orders.fails(2, "stream", "list", "--size", "--json")


def test_a_stream_is_split_merged_and_sealed(orders: Cli) -> None:
    assert "(2, 3, 1), epoch 1" in orders.ok("stream", "scale", "shop/orders", "--split", "0")
    assert "(2, 4), epoch 2" in orders.ok("stream", "scale", "shop/orders", "--merge", "3,1")
    assert "(5, 6, 7, 4), epoch 3" in orders.ok("stream", "scale", "shop/orders", "--split", "2", "--into", "3")
    assert "(5, 6, 7, 8, 9), epoch 4" in orders.ok("stream", "scale", "shop/orders", "--at", "alice")
    assert "(10, 11), epoch 5" in orders.ok("stream", "scale", "shop/orders", "--ranges", "0-0.1,0.1-1")
    assert "(10, 12, 13), epoch 6" in orders.ok("stream", "scale", "shop/orders", "--split", "shop/orders/11")
    assert "(14, 13), epoch 7" in orders.ok("stream", "scale", "shop/orders", "--merge", "shop/orders/10, 12")
    assert "sealed" in orders.ok("stream", "seal", "shop/orders", "--yes")
    info = orders.json("stream", "info", "shop/orders")
    assert isinstance(info, dict)
    assert info["sealed"] is True and info["epoch"] == 7


def test_a_stream_is_truncated_at_its_tail_and_at_a_cut(orders: Cli) -> None:
    orders.ok("write", "shop/orders", input="one\ntwo\n")
    cut = json.dumps(rg.StreamCut.model_validate(orders.json("stream", "info", "shop/orders")["tail"]).model_dump())  # type: ignore[index]
    orders.ok("write", "shop/orders", input="three\nfour\n")
    orders.ok("stream", "truncate", "--yes", "shop/orders", cut)
    assert sorted(orders.ok("read", "shop/orders", "--group", "a").split()) == ["four", "three"]
    orders.ok("stream", "truncate", "--yes", "shop/orders", "-", input=cut)
    orders.ok("stream", "truncate", "--yes", "shop/orders", "tail")
    assert orders.ok("read", "shop/orders", "--group", "b") == ""


def test_a_deleted_stream_is_gone(orders: Cli) -> None:
    orders.ok("stream", "delete", "shop/orders", "--yes")
    assert "no stream of this name" in orders.fails(1, "stream", "info", "shop/orders")


def test_deleting_asks_on_a_terminal(orders: Cli) -> None:
    exit_code, shown = orders.on_terminal("stream", "delete", "shop/orders", input=b"n\n")
    assert exit_code == 1
    assert "all its data?" in shown and "nothing was done" in shown
    exit_code, shown = orders.on_terminal("stream", "delete", "shop/orders", input=b"\x04")  # Ctrl-D
    assert (exit_code, shown.splitlines()[-1]) == (1, "readergroup: cancelled, nothing was done")
    exit_code, _ = orders.on_terminal("stream", "delete", "shop/orders", input=b"y\n")
    assert exit_code == 0
    assert orders.json("stream", "list") == []


@pytest.mark.parametrize(
    ("command", "question"),
    [
        ("stream seal shop/orders", "Seal the stream shop/orders"),
        ("stream truncate shop/orders tail", "Delete the data of the stream shop/orders before its tail?"),
        ("stream delete shop/orders", "Delete the stream shop/orders and all its data?"),
        ("group reset g --to tail", "Reset the reader group g to tail?"),
        ("group delete g", "Delete the reader group g and its positions?"),
    ],
)
def test_what_cannot_be_undone_is_refused_where_nobody_can_confirm_it(orders: Cli, command: str, question: str) -> None:
    orders.ok("write", "shop/orders", input="one\n")
    orders.ok("read", "shop/orders", "--group", "g", "--limit", "0")
    said = orders.fails(2, *command.split())
    assert question in said and "add --yes" in said
    assert orders.ok("read", "shop/orders", "--group", "g") == "one\n"
    orders.ok(*command.split(), "--yes")


# ---------------------------------------------------------------------- writing


def test_each_line_becomes_an_event_with_its_bytes_as_they_are(orders: Cli) -> None:
    written = b"\xff\xfe\n\nlast \r\nwithout an end"
    assert "4 events written" in orders.ok("write", "shop/orders", input=written)
    result = orders("read", "shop/orders", "--group", "g")
    assert sorted(result.stdout_bytes.split(b"\n")[:-1]) == sorted(written.split(b"\n"))


def test_lines_over_the_limit_are_written_only_if_asked_for(orders: Cli) -> None:
    large = b"x" * (9 * 2**20)
    assert "--max-event-bytes" in orders.fails(1, "write", "shop/orders", input=b"small\n" + large)
    assert "1 event written" in orders.ok("write", "shop/orders", "--max-event-bytes", "10MiB", input=large)
    assert "10MiB" in orders.fails(2, "write", "shop/orders", "--max-event-bytes", "10MiBs", input=large)
    exported = orders.ok("stream", "export", "shop/orders")
    orders.ok("stream", "create", "shop/imported")
    orders.ok("stream", "import", "shop/imported", "--max-event-bytes", "10MiB", input=exported)
    assert sorted(map(len, orders.ok("read", "shop/imported", "--group", "g").split())) == [5, len(large)]
    assert "xxx" in orders.ok("peek", "shop/imported")


def test_a_file_is_written(orders: Cli, tmp_path: Path) -> None:
    file = tmp_path / "lines.txt"
    file.write_text("".join(f"{n}\n" for n in range(10_000)))
    found = orders.json("write", "shop/orders", str(file))
    assert found == {"stream": "shop/orders", "events": 10_000, "bytes": sum(len(str(n)) for n in range(10_000))}


def test_the_events_of_a_key_stay_in_order(orders: Cli) -> None:
    lines = [{"user": f"u{n % 7}", "n": n} for n in range(700)]
    orders.ok("write", "shop/orders", "--key", "user", input="".join(json.dumps(line) + "\n" for line in lines))
    events = [json.loads(line) for line in orders.ok("read", "shop/orders", "--group", "g", "--json").splitlines()]
    read = [(event["routing_key"], json.loads(event["data"])) for event in events]
    for user in {line["user"] for line in lines}:
        assert [line for key, line in read if key == user] == [line for line in lines if line["user"] == user]


@pytest.mark.parametrize("key", [7, 1.5, True, [1, 2], {"b": 1, "a": 2}])
def test_a_key_that_is_no_text_is_its_json(orders: Cli, key: object) -> None:
    orders.ok("write", "shop/orders", "--key", "k", input=json.dumps({"k": key}))
    event = json.loads(orders.ok("read", "shop/orders", "--group", "g", "--json"))
    assert json.loads(event["routing_key"]) == key


@pytest.mark.parametrize("line", ["no json", "[1]", '{"other": 1}', '{"k": null}', "", "\udcff", "[" * 5000])
def test_a_line_without_its_key_ends_the_writing_and_says_which(orders: Cli, line: str) -> None:
    text = '{"k": "a"}\n' + line + '\n{"k": "b"}\n'
    message = orders.fails(1, "write", "shop/orders", "--key", "k", input=text.encode("utf-8", "surrogateescape"))
    assert "line 2" in message and "the lines before it are stored" in message
    assert orders.ok("read", "shop/orders", "--group", "g") == '{"k": "a"}\n'


def test_a_key_that_is_too_long_ends_the_writing_and_says_where(orders: Cli) -> None:
    text = json.dumps({"k": "a"}) + "\n" + json.dumps({"k": "b" * 5000}) + "\n"
    message = orders.fails(1, "write", "shop/orders", "--key", "k", input=text)
    assert "line 2: a routing key" in message and "the lines before it are stored" in message


def test_a_line_that_is_too_long_for_an_event_is_refused(orders: Cli, tmp_path: Path) -> None:
    file = tmp_path / "long"
    file.write_bytes(b"short\n" + b"x" * (9 * 1024 * 1024) + b"\n")
    assert "line 2 is longer" in orders.fails(1, "write", "shop/orders", str(file))
    assert orders.ok("read", "shop/orders", "--group", "g") == "short\n"


def test_a_sealed_stream_takes_no_lines(orders: Cli) -> None:
    orders.ok("stream", "seal", "shop/orders", "--yes")
    assert "sealed" in orders.fails(1, "write", "shop/orders", input="one\n")


# ---------------------------------------------------------------------- reading


def test_a_group_reads_each_event_once_over_many_commands(orders: Cli) -> None:
    orders.ok("write", "shop/orders", input="".join(f"{n}\n" for n in range(50)))
    read = orders.ok("read", "shop/orders", "--group", "g", "--limit", "7").splitlines()
    assert len(read) == 7
    assert orders.ok("read", "shop/orders", "--group", "g", "--limit", "0") == ""
    read += orders.ok("read", "shop/orders", "--group", "g").splitlines()
    assert sorted(map(int, read)) == list(range(50))
    assert orders.ok("read", "shop/orders", "--group", "g") == ""
    assert len(orders.ok("read", "shop/orders", "--group", "another").splitlines()) == 50


def test_events_in_json_say_all_about_themselves(orders: Cli) -> None:
    orders.ok("write", "shop/orders", input=b"text\n\xff\xfe\n")
    events = [json.loads(line) for line in orders.ok("read", "shop/orders", "--group", "g", "--json").splitlines()]
    assert {event.get("data") for event in events} == {"text", None}
    assert {event.get("data_base64") for event in events} == {"//4=", None}
    for event in events:
        assert event["pointer"].startswith(event["segment"])
        assert event["written_at"].endswith("+00:00")
        assert {"offset", "fencing_token"} <= set(event)


def test_reading_ends_at_the_end_of_a_sealed_stream(orders: Cli) -> None:
    orders.ok("write", "shop/orders", input="one\ntwo\n")
    orders.ok("stream", "scale", "shop/orders", "--split", "0")
    orders.ok("stream", "seal", "shop/orders", "--yes")
    assert sorted(orders.ok("read", "shop/orders", "--group", "g", "--follow").split()) == ["one", "two"]


def test_what_was_truncated_is_told_and_the_rest_is_read(orders: Cli) -> None:
    orders.ok("read", "shop/orders", "--group", "g")  # which begins before what is written now
    orders.ok("write", "shop/orders", input="gone\ngone\n")
    orders.ok("stream", "truncate", "--yes", "shop/orders", "tail")
    orders.ok("write", "shop/orders", input="there\n")
    result = orders("read", "shop/orders", "--group", "g")
    assert (result.exit_code, result.stdout) == (0, "there\n")
    assert "data was truncated before it was read" in result.stderr
    assert "segment='shop/orders/" in result.stderr


def test_a_group_of_other_streams_is_refused(orders: Cli) -> None:
    orders.ok("stream", "create", "bank/accounts")
    orders.ok("read", "shop/orders", "--group", "g")
    assert "reads shop/orders; use a group that reads only bank/accounts" in orders.fails(
        2, "read", "bank/accounts", "--group", "g"
    )


def test_a_group_that_reading_creates_is_told(orders: Cli) -> None:
    orders.ok("write", "shop/orders", input="one\n")
    told = "there was no group gruop; it was created, and reads shop/orders from its head"
    assert orders("read", "shop/orders", "--group", "gruop", "--limit", "0").stderr == f"readergroup: {told}\n"
    orders.ok("group", "delete", "gruop", "--yes")
    exit_code, shown = orders.on_terminal("read", "shop/orders", "--group", "gruop")
    assert exit_code == 0 and told in " ".join(shown.split()) and "\none" in shown
    assert told not in orders.on_terminal("read", "shop/orders", "--group", "gruop")[1]


def test_a_reader_has_the_id_that_it_is_given(orders: Cli) -> None:
    orders.ok("read", "shop/orders", "--group", "g")
    assert "letters, digits" in orders.fails(2, "read", "shop/orders", "--group", "g", "--reader", "r!")
    process = orders.process("read", "shop/orders", "--group", "g", "--follow", "--reader", "me")
    try:
        until(lambda: list(group_state(orders)["readers"]) == ["me"])
    finally:
        process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_SECONDS) == 0
    assert group_state(orders)["readers"] == {}


def test_following_hears_what_is_written_later_and_ctrl_c_commits_what_was_printed(orders: Cli) -> None:
    orders.ok("group", "create", "g", "--stream", "shop/orders")
    process = orders.process("read", "shop/orders", "--group", "g", "--follow")
    assert process.stdout is not None
    orders.ok("write", "shop/orders", input="one\n")
    assert read_line(process) == "one\n"
    orders.ok("write", "shop/orders", input="two\n")
    assert read_line(process) == "two\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert (process.returncode, out) == (0, "")
    assert err in (
        "",
        "readergroup: the command waits for the store or its timeout; a second Ctrl-C or SIGTERM ends it now\n",
    )
    assert orders.ok("read", "shop/orders", "--group", "g") == ""


def test_a_closed_pipe_ends_reading_without_a_word_and_loses_nothing(orders: Cli) -> None:
    orders.ok("group", "create", "g", "--stream", "shop/orders")
    lines = [f"{n} {'x' * 1000}" for n in range(2000)]
    orders.ok("write", "shop/orders", input="".join(line + "\n" for line in lines))
    process = orders.process("read", "shop/orders", "--group", "g")
    first = read_line(process)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == ""
    process.wait(PATIENCE_SECONDS)
    rest = orders.ok("read", "shop/orders", "--group", "g").splitlines()
    # What stood in the pipe is lost with it; what was not written to it is not.
    assert len(rest) >= 1000
    assert first.strip() in lines


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("read shop/orders --group g >&-", "standard input or output is closed; give the command a file, or /dev/null"),
        ("read shop/orders --group g > /dev/full", "No space left on device"),
        ("stream list >&-", "standard input or output is closed; give the command a file, or /dev/null"),
        ("stream list > /dev/full", "No space left on device"),
        ("--help > /dev/full", "No space left on device"),
        ("write shop/orders <&-", "standard input or output is closed; give the command a file, or /dev/null"),
        ("stream list <&- >&- 2>&-", ""),
    ],
)
def test_input_and_output_that_do_not_work_are_told_on_one_line_and_lose_nothing(
    orders: Cli, command: str, said: str
) -> None:
    orders.ok("group", "create", "g", "--stream", "shop/orders")
    orders.ok("write", "shop/orders", input="one\n")
    process = orders.shell(command)
    assert (process.returncode, process.stdout, process.stderr) == (1, "", f"readergroup: {said}\n" if said else "")
    assert orders.ok("read", "shop/orders", "--group", "g") == "one\n"


def test_a_process_without_any_input_or_output_does_what_it_is_asked(orders: Cli) -> None:
    process = orders.shell("config put settings size 5 <&- 2>&-")
    assert (process.returncode, process.stdout) == (0, "size = 5\n")


@pytest.mark.parametrize("json", ["", "--json"])
def test_a_closed_pipe_ends_a_table_without_a_word(orders: Cli, json: str) -> None:
    process = orders.shell(f"stream info shop/orders {json} | true; exit ${{PIPESTATUS[0]}}")
    assert process.stderr == ""
    assert process.returncode in (0, 1)  # 0: it was quicker than the other end


# ---------------------------------------------------------------------- groups


def test_groups_are_listed_and_described(orders: Cli) -> None:
    assert "no reader groups" in orders.ok("group", "list")
    orders.ok("read", "shop/orders", "--group", "g")
    assert "shop/orders" in orders.ok("group", "list")
    described = orders.ok("group", "describe", "g")
    assert "reader_timeout_seconds=10" in described and "unassigned" in described
    assert orders.ok("group", "info", "g") == described  # as for a stream, and the reverse
    assert orders.ok("stream", "describe", "shop/orders") == orders.ok("stream", "info", "shop/orders")
    found = orders.json("group", "list")
    assert isinstance(found, list)
    assert [each["group"] for each in found] == ["g"]
    assert group_state(orders)["unassigned"] == ["shop/orders/0", "shop/orders/1"]


def test_the_lag_is_what_was_written_and_not_read(orders: Cli) -> None:
    orders.ok("read", "shop/orders", "--group", "g")
    orders.ok("write", "shop/orders", input="one\ntwo\nthree\n")
    assert "g is 3 events behind" in orders.ok("group", "lag", "g")
    lag = orders.json("group", "lag", "g")
    assert isinstance(lag, dict)
    assert lag["events"] == 3 == sum(each["events"] for each in lag["segments"].values())
    orders.ok("read", "shop/orders", "--group", "g")
    assert "g is 0 events behind" in orders.ok("group", "lag", "g")


def test_streams_that_were_deleted_under_a_group_are_named(orders: Cli) -> None:
    orders.ok("read", "shop/orders", "--group", "g")
    orders.ok("write", "shop/orders", input="one\n")
    assert "eleted" not in orders.ok("group", "describe", "g") + orders.ok("group", "lag", "g")
    orders.ok("stream", "delete", "--yes", "shop/orders")
    for command in ("describe", "lag"):
        assert "Deleted streams, of which nothing is left to read: shop/orders" in orders.ok("group", command, "g")


def test_the_cuts_of_a_group_can_be_given_to_truncate(orders: Cli) -> None:
    orders.ok("write", "shop/orders", input="one\ntwo\n")
    orders.ok("read", "shop/orders", "--group", "g")
    orders.ok("write", "shop/orders", input="three\n")
    cuts = group_state(orders)["stream_cuts"]
    orders.ok("stream", "truncate", "--yes", "shop/orders", json.dumps(cuts["shop/orders"]))
    assert orders.ok("read", "shop/orders", "--group", "new") == "three\n"


def test_a_group_is_reset_to_a_checkpoint_a_time_a_cut_and_its_head(orders: Cli) -> None:
    orders.ok("write", "shop/orders", input="one\n")
    orders.ok("read", "shop/orders", "--group", "g")
    cuts = json.dumps(group_state(orders)["stream_cuts"])
    assert orders.ok("group", "checkpoint", "g", "nightly").startswith("g: shop/orders[0:")
    checkpoint = json.dumps(orders.json("group", "checkpoint", "g", "weekly"))
    orders.ok("write", "shop/orders", input="two\n")
    places = dict.fromkeys(("nightly", checkpoint, cuts), "two\n") | {"tail": ""}
    places |= dict.fromkeys(("head", "2020-01-01T00:00+00:00", "2h"), "one\ntwo\n")
    for place, expected in places.items():
        assert orders.ok("group", "reset", "g", "--to", place, "--yes").startswith("g: continues at shop/orders[0:")
        read = orders.ok("read", "shop/orders", "--group", "g")
        assert sorted(read.splitlines()) == sorted(expected.splitlines()), place


def test_the_printed_pipelines_truncate_and_reset_at_what_a_group_has_read(orders: Cli) -> None:
    orders.ok("write", "shop/orders", input="one\n")
    for group in ("billing", "totals"):
        orders.ok("read", "shop/orders", "--group", group)
    orders.ok("write", "shop/orders", input="two\n")
    _run_printed("checkpoints.md", "reset", orders)
    assert orders.ok("read", "shop/orders", "--group", "sums") == "two\n"
    _run_printed("delete.md", "truncate", orders)
    assert orders.ok("read", "shop/orders", "--group", "new") == "two\n"


def _run_printed(page: str, name: str, cli: Cli) -> None:
    text = (DOCS / "howto" / page).read_text()
    found = re.search(rf"^<!-- run: {name} -->\n```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert found
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = ["bash", "-eu", "-o", "pipefail", "-c", found[1]]
    subprocess.run(command, env={**cli.environment, "PATH": path}, check=True, timeout=PATIENCE_SECONDS)


def test_where_a_group_cannot_be_reset_to_is_said(orders: Cli) -> None:
    orders.ok("read", "shop/orders", "--group", "g")
    assert "its checkpoints: none" in orders.fails(2, "group", "reset", "g", "--to", "nightly", "--yes")
    told = orders.fails(2, "group", "reset", "g", "--to", json.dumps(group_state(orders)), "--yes")
    assert "neither a checkpoint nor cuts" in told and "stream_cuts of 'group describe --json'" in told
    told = orders.fails(2, "group", "reset", "g", "--to", "2026-01-01", "--yes")
    assert "--to '2026-01-01' needs a timezone, such as 2026-01-01T00:00:00+00:00" in told
    for wrong in ("noon", "999999999d", "999999999w"):
        assert "such as 2h" in orders.fails(2, "group", "reset", "g", "--to", wrong, "--yes")


def test_who_blocks_a_checkpoint_is_named(orders: Cli) -> None:
    orders.ok("read", "shop/orders", "--group", "g")
    with rg.connect(orders.url) as client, client.groups.get("g").reader("r1"):
        assert "readers='r1'" in orders.fails(1, "group", "checkpoint", "g", "nightly", "--timeout", "0.2")


def test_the_help_lists_what_creates_a_group_first(cli: Cli) -> None:
    shown = cli.ok("group", "--help")
    assert shown.index("Create a reader group") < shown.index("Delete a group")


def test_a_deleted_group_is_gone(orders: Cli) -> None:
    orders.ok("read", "shop/orders", "--group", "g")
    orders.ok("group", "delete", "g", "--yes")
    assert "no reader group of this name" in orders.fails(1, "group", "describe", "g")


# ---------------------------------------------------------------------- watching


def test_watching_prints_each_notification_as_json_until_the_end_of_data(orders: Cli) -> None:
    orders.ok("read", "shop/orders", "--group", "g")
    process = orders.process("watch", "g", "--json")
    assert json.loads(read_line(process, saying="SegmentNotification"))["number_of_segments"] == 2
    orders.ok("stream", "scale", "shop/orders", "--split", "0")
    orders.ok("stream", "seal", "shop/orders", "--yes")
    orders.ok("read", "shop/orders", "--group", "g")
    out, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert (process.returncode, err) == (0, "")
    notifications = [json.loads(line) for line in out.splitlines()]
    assert 3 in [each.get("number_of_segments") for each in notifications]
    assert "EndOfDataNotification" in [each["type"] for each in notifications]


def test_watching_ends_quietly_with_ctrl_c(orders: Cli) -> None:
    orders.ok("read", "shop/orders", "--group", "g")
    process = orders.process("watch", "g")
    assert "segments: 2 to read" in read_line(process, saying="segments")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert (process.returncode, err) == (0, "")
    assert "Traceback" not in out


def test_watching_on_a_terminal_shows_the_segments_and_what_was_told(orders: Cli) -> None:
    orders.ok("read", "shop/orders", "--group", "g")
    orders.ok("write", "shop/orders", input="one\ntwo\n")

    def end() -> None:
        orders.ok("stream", "seal", "shop/orders", "--yes")
        orders.ok("read", "shop/orders", "--group", "g")

    exit_code, shown = orders.on_terminal("watch", "g", seeing="events behind", do=end)
    assert exit_code == 0
    assert any(line.startswith("shop/orders/0") for line in plain(shown))
    assert any("end of data" in line for line in plain(shown))


def test_a_group_is_shown_with_its_segments_in_the_order_of_their_numbers(cli: Cli) -> None:
    cli.ok("stream", "create", "shop/many", "--segments", "11")
    cli.ok("read", "shop/many", "--group", "g")
    for command in ("describe", "lag"):
        lines = cli.ok("group", command, "g").splitlines()
        segments = [line.split()[0] for line in lines if line.startswith("shop/many/")]
        assert segments == [f"shop/many/{number}" for number in range(11)]


# ---------------------------------------------------------------------- screens


def test_everything_fits_80_columns(cli: Cli) -> None:
    stream = "a-scope-with-a-long-name/" + "a-stream-whose-name-is-" + "very-" * 12 + "long"
    cli.ok("stream", "create", stream, "--segments", "3")
    cli.ok("write", stream, input="one\ntwo\nthree\n")
    cli.ok("read", stream, "--group", "a-group-with-a-long-name", "--limit", "1")
    for command in (
        ("stream", "list"),
        ("stream", "info", stream),
        ("group", "list"),
        ("group", "describe", "a-group-with-a-long-name"),
        ("group", "lag", "a-group-with-a-long-name"),
    ):
        exit_code, shown = cli.on_terminal(*command)
        assert exit_code == 0
        assert max(map(len, plain(shown))) <= 80, shown
        # What does not fit is folded, and not cut off.
        first_words = "".join(line.split()[0] for line in plain(shown) if line.split())
        all_words = "".join(word for line in plain(shown) for word in line.split())
        assert stream in first_words or stream in all_words or command[0] == "group", shown


def test_names_are_whole_where_no_terminal_is(cli: Cli) -> None:
    stream = "scope/" + "x" * 200
    cli.ok("stream", "create", stream)
    assert stream + "/0" in cli.ok("stream", "info", stream)


def test_an_interrupted_write_says_how_much_is_stored(orders: Cli) -> None:
    with orders.process("write", "shop/orders", stdin=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stderr is not None
        process.stdin.write("".join(f"line {number}\n" for number in range(5000)) + "half a line")
        process.stdin.flush()
        until(lambda: stored_bytes(orders))
        process.send_signal(signal.SIGINT)
        said = process.stderr.read()
    assert process.returncode == 130
    (stored,) = re.findall("interrupted; ([0-9,]+) events? stored in shop/orders\n", said)
    lines = orders.ok("read", "shop/orders", "--group", "g").splitlines()
    assert len(lines) == int(stored.replace(",", ""))
    assert sorted(lines) == sorted(f"line {number}" for number in range(len(lines)))


def test_many_segments_are_named_by_their_runs(cli: Cli) -> None:
    assert "1,000 segments (0 to 999), epoch 0" in cli.ok("stream", "create", "shop/many", "--segments", "1000")
    assert "(1000, 1001, 1 to 999)" in cli.ok("stream", "scale", "shop/many", "--split", "0")
    alternate = ",".join(str(number) for number in range(1, 40, 2))
    assert " to 999" not in (said := cli.ok("stream", "scale", "shop/many", "--split", alternate)) and "..." in said


def test_where_the_data_of_many_segments_starts_is_summed_up(cli: Cli) -> None:
    cli.ok("stream", "create", "shop/many", "--segments", "300")
    told = cli.ok("stream", "truncate", "shop/many", "tail", "--yes")
    assert (
        told == "shop/many: data starts in 300 segments (0 to 299); 'stream info --json' has their offsets, as head\n"
    )
    cli.ok("stream", "scale", "shop/many", "--split", ",".join(map(str, range(0, 20))))
    info = cli.ok("stream", "info", "shop/many")
    assert "The data at the head starts in earlier segments: 20 segments (0 to 19); 'stream info --json' has" in info


@pytest.mark.parametrize("options", [(), ("--size",)])
def test_a_list_without_a_match_does_not_say_that_there_is_nothing(cli: Cli, options: tuple[str, ...]) -> None:
    cli.ok("stream", "create", "shop/orders")
    for wanted in (("shpo",), ("--tag", "team=a")):
        assert cli.ok("stream", "list", *wanted, *options) == "No stream matches.\n"
    cli.ok("stream", "delete", "shop/orders", "--yes")
    assert cli.ok("stream", "list", *options) == "There are no streams.\n"


def test_a_tag_has_one_value(cli: Cli) -> None:
    cli.ok("stream", "create", "shop/orders", "--tag", "team=a", "--tag", "team=a")
    for command in (("create", "shop/new"), ("configure", "shop/orders"), ("list",)):
        said = cli.fails(2, "stream", *command, "--tag", "team=a", "--tag", "tier=1", "--tag", "team=b")
        assert "give --tag team=... once" in said


def stored_bytes(cli: Cli) -> int:
    info = cli.json("stream", "info", "shop/orders")
    return sum(info["tail"]["offsets"].values())  # type: ignore[index]


@pytest.mark.parametrize("moment", ["readergroup.cli.app", "pydantic", "readergroup.client"])
def test_an_interrupt_while_the_command_loads_prints_no_traceback(orders: Cli, moment: str) -> None:
    program = (
        "import builtins, sys\n"
        "load = builtins.__import__\n"
        "def interrupted(name, globals=None, locals=None, fromlist=(), level=0):\n"
        f"    if {moment!r}.endswith(name) and {moment!r} not in sys.modules and name:\n"
        "        raise KeyboardInterrupt\n"
        "    return load(name, globals, locals, fromlist, level)\n"
        "from readergroup.cli import main\n"
        "builtins.__import__ = interrupted\n"
        "sys.argv = ['readergroup', 'stream', 'list']\n"
        "main()\n"
    )
    process = subprocess.run(
        [sys.executable, "-c", program],
        env=orders.environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert (process.returncode, process.stdout, process.stderr) == (130, "", "")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["stream", "list"], ["stream", "list"]),
        (["--url", "group", "stream", "list", "--url", "x"], ["stream", "list", "--url", "x"]),
        (["--url=sqlite:///shop.db", "read", "shop/orders"], ["read", "shop/orders"]),
        (["--url"], []),
        ([], []),
    ],
)
def test_the_words_of_the_command_are_found_in_the_arguments(arguments: list[str], words: list[str]) -> None:
    assert list(_words_in(arguments)) == words


def test_only_the_command_in_use_is_prepared() -> None:
    def commands(*words: str, of: str = "") -> list[str]:
        shown = CliRunner().invoke(app_with(*words), [*of.split(), "--help"]).output
        return sorted(re.findall(r"(?m)^\W*(stream|read|group|write|copy|list|seal)\b", shown))

    assert commands("read", "shop/orders") == ["read"]
    assert commands("stream", "list") == ["stream"]
    for other in ("--help", "--version", "streams"):
        assert commands(other) == commands() == ["group", "read", "stream", "write"]
    assert commands("stream", "list", of="stream") == ["list"]
    assert commands("stream", "copy", of="stream") == ["copy"]
    for word in ("--help", "lists"):
        assert commands("stream", word, of="stream") == commands("stream", of="stream") == ["copy", "list", "seal"]


def test_progress_does_not_mix_with_events_in_a_pipe(orders: Cli) -> None:
    orders.ok("group", "create", "g", "--stream", "shop/orders")
    orders.ok("write", "shop/orders", input="y\n" * 3000)
    controller, terminal = pty.openpty()
    command = [*COMMAND, "read", "shop/orders", "--group", "g"]
    with subprocess.Popen(command, env=orders.environment, stdout=subprocess.PIPE, stderr=terminal) as process:
        os.close(terminal)
        assert process.stdout is not None and process.stdout.read() == b"y\n" * 3000
    with open(controller, "rb", buffering=0) as shown, suppress(OSError):  # the other side is closed
        assert shown.read(1) in (b"", None)


def test_a_progress_bar_is_shown_on_a_terminal_only(orders: Cli, tmp_path: Path) -> None:
    file = tmp_path / "lines"
    file.write_text("x" * 100 + "\n" + "y\n" * 100_000)
    exit_code, shown = orders.on_terminal("write", "shop/orders", str(file))
    assert exit_code == 0 and "writing to shop/orders" in shown
    process = orders.process("write", "shop/orders", str(file))
    assert process.communicate(timeout=PATIENCE_SECONDS) == ("shop/orders: 100,001 events written\n", "")


@pytest.mark.parametrize("command", ["", "stream", "group", "config"])
def test_every_group_of_commands_explains_itself(command: str) -> None:
    result = CliRunner().invoke(app, [*command.split(), "--help"])
    assert result.exit_code == 0
    assert "Usage: " in result.stdout


def test_commands_print_json_on_request() -> None:
    without = {"serve", "demo", "config shell", "sink ddl", "outbox ddl"}  # a server, a show, a prompt, and SQL
    assert {name for name, options in commands(get_command(app)) if "--json" not in options} == without


def commands(command: Any, *path: str) -> Iterator[tuple[str, list[str]]]:
    """The names of all commands below this one, with their options."""
    if not hasattr(command, "commands"):
        yield " ".join(path), [option for parameter in command.params for option in parameter.opts]
        return
    for name, each in command.commands.items():
        yield from commands(each, *path, name)


def test_the_version_is_printed() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, "readergroup 0.1.0\n")


def test_the_console_script_is_installed(orders: Cli) -> None:
    script = Path(sys.executable).with_name("readergroup")
    process = subprocess.run(
        [script, "stream", "list", "--json"], env=orders.environment, capture_output=True, text=True, check=True
    )
    assert json.loads(process.stdout)[0]["name"] == "shop/orders"


# ---------------------------------------------------------------------- wrong input


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("nonsense", "there is no command 'nonsense'; 'readergroup --help' lists those that there are: write, read"),
        ("grup", "Did you mean 'group'?"),
        ("lag", "there is no command 'lag'; there is 'readergroup group lag'"),
        ("stream show shop/orders", "'readergroup stream --help' lists those that there are: create, "),
        ("state show shop/stock", "which begins with its kind, such as state/shop/stock or map/shop/stock"),
        ("stream create", "Missing argument"),
        ("stream create a/b --segments x", "valid integer"),
        ("stream create a/b --nonsense", "No such option"),
        ("stream scale a/b", "use one of --split"),
        ("stream scale a/b --split 0 --merge 1,2", "use one of --split"),
        ("stream scale shop/orders --ranges 0..1", "ranges must be written like"),
        ("stream scale shop/orders --at alice --into 3", "--into needs --split"),
        ("stream scale shop/orders --merge 0,1 --into 3", "--into needs --split"),
        ("stream scale shop/orders --split x", "segments must be written like"),
        ("stream scale shop/orders --split -1", "segments must be written like"),
        ("stream scale shop/orders --at ", "--at needs a routing key"),
        ("stream scale shop/orders --at alice --at ", "--at needs a routing key"),
        ("stream truncate shop/orders nonsense", "this is not a cut; use the value of head or tail of"),
        ("stream truncate shop/orders {}", "stream in stream_cuts of 'group describe --json'"),
        ("read shop/orders", "use either --group NAME, or --from and --to"),
        ("read shop/orders --group g --limit -1", "must not be negative"),
        ("read shop/orders --group g --limit x", "valid integer"),
        ("stream configure shop/orders --retention-max-age 999999999w", "takes an age such as"),
        ("--url memory:// stream list", "a store in memory ends with the command"),
        ("stream create orders", "scope/name"),
        ("stream create shop/or!ders", "letters, digits"),
        ("stream create shop/new --segments 0", "from 1 to 10000"),
        ("stream scale shop/orders --split 7", "7"),
        ("stream scale shop/orders --split shop/other/0", "another stream"),
        ("stream scale shop/orders --merge 0", "merge"),
        ("read shop/orders --group g!", "letters, digits"),
        ("--url nonsense stream list", "not the address of a store"),
        ("doctor --timeout nan", "--timeout must be a number of seconds >= 0"),
        ("doctor --timeout -1", "--timeout must be a number of seconds >= 0"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_exit_code_2(orders: Cli, command: str, says: str) -> None:
    assert says in orders.fails(2, *command.split(" "))


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("stream info shop/nothing", "no stream of this name"),
        ("stream seal shop/nothing", "no stream of this name"),
        ("stream delete shop/nothing", "no stream of this name"),
        ("stream truncate shop/nothing tail", "no stream of this name"),
        ("write shop/nothing /dev/null", "no stream of this name"),
        ("write shop/orders /nonexistent", "No such file or directory: /nonexistent"),
        ("write shop/orders /", "Is a directory: /"),
        ("read shop/nothing --group g", "no stream of this name"),
        ("group describe nobody", "no reader group of this name"),
        ("group lag nobody", "no reader group of this name"),
        ("group delete nobody", "no reader group of this name"),
        ("watch nobody", "no reader group of this name"),
        ("--url sqlite:////nonexistent/x.db stream create a/b", "directory"),
        ("--url sqlite:////nonexistent/x.db stream list", "no SQLite file exists at this path"),
        ("demo /nonexistent", "No such file or directory: /nonexistent"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_exit_code_1(orders: Cli, command: str, says: str) -> None:
    assert says in orders.fails(1, *command.split(" "))


@pytest.mark.parametrize("timeout", ["inf", "1e12"])
def test_a_timeout_may_be_as_long_as_one_likes(orders: Cli, timeout: str) -> None:
    orders.ok("group", "create", "g", "--stream", "shop/orders")
    assert "shop/orders[0:" in orders.ok("group", "checkpoint", "g", "now", "--timeout", timeout)
    assert "the store answers" in orders.ok("doctor", "--timeout", timeout)


@pytest.mark.parametrize("kind", ["stream", "group"])
def test_nobody_is_advised_to_create_what_they_delete(orders: Cli, kind: str) -> None:
    message = orders.fails(1, kind, "delete", "shop/nothing" if kind == "stream" else "nobody", "--yes")
    assert f"'readergroup {kind} list' prints the names" in message and "create" not in message


def test_errors_name_options_and_not_arguments() -> None:
    store = FailingStore(open_store("memory://"))
    store.guarantees = replace(store.guarantees, server_side_copy=False)
    with rg.Client(store) as client:
        client.streams.create("shop/orders")
        with pytest.raises(rg.UnsupportedError) as raised:
            client.streams.copy("shop/orders", "shop/copy", by="segments")
    assert "use --by events" in one_line(str(raised.value))


def test_errors_name_commands_and_not_calls(orders: Cli) -> None:
    orders.ok("read", "shop/orders", "--group", "g")
    assert "'readergroup stream create'" in orders.fails(1, "stream", "info", "shop/nothing")
    assert "'readergroup group create'" in orders.fails(1, "group", "describe", "nobody")
    assert "'readergroup stream scale'" in orders.fails(1, "stream", "create", "shop/orders", "--segments", "7")


def test_the_command_knows_every_call_that_an_error_recommends() -> None:
    called = re.compile(r"\b(streams|groups?|client|reader|writer|pool)\.[a-z_]+")
    recommending = [
        (path, text)
        for path in Path(rg.__file__).parent.rglob("*.py")
        if not {"cli", "spark", "demo", "testing"} & set(path.parts)
        for text in _texts_of_errors(ast.parse(path.read_text()))
        if called.search(text)
    ]
    assert len(recommending) > 5
    untranslated = {path.name for path, text in recommending if called.search(one_line(text))}
    assert untranslated == {"pool.py", "sql_sink.py", "transaction.py", "testing.py"}, "no command meets these"


def _texts_of_errors(module: ast.Module) -> Iterator[str]:
    for call in ast.walk(module):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id.endswith("Error"):
            for text in call.args:
                if isinstance(text, ast.Constant):
                    yield str(text.value)


def test_only_a_misplaced_address_is_called_misplaced(orders: Cli) -> None:
    assert "belongs before the command" in orders.fails(2, "stream", "list", "--url", "sqlite:///shop.db")
    assert "belongs before the command" not in orders.fails(2, "--url")


def test_without_a_store_the_command_says_how_to_name_one() -> None:
    result = CliRunner(env={"READERGROUP_URL": ""}).invoke(app, ["stream", "list"])
    assert result.exit_code == 2
    assert "--url sqlite:///shop.db" in result.stderr and "READERGROUP_URL" in result.stderr


def test_a_file_that_is_no_store_is_refused_and_stays_as_it_is(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("these are notes\n" * 100)
    assert "not a database" in cli.fails(1, "--url", f"sqlite:///{file}", "stream", "list")
    assert file.read_text() == "these are notes\n" * 100


@pytest.mark.parametrize("command", ["stream list", "stream seal a/b", "group list", "write a/b", "read a/b --group g"])
def test_a_path_that_is_misspelt_leaves_nothing_behind(cli: Cli, tmp_path: Path, command: str) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    assert "no SQLite file" in cli.fails(1, "--url", f"sqlite:///{folder}/typo.db", *command.split(" "))
    assert list(folder.iterdir()) == []


def test_on_servers_the_first_stream_makes_the_store(cli: Cli, postgres_url: str, nats_url: str) -> None:
    for url in (postgres_url, nats_url + "&durable=always"):
        assert "use 'readergroup stream create'" in cli.fails(1, "--url", url, "stream", "list")
        cli.ok("--url", url, "stream", "create", "shop/orders")
        cli.ok("--url", url, "write", "shop/orders", input="one\n")
        assert cli.ok("--url", url, "read", "shop/orders", "--group", "g") == "one\n"


def test_how_durable_nats_is_and_what_asyncio_says_of_tls_are_no_part_of_a_commands_output(
    cli: Cli, nats_url: str
) -> None:
    cli.url = nats_url
    for command, is_told in ((("stream", "create", "shop/orders"), True), (("stream", "list"), False)):
        process = cli.process(*command)
        _, said = process.communicate(timeout=PATIENCE_SECONDS)
        assert process.returncode == 0 and ("sync_interval" in said) == is_told, said
    of_tls = logging.makeLogRecord(
        {"name": "asyncio", "msg": "returning true from eof_received() has no effect when using ssl"}
    )
    assert not _is_of_use(["stream", "create"], of_tls)
    assert _is_of_use(["stream", "list"], logging.makeLogRecord({"name": "asyncio", "msg": "a task was destroyed"}))


def test_while_the_server_is_away_commands_say_so_in_lines_and_can_be_ended(cli: Cli) -> None:
    try:
        nats_server_binary()
    except ServerUnavailable as reason:
        pytest.skip(str(reason))
    with NatsServer() as server:
        cli.url = server.url + "?durable=always&timeout_seconds=60"
        cli.ok("stream", "create", "shop/orders")
        cli.ok("read", "shop/orders", "--group", "g")
        cli.url = server.url + "?durable=always"
        watching = cli.process("watch", "g", "--json")
        reading = cli.process("read", "shop/orders", "--group", "g", "--follow")
        assert read_line(watching)
        until(lambda: bool(group_state(cli)["readers"]))
        server.kill()
        for process in (reading, watching):
            process.send_signal(signal.SIGINT)
            assert process.stderr is not None
            while "a second Ctrl-C" not in (line := process.stderr.readline()):
                assert line.startswith("readergroup: ")
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=PATIENCE_SECONDS)
            assert process.returncode == 130
            assert all(line.startswith("readergroup: ") for line in said.splitlines()), said


def test_text_of_others_can_neither_command_the_terminal_nor_be_shown_reversed() -> None:
    assert printable("a\tb\n\x1b[2J \u202egnp\u2069") == "a\tb\n\\u001b[2J \\u202egnp\\u2069"


def test_the_help_names_each_kind_of_store(cli: Cli) -> None:
    for scheme in ("sqlite:///", "postgresql://", "nats://"):
        assert scheme in cli.ok("--help")


@pytest.mark.parametrize("url", ["mysql://me:secret@host/db", "nonsense://secret@host/db?password=secret"])
def test_no_password_is_shown(cli: Cli, url: str) -> None:
    assert "secret" not in cli.fails(1, "--url", url, "stream", "list")


# ---------------------------------------------------------------------- waiting


def group_state(cli: Cli) -> dict[str, dict[str, object]]:
    result = cli("group", "describe", "g", "--json")
    found: dict[str, dict[str, object]] = json.loads(result.stdout) if result.exit_code == 0 else {"readers": {}}
    return found


def read_line(process: subprocess.Popen[str], *, saying: str = "") -> str:
    """The next line of its output that has this in it; the process is ended if there is none in time."""
    assert process.stdout is not None
    timer = threading.Timer(PATIENCE_SECONDS, process.kill)
    timer.start()
    try:
        return next((line for line in process.stdout if saying in line), "")
    finally:
        timer.cancel()


@pytest.fixture(autouse=True)
def _no_folder_of_our_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is left beside the tests' own folder."""
    monkeypatch.chdir(tmp_path)
    yield


def test_the_streams_of_a_group_are_changed(cli: Cli) -> None:
    for stream in ("shop/orders", "shop/payments"):
        cli.ok("stream", "create", stream)
    with rg.connect(cli.url) as client:
        client.groups.create("billing", streams=["shop/orders"])
    assert "--add-stream" in cli.fails(2, "group", "configure", "billing")
    added = cli.ok("group", "configure", "billing", "--add-stream", "shop/payments", "--start", "tail")
    assert added.startswith("billing: reads shop/orders, shop/payments\n")
    assert "does not read shop/x" in cli.fails(2, "group", "configure", "billing", "--remove-stream", "shop/x")
    removed = cli.ok("group", "configure", "billing", "--remove-stream", "shop/orders", "--yes")
    assert removed.startswith("billing: reads shop/payments\n")


def test_a_checkpoint_is_cancelled(cli: Cli) -> None:
    cli.ok("stream", "create", "shop/orders")
    with rg.connect(cli.url) as client:
        group = client.groups.create("billing", streams=["shop/orders"])
        group.synchronizer.update_state(lambda _: [rg.AddReader(reader="gone"), CreateCheckpoint(name="nightly")])
    assert cli.ok("group", "cancel-checkpoint", "billing", "nightly") == "billing: nightly was cancelled\n"
    assert cli.ok("group", "cancel-checkpoint", "billing", "nightly") == "billing: nightly is not outstanding\n"
    again = cli.json("group", "cancel-checkpoint", "billing", "nightly")
    assert again == {"group": "billing", "checkpoint": "nightly", "cancelled": False}
