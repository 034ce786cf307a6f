"""Retention policies on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

import readergroup as rg
from tests.readergroup.cli.test_commands import Cli


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    return Cli(tmp_path)


def write(cli: Cli, events: int) -> None:
    with rg.connect(cli.url) as client, client.writer("shop/orders") as writer:
        for number in range(events):
            writer.write(b"x" * 1000)
            if number % 10 == 0:
                writer.flush()


def test_a_policy_is_set_shown_applied_and_removed(cli: Cli) -> None:
    cli.ok("stream", "create", "shop/orders", "--retention-max-age", "7d", "--retention-max-bytes", "50kB")
    write(cli, 100)
    info = cli.ok("stream", "info", "shop/orders")
    assert "deletes events older than 7 days, the oldest events beyond 50.0 kB" in info.replace("\n", " ")
    cli.ok("stream", "retain")
    report = cli.json("stream", "retain", "shop/orders", "--dry-run")
    assert isinstance(report, list) and report[0]["kept_bytes"] <= 50_000 and report[0]["reason"] is None
    assert "nothing to delete" in cli.ok("stream", "retain", "--dry-run")
    found = cli.json("stream", "configure", "shop/orders", "--retention-max-bytes", "1GiB")
    assert isinstance(found, dict) and found["config"]["retention"]["max_bytes"] == 2**30
    said = cli.ok("stream", "configure", "shop/orders", "--no-retention")
    assert said.startswith("shop/orders: keeps all events\nA program that calls streams.create with another config")
    assert cli.ok("stream", "retain") == "No stream has a retention policy.\n"
    assert "no retention policy" in cli.fails(2, "stream", "retain", "shop/orders")


def test_what_would_be_deleted_is_shown_with_the_groups_that_need_it(cli: Cli) -> None:
    options = ("--retention-consumed-by", "subscribers", "--retention-max-bytes", "50kB", "--retention-min-age", "1h")
    cli.ok("stream", "create", "shop/orders", *options)
    with rg.connect(cli.url) as client:
        client.groups.create("billing", streams=["shop/orders"], retention="AT_LAST_COMMIT")
    with rg.connect(cli.url) as client, client.writer("shop/orders") as writer:
        for _ in range(30):
            writer.write(b"x" * 1000)
    info = cli.ok("stream", "info", "shop/orders")
    assert "keeps consumed events younger than 1 hours" not in info
    assert "keeps consumed events younger than 60 minutes" in info.replace("\n", " ")
    assert "the most for billing" in info
    assert "retention=AT_LAST_COMMIT" in cli.ok("group", "describe", "billing").replace("\n", " ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--retention-max-age", "7"), "takes an age such as"),
        (("--retention-max-age", "-7d"), "takes an age such as"),
        (("--retention-max-age", "nand"), "takes an age such as"),
        (("--retention-max-bytes", "1ZB"), "takes a size such as"),
        (("--retention-consumed-by", "all"), "takes 'subscribers'"),
        ((), "--no-retention"),
        (("--no-retention", "--retention-max-age", "7d"), "--no-retention"),
    ],
)
def test_wrong_options_are_refused(cli: Cli, options: tuple[str, ...], message: str) -> None:
    cli.ok("stream", "create", "shop/orders")
    assert message in cli.fails(2, "stream", "configure", "shop/orders", *options)


def test_policies_that_contradict_themselves_are_refused(cli: Cli) -> None:
    cli.ok("stream", "create", "shop/orders")
    for options in (("--retention-max-bytes", "0"), ("--retention-min-age", "1d"), ("--retention-max-age", "0s")):
        said = cli.fails(2, "stream", "configure", "shop/orders", *options)
        assert "RetentionPolicy is invalid" in said
        assert ("they need --retention-consumed-by subscribers" in said) is ("--retention-min-age" in options)
