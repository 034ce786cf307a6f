"""The demo of a day of load: its curve, its check, and a short day."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from readergroup.demo.day import Day, Moment
from readergroup.demo.load_picture import draw
from readergroup.demo.on_load import _Handled, run_day
from readergroup.testing import make_event
from synchronizer import SystemClock
from tests.command import app


def test_a_day_rises_to_its_peak_and_falls_to_its_night() -> None:
    day = Day()
    times = [step / 10 for step in range(round(day.end_at * 10))]
    loads = [day.load(at) for at in times]
    assert loads[0] == day.morning and max(loads) == day.peak == day.load(day.noon_at)
    assert all(day.load(at) == pytest.approx(day.night) for at in times if at >= day.night_at)
    assert max(abs(a - b) for a, b in zip(loads, loads[1:], strict=False)) < day.peak / 40
    assert 50 <= day.end_at <= 70


@pytest.mark.parametrize(
    ("read", "differences"),
    [
        (["a 0", "b 0", "a 1"], []),
        (["a 0", "a 1", "a 0", "b 0"], []),
        (["a 1", "a 0", "b 0"], ["a: event 1 was read before event 0"]),
        (["a 0", "b 0"], ["a: 1 events were not read"]),
    ],
    ids=["right", "repeated", "out of order", "missing"],
)
def test_the_check_finds_what_is_wrong(read: list[str], differences: list[str]) -> None:
    handled = _Handled(SystemClock())
    for each in read:
        handled.handle(make_event(each.encode()))
    assert handled.compare(Counter({"a": 2, "b": 1})) == differences


def test_a_short_day_scales_a_stream_and_its_readers(tmp_path: Path) -> None:
    day = Day(peak=4.0, rise_seconds=1.0, noon_seconds=1.0, fall_seconds=0.5, night_seconds=0.5)
    result = run_day(tmp_path, Console(quiet=True), day, most=2, least=2)
    assert result.differences == [] and result.written > 300
    assert result.segments == [1, 2] and 1 <= result.most_readers <= 2


def test_a_day_is_drawn(tmp_path: Path) -> None:
    moments = [Moment(at / 2, 100.0, 10 * at, 9 * at, 1 + at // 10, 1, 0.5) for at in range(30)]
    draw(moments, [(5.0, 2), (10.0, 3)], 100.0, tmp_path / "day.png")
    assert (tmp_path / "day.png").read_bytes().startswith(b"\x89PNG")


def test_a_day_takes_no_files() -> None:
    result = CliRunner().invoke(app, ["demo", "--autoscale", "--spark"])
    assert result.exit_code == 2
