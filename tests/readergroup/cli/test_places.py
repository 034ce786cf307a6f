"""``readergroup peek``, and ``readergroup read`` between two places: they move no group."""

from __future__ import annotations

import json
import signal
from math import inf
from pathlib import Path

import pytest

import readergroup as rg
from readergroup.cli.places import batches_from
from synchronizer import open_store
from synchronizer.testing import FailingStore
from tests.readergroup.cli.test_commands import Cli, read_line
from tests.waiting import PATIENCE_SECONDS


@pytest.fixture
def orders(tmp_path: Path) -> Cli:
    """A stream of two segments with 500 events, and its tail after the first 400 of them in a file."""
    cli = Cli(tmp_path)
    cli.ok("stream", "create", "shop/orders", "--segments", "2")
    with rg.connect(cli.url) as client:
        for first, last in ((0, 400), (400, 500)):
            with client.writer("shop/orders") as writer:
                for number in range(first, last):
                    writer.write(b"%d" % number, f"key-{number % 5}")
            if first == 0:
                (tmp_path / "cut").write_text(str(client.streams.info("shop/orders").tail))
        client.groups.create("billing", streams=["shop/orders"])
    return cli


def test_events_between_two_places_are_read_without_a_group(orders: Cli, tmp_path: Path) -> None:
    cut = (tmp_path / "cut").read_text()
    everything = [int(line) for line in orders.ok("read", "shop/orders", "--from", "head").split()]
    assert sorted(everything) == list(range(500))
    for key in range(5):
        assert [each for each in everything if each % 5 == key] == list(range(key, 500, 5))
    before = orders.ok("read", "shop/orders", "--to", cut).split()
    after = orders.ok("read", "shop/orders", "--from", cut, "--to", "tail").split()
    assert sorted(map(int, before)) == list(range(400)) and sorted(map(int, after)) == list(range(400, 500))
    assert orders.ok("read", "shop/orders", "--from", "tail") == ""
    assert orders.ok("read", "shop/orders", "--from", "1h").count("\n") == 500
    assert orders.ok("read", "shop/orders", "--from", "head", "--limit", "7").count("\n") == 7
    whole = json.loads(orders.ok("stream", "info", "shop/orders", "--json"))
    assert orders.ok("read", "shop/orders", "--from", "-", input=json.dumps(whole["tail"])) == ""
    assert json.loads(orders.ok("group", "lag", "billing", "--json"))["events"] == 500


def test_events_are_read_across_a_scale_in_the_order_of_their_keys(orders: Cli) -> None:
    with rg.connect(orders.url) as client:
        client.streams.scale("shop/orders", split=[0])
        with client.writer("shop/orders") as writer:
            for number in range(500, 600):
                writer.write(b"%d" % number, f"key-{number % 5}")
    everything = [int(line) for line in orders.ok("read", "shop/orders", "--from", "head").split()]
    for key in range(5):
        assert [each for each in everything if each % 5 == key] == list(range(key, 600, 5))


def test_following_without_a_group_goes_on_where_it_was_after_the_store_was_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = FailingStore(open_store("memory://"))
    said: list[str] = []

    def warn(message: str) -> None:
        said.append(message)
        store.unavailable = False

    monkeypatch.setattr("readergroup.cli.places.warn", warn)
    with rg.Client(store, timeout=0.1) as client:
        start = client.streams.create("shop/orders").tail
        with client.writer("shop/orders", timeout=PATIENCE_SECONDS) as writer:
            writer.write(b"before")
        batches = batches_from(client, "shop/orders", start, most=inf)
        assert [event.data for event in next(batches)] == [b"before"]
        with client.writer("shop/orders", timeout=PATIENCE_SECONDS) as writer:
            writer.write(b"after")
        client.streams.seal("shop/orders")
        store.unavailable = True
        assert [event.data for batch in batches for event in batch] == [b"after"]
    (message,) = said
    assert "waits for the store" in message


def test_following_without_a_group_hears_what_is_written_later(orders: Cli) -> None:
    process = orders.process("read", "shop/orders", "--from", (orders.folder / "cut").read_text(), "--follow")
    assert sorted(int(read_line(process)) for _ in range(100)) == [*range(400, 500)]
    orders.ok("stream", "scale", "shop/orders", "--split", "0")
    orders.ok("write", "shop/orders", input="500\n501\n")
    assert {read_line(process), read_line(process)} == {"500\n", "501\n"}
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=PATIENCE_SECONDS)[0] == ""
    assert process.returncode == 0


def test_following_without_a_group_ends_at_the_limit_and_at_the_end_of_the_data(orders: Cli) -> None:
    cut = (orders.folder / "cut").read_text()
    limited = orders.process("read", "shop/orders", "--from", cut, "--follow", "--limit", "101")
    whole = orders.process("read", "shop/orders", "--from", cut, "--follow")
    for process in (limited, whole):
        assert len([read_line(process) for _ in range(100)]) == 100
    orders.ok("write", "shop/orders", input="500\n")
    assert limited.communicate(timeout=PATIENCE_SECONDS)[0] == "500\n"
    assert read_line(whole) == "500\n"
    orders.ok("stream", "seal", "shop/orders", "--yes")
    assert whole.communicate(timeout=PATIENCE_SECONDS)[0] == ""
    assert (limited.returncode, whole.returncode) == (0, 0)


def test_the_newest_events_are_shown(orders: Cli) -> None:
    shown = orders.ok("peek", "shop/orders")
    assert shown.count("\n") == 12 and "key-4" in shown
    newest = [
        json.loads(line)["data"] for line in orders.ok("peek", "shop/orders", "--limit", "20", "--json").splitlines()
    ]
    assert len(newest) == 20 and min(map(int, newest)) >= 400
    first = [
        json.loads(line)["data"] for line in orders.ok("peek", "shop/orders", "--from", "head", "--json").splitlines()
    ]
    assert len(first) == 10 and max(map(int, first)) < 100
    with rg.connect(orders.url) as client, client.writer("shop/orders") as writer:
        writer.write(b"\xff" * 100_000)
        writer.write(b"x" * 100_000)
    shown = orders.ok("peek", "shop/orders", "--limit", "500")
    assert "100,000 bytes: ff ff" in shown and len(shown) < 100_000 and shown.count("\n") >= 502
    orders.ok("stream", "create", "shop/empty")
    assert orders.ok("peek", "shop/empty") == "shop/empty: no events\n"


def test_wrong_places_are_refused(orders: Cli) -> None:
    assert "--group NAME" in orders.fails(2, "read", "shop/orders")
    assert "--group NAME" in orders.fails(2, "read", "shop/orders", "--group", "g", "--from", "head")
    for option in ("--from", "--to"):  # as of a variable of the shell that is not set
        assert option in orders.fails(2, "read", "shop/orders", option, "")
    assert "leave --to out" in orders.fails(2, "read", "shop/orders", "--to", "tail", "--follow")
    assert "needs --group" in orders.fails(2, "read", "shop/orders", "--from", "head", "--reader", "me")
    told = orders.fails(2, "read", "shop/orders", "--from", "noon")
    assert "such as 2h" in told and "or use head, tail or a cut, such as" in told
    assert "timezone" in orders.fails(2, "read", "shop/orders", "--from", "2026-11-25")
    assert "not a cut" in orders.fails(2, "peek", "shop/orders", "--from", "{")
    assert "a cut of shop/other" in orders.fails(2, "peek", "shop/orders", "--from", "shop/other[0:0]")
    assert "stream create" in orders.fails(1, "peek", "shop/typo")
    assert "offset=1" in orders.fails(2, "peek", "shop/orders", "--from", "shop/orders[0:1, 1:0]")
