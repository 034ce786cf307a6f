"""A ratio that became much worse than the stored one is marked."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

import benchmarks.__main__ as command
from benchmarks.figure import Figure, Result, Skipped
from benchmarks.report import Measured, compared, run_of
from benchmarks.results import STORED, Run, load, save
from benchmarks.stores import Store


def ratio(value: float, **fields: object) -> Figure:
    return Figure(what="speed", value=value, unit="×", **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("stored", "measured", "fell"),
    [
        (ratio(10), ratio(8.4), True),
        (ratio(10), ratio(8.6), False),
        (ratio(10), ratio(30), False),
        (ratio(10, better="less"), ratio(11.9, better="less"), True),
        (ratio(10, better="less"), ratio(11.7, better="less"), False),
        (ratio(10, better="less"), ratio(2, better="less"), False),
        (ratio(10, one_run=False), ratio(1, one_run=False), False),
    ],
)
def test_a_ratio_falls_if_it_is_worse_by_more_than_15_percent(stored: Figure, measured: Figure, fell: bool) -> None:
    assert measured.has_fallen_from(stored) is fell


def test_a_rate_depends_on_the_machine_and_does_not_fall() -> None:
    rates = [Figure(what="speed", value=value, unit="events/s") for value in (10, 1)]
    assert not rates[1].has_fallen_from(rates[0])


def test_a_row_is_compared_with_the_same_row_of_the_same_benchmark_and_store() -> None:
    def stored(store: str, benchmark: str) -> Run:
        return Run(store=store, title="", commit="", date="", machine={}, figures={benchmark: [ratio(10)]})

    now = [Measured("SQLite", "iterate", ratio(1))]
    assert [each.fell_from for each in compared("sqlite", now, [stored("sqlite", "iterate")])] == [ratio(10)]
    assert [each.fell_from for each in compared("nats", now, [stored("sqlite", "iterate")])] == [None]
    assert [each.fell_from for each in compared("sqlite", now, [stored("sqlite", "write")])] == [None]


def test_a_benchmark_that_failed_halfway_stores_no_figures() -> None:
    results = [
        Measured("SQLite", "write", ratio(1)),
        Measured("SQLite", "write", Skipped("not measured", "it broke", failed=True)),
        Measured("SQLite", "iterate", ratio(2)),
        Measured("SQLite", "iterate", Skipped("Valkey", "not installed")),
    ]
    assert run_of("sqlite", results).figures == {"iterate": [ratio(2)]}


@pytest.mark.parametrize(("stored", "says"), [(10.0, True), (2.0, False)])
def test_the_command_fails_for_a_ratio_that_fell_only_when_asked(
    stored: float, says: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def measure(store: Store) -> Iterator[Result]:
        yield ratio(2)

    before = Run(store="sqlite", title="", commit="", date="", machine={}, figures={"iterate": [ratio(stored)]})
    save(tmp_path / "stored.json", [before])
    monkeypatch.setattr(command, "STORED", tmp_path / "stored.json")
    monkeypatch.setattr(command, "BENCHMARKS", {"iterate": measure})
    app = command.typer.Typer()
    app.command()(command.main)
    arguments = ["iterate", "--store", "sqlite", "--json", str(tmp_path / "new" / "run.json")]
    done = CliRunner().invoke(app, arguments)
    assert (done.exit_code, "fell from 10 ×" in done.output) == (0, says), done.output
    assert CliRunner().invoke(app, [*arguments, "--check"]).exit_code == int(says)
    (written,) = json.loads((tmp_path / "new" / "run.json").read_text())
    assert written["figures"]["iterate"][0]["value"] == 2


@pytest.mark.parametrize("store", ["sqlite", "nats"])
def test_a_benchmark_that_yields_nothing_fails_if_figures_of_it_are_stored(
    store: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def measure(store: Store) -> Iterator[Result]:
        yield from ()

    before = Run(store=store, title="", commit="", date="", machine={}, figures={"iterate": [ratio(2)]})
    save(tmp_path / "stored.json", [before])
    monkeypatch.setattr(command, "STORED", tmp_path / "stored.json")
    monkeypatch.setattr(command, "BENCHMARKS", {"iterate": measure})
    app = command.typer.Typer()
    app.command()(command.main)
    done = CliRunner().invoke(app, ["iterate", "--store", "sqlite", "--check"])
    assert (done.exit_code, "it yielded nothing" in done.output) == ((1, True) if store == "sqlite" else (0, False))


def test_every_stored_comparison_is_a_ratio() -> None:
    figures = [figure for run in load(STORED) for rows in run.figures.values() for figure in rows]
    compared = {figure.what: figure.unit for figure in figures if "compared with" in figure.what}
    assert set(compared.values()) <= {"×", "%"}, compared
