"""``readergroup state`` shows shared states and their history, and compacts their logs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import readergroup as rg
from tests.readergroup.cli.test_commands import Cli


class Visits(rg.State):
    value: int = 0
    pages: tuple[bytes, ...] = ()


class Visit(rg.Update[Visits], tag="visit"):
    page: bytes

    def apply_to(self, state: Visits, revision: rg.Revision) -> Visits:
        return state.replace(value=state.value + 1, pages=(*state.pages, self.page))


OWN = f"{__name__}:Visits"


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    cli = Cli(tmp_path)
    cli.ok("stream", "create", "shop/orders")
    with rg.connect(cli.url) as client:
        client.groups.create("billing", streams=["shop/orders"])
        client.shared_map("prices", float).put("tea", 1.5)
        client.counter("n").add(3)
        visits = client.synchronizer("visits", initial=Visits(), updates=[Visit])
        for number in range(30):
            visits.update_state(lambda state: [Visit(page=b"%d" % number)])  # noqa: B023
        with client.lock("nightly"):
            pass
    return cli


def test_states_are_listed(cli: Cli) -> None:
    shown = cli.ok("state", "list")
    for name in ("counter/n", "group/billing", "lock/nightly", "map/prices", "state/visits", "stream/shop/orders"):
        assert name in shown
    assert json.loads(cli.ok("state", "list", "map", "--json"))[0]["name"] == "map/prices"
    assert cli.ok("state", "list", "x") == "No shared state matches.\n"


@pytest.mark.parametrize("name", ["counter/n", "group/billing", "lock/nightly", "map/prices", "stream/shop/orders"])
def test_a_state_of_the_library_is_shown_and_compacted(cli: Cli, name: str) -> None:
    shown = json.loads(cli.ok("state", "show", name, "--json"))
    updates = [json.loads(line) for line in cli.ok("state", "history", name, "--json").splitlines()]
    assert updates[-1]["revision"] == shown["revision"] and updates[0]["update"] == "(initial state)"
    assert f"{name}: " in cli.ok("state", "show", name)
    assert "compacted" in cli.ok("state", "compact", name)
    assert cli.ok("state", "compact", name) == f"{name}: nothing to compact\n"
    assert json.loads(cli.ok("state", "show", name, "--json")) == shown


def test_values_are_shown_in_words(cli: Cli) -> None:
    assert 'entries: {"tea": 1.5}' in cli.ok("state", "show", "map/prices")
    assert 'key="tea", value=1.5' in cli.ok("state", "history", "map/prices")
    assert "amount=3" in cli.ok("state", "history", "counter/n")


def test_a_value_that_is_nested_deeply_is_shown_as_far_as_it_can_be(cli: Cli) -> None:
    with rg.connect(cli.url) as client:
        deep: list[Any] = []
        stored = 0
        for depth in range(1, 1200):
            deep = [deep]
            if depth % 50 == 0:
                try:
                    client.shared_map("deep", list[Any])[str(depth)] = deep
                    stored = depth
                except rg.InvalidArgumentError:
                    assert depth > 300
    assert stored >= 300
    assert "..." in cli.ok("state", "show", "map/deep", "--json")
    assert "[[[[" in cli.ok("state", "history", "map/deep")


def test_a_state_of_an_application_is_raw_without_its_class(cli: Cli) -> None:
    raw = json.loads(cli.ok("state", "show", "state/visits", "--json"))
    assert raw["fields"]["value"] == 0 and raw["entries_since"] == 30
    whole = json.loads(cli.ok("state", "show", "state/visits", "--type", OWN, "--json"))
    assert whole["state"]["value"] == 30 and whole["state"]["pages"][29] == "29"
    assert "--type" in cli.fails(2, "state", "compact", "state/visits")
    cli.ok("state", "compact", "state/visits", "--type", OWN)
    assert "value: 30" in cli.ok("state", "show", "state/visits")


def test_the_history_is_bounded_and_continues_after_a_compaction(cli: Cli) -> None:
    shown = cli.ok("state", "history", "state/visits", "--limit", "2")
    assert 'page="29"' in shown and 'page="27"' not in shown and "29 earlier updates" in shown
    cli.ok("state", "compact", "state/visits", "--type", OWN)
    with rg.connect(cli.url) as client:
        visits = client.synchronizer("visits", initial=Visits(), updates=[Visit])
        visits.update_state(lambda state: [Visit(page=b"\xff")])
        visits.compact()
        visits.update_state(lambda state: [Visit(page=b"last")])
    lines = [json.loads(line) for line in cli.ok("state", "history", "state/visits", "--json").splitlines()]
    assert [line["fields"]["page"] for line in lines] == ["/w==", "last"]


def test_wrong_names_and_classes_are_refused(cli: Cli) -> None:
    assert "state list" in cli.fails(2, "state", "show", "visits")
    assert "state list" in cli.fails(2, "state", "history", "data/shop/orders/0")
    for command in (["show"], ["history"], ["compact"]):
        assert "there is no state map/typo" in cli.fails(1, "state", *command, "map/typo")
    assert "no state" in cli.fails(1, "state", "show", "state/typo")
    assert "MODULE:CLASS" in cli.fails(2, "state", "show", "state/visits", "--type", "nowhere:Visits")
    assert "rg.State" in cli.fails(2, "state", "show", "state/visits", "--type", f"{__name__}:Visit")
    assert cli.ok("state", "list", "map") == cli.ok("state", "list", "map")  # nothing was created
    assert "typo" not in cli.ok("state", "list")
