"""``readergroup group notifications``."""

from __future__ import annotations

import json
import signal
from datetime import UTC, datetime
from pathlib import Path

import pytest

import readergroup as rg
from synchronizer import open_store
from synchronizer.testing import FailingStore
from synchronizer.testing.failing_store import Operation
from tests.readergroup.cli.test_commands import PATIENCE_SECONDS, Cli

STREAM = "shop/orders"


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    cli = Cli(tmp_path)
    with rg.connect(cli.url) as client:
        client.streams.create(STREAM, scaling=rg.ScalingPolicy.fixed(2))
        client.groups.create("billing", streams=[STREAM])
    return cli


def record(cli: Cli) -> None:
    """A scale, and a reader that joined and died."""
    with rg.connect(cli.url) as client:
        group = client.groups.get("billing")
        with group.record_notifications(lag_interval_seconds=None) as handle:
            handle.poll()
            client.streams.scale(STREAM, split=[0])
            handle.poll()
            group.synchronizer.update_state_unconditionally(rg.AddReader(reader="r1"))
            group.synchronizer.update_state_unconditionally(rg.RemoveReader(reader="r1", cause="dead"))


def test_each_notification_is_a_line_with_its_time_and_revision(cli: Cli) -> None:
    record(cli)
    lines = [line.split(maxsplit=2) for line in cli.ok("group", "notifications", "billing").splitlines()]
    assert [what.rstrip() for _, _, what in lines] == [
        "segments: 2 to read (shop/orders/0, shop/orders/1)",
        "readers: 0 in the group",
        "segments: 3 to read (shop/orders/1, shop/orders/2, shop/orders/3)",
        "readers: r1 joined, 1 in the group",
        "readers: r1 was declared dead, 0 in the group",
    ]
    with open_store(cli.url) as store:
        assert lines[0][1] == f"{store.info('group/billing').start_offset}:0"
    assert all(rg.Revision.parse(revision) for _, revision, _ in lines)
    assert all(datetime.fromisoformat(time).tzinfo == UTC for time, _, _ in lines)


def test_from_a_revision_on_as_json(cli: Cli) -> None:
    record(cli)
    everything = cli.ok("group", "notifications", "billing", "--json").splitlines()
    found = [json.loads(line) for line in everything]
    assert found[2]["type"] == "SegmentNotification" and found[2]["change"]["cause"] == "add_epoch"
    revision = found[2]["change"]["revision"]
    start = f"{revision['offset']}:{revision['index']}"
    assert cli.ok("group", "notifications", "billing", "--json", "--from", start).splitlines() == everything[2:]
    assert "offset:index" in cli.fails(2, "group", "notifications", "billing", "--from", "yesterday")


def test_a_group_of_which_nothing_is_recorded_says_so(cli: Cli) -> None:
    assert cli.ok("group", "notifications", "billing").startswith("Nothing is recorded for billing.")
    assert cli.ok("group", "notifications", "billing", "--json") == ""
    assert "no reader group" in cli.fails(1, "group", "notifications", "nobody")


def test_it_stays_within_80_columns(cli: Cli) -> None:
    record(cli)
    exit_code, shown = cli.on_terminal("group", "notifications", "billing")
    lines = shown.replace("\r", "").splitlines()
    assert exit_code == 0
    assert max(map(len, lines)) <= 80
    assert len(lines) > 5  # the longest is folded
    assert "shop/orders/3)" in shown


def test_it_follows_what_is_recorded_until_it_is_interrupted(cli: Cli) -> None:
    record(cli)
    process = cli.process("group", "notifications", "billing", "--follow", "--json")
    try:
        assert process.stdout is not None
        for _ in range(5):
            process.stdout.readline()
        with rg.connect(cli.url) as client:
            with client.groups.get("billing").record_notifications(lag_interval_seconds=None) as handle:
                client.streams.scale(STREAM, split=[1])
                handle.poll()
        assert json.loads(process.stdout.readline())["number_of_segments"] == 4
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_SECONDS) == 0
    finally:
        process.kill()
        process.communicate()


def test_it_follows_on_where_it_was_after_the_store_was_away(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    record(cli)
    store = FailingStore(open_store(cli.url))
    failures: list[Operation] = []
    waits_after_the_outage: list[Operation] = []

    def before(operation: Operation) -> None:
        if operation.verb == "wait" and not failures:
            with rg.connect(cli.url) as client:
                client.groups.get("billing").synchronizer.update_state_unconditionally(rg.AddReader(reader="r2"))
                client.groups.get("billing").record_notifications(lag_interval_seconds=None).close()
        reads_record = operation.verb == "read" and operation.segment.startswith("record/")
        if reads_record and store.count("wait") and len(failures) < 3:
            failures.append(operation)
            raise rg.StoreUnavailableError("no answer")
        if operation.verb == "wait" and len(failures) == 3:
            waits_after_the_outage.append(operation)
            if len(waits_after_the_outage) == 2:
                signal.raise_signal(signal.SIGINT)

    store.before = before
    monkeypatch.setattr("readergroup.cli.session.open_store", lambda *_, **__: store)
    followed = cli.ok("group", "notifications", "billing", "--follow", "--json").splitlines()
    assert len(failures) == 3
    assert caplog.text.count("waits for the store") == 1
    monkeypatch.undo()
    assert followed == cli.ok("group", "notifications", "billing", "--json").splitlines()
    assert json.loads(followed[-1])["joined"] == ["r2"]


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_following_a_group_of_which_nothing_is_recorded_says_so_and_waits(cli: Cli, options: tuple[str, ...]) -> None:
    process = cli.process("group", "notifications", "billing", "--follow", *options)
    try:
        assert process.stdout is not None and process.stderr is not None
        assert process.stderr.readline().startswith("readergroup: Nothing is recorded for billing. A process records")
        record(cli)
        lines = [process.stdout.readline() for _ in range(5)]
        assert "r1" in lines[-1]
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=PATIENCE_SECONDS) == ("", "")
        assert process.returncode == 0
    finally:
        process.kill()
        process.communicate()
