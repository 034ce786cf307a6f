"""Scaling policies on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.readergroup.cli.test_commands import Cli


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    return Cli(tmp_path)


def test_a_stream_that_scales_by_itself_is_created_shown_and_configured(cli: Cli) -> None:
    options = ("--scale-events", "1000", "--segments", "2", "--max-segments", "8")
    assert "2 segments (0, 1)" in cli.ok("stream", "create", "shop/orders", *options)
    info = cli.ok("stream", "info", "shop/orders").replace("\n", " ")
    assert "2 to 8 segments, each for about 1,000 events/s" in info
    assert "Next: nothing: the rates are not measured yet" in info and "20 min" in info
    found = cli.json("stream", "info", "shop/orders")
    assert isinstance(found, dict) and found["scaling"]["rates"]["shop/orders/0"] == [None] * 4
    changed = cli.ok("stream", "configure", "shop/orders", "--scale-bytes", "1MB", "--retention-max-age", "7d")
    assert changed.splitlines()[:-1] == [
        "shop/orders: 1 to 16 segments, each for about 1.0 MB/s",
        "shop/orders: deletes events older than 7 days",
    ]
    said, others = cli.ok("stream", "configure", "shop/orders", "--no-scaling").splitlines()
    assert said == "shop/orders: keeps its 2 segments; from now on only 'stream scale' changes their number"
    assert "calls streams.create with another config" in others
    found = cli.json("stream", "info", "shop/orders")
    assert isinstance(found, dict) and found["config"]["scaling"] == {"kind": "fixed", "segments": 2} | dict.fromkeys(
        ("target", "max_segments", "scale_factor", "window_seconds")
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--scale-events", "5", "--scale-bytes", "5"), "either --scale-events or --scale-bytes"),
        (("--max-segments", "5"), "needs --scale-events or --scale-bytes"),
        (("--scale-bytes", "much"), "--scale-bytes takes a size"),
    ],
)
def test_wrong_options_say_what_is_right(cli: Cli, options: tuple[str, ...], message: str) -> None:
    for command in ("create", "configure"):
        assert message in cli.fails(2, "stream", command, "shop/orders", *options)


def test_a_configuration_needs_an_option(cli: Cli) -> None:
    cli.ok("stream", "create", "shop/orders")
    assert "use options such as" in cli.fails(2, "stream", "configure", "shop/orders")
    message = cli.fails(2, "stream", "configure", "shop/orders", "--segments", "5")
    assert "least number for --scale-events" in message and "'readergroup stream scale'" in message


def test_a_stream_of_other_segments_is_scaled_and_then_configured(cli: Cli) -> None:
    cli.ok("stream", "create", "shop/orders", "--segments", "2")
    message = cli.fails(1, "stream", "create", "shop/orders", "--segments", "4")
    assert "the stream has 2 segments" in message and "'readergroup stream scale'" in message
    assert "then run 'readergroup stream configure --no-scaling'" in message and "None" not in message
    cli.ok("stream", "scale", "shop/orders", "--split", "0,1")
    cli.ok("stream", "configure", "shop/orders", "--no-scaling")
    assert "4 segments" in cli.ok("stream", "create", "shop/orders", "--segments", "4")
