"""``readergroup group create``, ``configure`` and ``remove-reader``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import readergroup as rg
from readergroup.group.model.updates import RecordWeights
from tests.readergroup.cli.test_commands import Cli


@pytest.fixture
def orders(tmp_path: Path) -> Cli:
    """A store with a stream of two segments."""
    cli = Cli(tmp_path)
    cli.ok("stream", "create", "shop/orders", "--segments", "2")
    return cli


def test_a_group_is_created_with_settings_and_configured(orders: Cli) -> None:
    shown = orders.ok("group", "create", "billing", "--stream", "shop/orders", "max_processing_seconds=none")
    assert "billing: reads shop/orders" in shown and "max_processing_seconds=none" in shown
    orders.ok("group", "create", "billing", "--stream", "shop/orders", "max_processing_seconds=none")
    told = orders.fails(1, "group", "create", "billing", "--stream", "shop/orders")
    assert "'readergroup group configure'" in told and "'readergroup group delete'" in told
    found = json.loads(
        orders.ok("group", "configure", "billing", "reader_timeout_seconds=5", "retention=MANUAL", "--json")
    )
    assert found["config"]["reader_timeout_seconds"] == 5 and found["config"]["retention"] == "MANUAL"
    assert "max_processing_seconds=none" in orders.ok("group", "describe", "billing")
    fields = rg.ReaderGroupConfig.model_fields.keys() - {"streams", "start", "end"}
    orders.ok("group", "create", "other", "--stream", "shop/orders")
    shown = orders.ok("group", "describe", "other")
    assert [field for field in fields if f"{field}=" not in shown] == []


def test_a_group_balances_by_load_and_shows_the_loads(orders: Cli) -> None:
    orders.ok("group", "create", "billing", "--stream", "shop/orders")
    assert "load" not in orders.ok("group", "describe", "billing")
    assert "balance=load" in orders.ok("group", "configure", "billing", "balance=load")
    with rg.connect(orders.url) as client:
        group = client.groups.get("billing")
        heavy = min(group.state.segments)
        group.synchronizer.update_state_unconditionally(RecordWeights(weights={heavy: 12}))
    shown = orders.ok("group", "describe", "billing")
    assert "balance=load" in shown and "4,096" in shown
    assert json.loads(orders.ok("group", "describe", "billing", "--json"))["segments"][heavy]["load"] == 4096
    orders.ok("group", "configure", "billing", "balance=count")
    assert "4,096" not in orders.ok("group", "describe", "billing"), "the weights go with the setting"
    assert "balance" in orders.fails(2, "group", "configure", "billing", "balance=weight")


def test_a_group_starts_where_it_is_told(orders: Cli) -> None:
    for start in ("tail", "2h", "2026-11-22T09:00+00:00"):
        found = json.loads(
            orders.ok("group", "create", f"from-{start[:2]}", "--stream", "shop/orders", "--start", start, "--json")
        )
        assert found["config"]["start"]["shop/orders"]
    told = orders.fails(2, "group", "create", "x", "--stream", "shop/orders", "--start", "noon")
    assert "such as 2h" in told and "or use head or tail" in told


def test_a_wrong_setting_is_refused(orders: Cli) -> None:
    assert "--stream" in orders.fails(2, "group", "create", "billing")
    assert "'readergroup stream create'" in orders.fails(1, "group", "create", "billing", "--stream", "shop/typo")
    orders.ok("group", "create", "billing", "--stream", "shop/orders")
    assert "FIELD=VALUE" in orders.fails(2, "group", "configure", "billing", "retention")
    assert "'timeout' is no field" in orders.fails(2, "group", "configure", "billing", "timeout=5")
    assert "mean 'reader_timeout_seconds'?" in orders.fails(2, "group", "configure", "billing", "reader_timeout=5")
    assert "'streams' is no field" in orders.fails(2, "group", "configure", "billing", "streams=x")
    assert "greater than 0" in orders.fails(2, "group", "configure", "billing", "reader_timeout_seconds=-1")
    assert "'readergroup group create'" in orders.fails(1, "group", "configure", "typo", "retention=MANUAL")


def test_a_reader_is_removed(orders: Cli) -> None:
    with rg.connect(orders.url) as client:
        group = client.groups.create("billing", streams=["shop/orders"])
        reader = group.reader("r1")
        reader.read(timeout=0)
        assert "--yes" in orders.fails(2, "group", "remove-reader", "billing", "r1")
        assert "its readers: r1" in orders.fails(1, "group", "remove-reader", "billing", "r2", "--yes")
        assert orders.ok("group", "remove-reader", "billing", "r1", "--yes") == "billing: r1 removed\n"
    assert "has no reader 'r1'" in orders.fails(1, "group", "remove-reader", "billing", "r1", "--yes", "--json")


def test_what_commands_did_is_told_as_json(orders: Cli, tmp_path: Path) -> None:
    orders.ok("group", "create", "billing", "--stream", "shop/orders")
    found = json.loads(orders.ok("group", "reset", "billing", "--to", "tail", "--yes", "--json"))
    assert found["group"] == "billing" and found["stream_cuts"]["shop/orders"]["offsets"]
    exported = json.loads(orders.ok("stream", "export", "shop/orders", f"{tmp_path}/x.jsonl", "--json"))
    assert exported == {"stream": "shop/orders", "events": 0, "file": f"{tmp_path}/x.jsonl"}
    assert all(each["is_fine"] for each in json.loads(orders.ok("doctor", "--json")))
    assert json.loads(orders.ok("group", "delete", "billing", "--yes", "--json")) == {
        "group": "billing",
        "deleted": True,
    }
    assert json.loads(orders.ok("stream", "delete", "shop/orders", "--yes", "--json"))["deleted"] is True


def test_fields_and_streams_are_changed_together(orders: Cli) -> None:
    orders.ok("stream", "create", "shop/payments")
    orders.ok("group", "create", "billing", "--stream", "shop/orders")
    shown = orders.ok("group", "configure", "billing", "position_interval_seconds=2", "--add-stream", "shop/payments")
    assert "shop/orders, shop/payments" in shown and "position_interval_seconds=2" in shown
    told = orders.fails(2, "group", "configure", "billing", "--add-stream", "shop/x", "--start", "noon")
    assert "such as 2h" in told
