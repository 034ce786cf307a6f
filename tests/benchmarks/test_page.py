"""The performance page is made of the stored figures, and each figure has a place on it."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks import page
from benchmarks.__main__ import BENCHMARKS, ON_SERVERS
from benchmarks.figure import Figure
from benchmarks.page import with_headlines, with_tables
from benchmarks.results import STORED, Run, load, merge, save

MARKED = "Before.\n\n<!-- figures {}: {} -->\nold\n<!-- end of figures -->\n\nAfter.\n"


def run(store: str = "sqlite", commit: str = "c1", **figures: list[Figure]) -> Run:
    return Run(
        store=store, title=store, commit=commit, date="2026-11-25", machine={"cores": "2 cores"}, figures=figures
    )


def figure(what: str = "speed", value: float = 3, **fields: object) -> Figure:
    return Figure(what=what, value=value, unit="×", **fields)  # type: ignore[arg-type]


def test_the_page_is_what_the_command_makes_of_the_stored_figures() -> None:
    text = page.PAGE.read_text()
    assert with_tables(text, load(STORED)) == text, "run python -m benchmarks.page"


def test_the_readme_has_the_stored_figures() -> None:
    text, runs = page.README.read_text(), load(STORED)
    assert with_headlines(text, runs) == text, "run python -m benchmarks.page"
    for benchmark, what in page.HEADLINES.items():
        slower = run(**{benchmark: [Figure(what=what, value=1234, unit="ms")]})
        assert "| **1,234 ms** |" in with_headlines(text, merge(runs, [slower])), benchmark


def test_every_benchmark_of_every_store_has_a_table() -> None:
    shown = {
        (store, benchmark)
        for _, stores, benchmarks, _ in page.MARKED.findall(page.PAGE.read_text())
        for store in stores.split()
        for benchmark in benchmarks.split()
    }
    servers = {(store, benchmark) for store in ("postgresql", "nats") for benchmark in ON_SERVERS}
    assert shown == {*(("sqlite", benchmark) for benchmark in BENCHMARKS), *servers}


def test_a_table_shows_each_figure_with_its_target_footnote_commit_and_machine() -> None:
    rows = [figure(target=2, beside="a|b", note="Noted."), figure("size", 1_234_567, note="Other."), figure("c", 7)]
    text = with_tables(MARKED.format("sqlite", "iterate"), [run(iterate=rows)])
    assert text == (
        "Before.\n\n<!-- figures sqlite: iterate -->\n"
        "| what | measured | target | measured with it |\n"
        "| --- | --- | --- | --- |\n"
        "| speed ¹ | 3 × | ≥ 2 × | a/b |\n"
        "| size ² | 1.23 M × |  |  |\n"
        "| c | 7 × |  |  |\n\n"
        "¹ Noted.\n\n² Other.\n\n"
        "`iterate`: sqlite, commit c1, 2026-11-25; 2 cores.\n\n"
        "<!-- end of figures -->\n\nAfter.\n"
    )


def test_a_table_of_two_stores_has_a_column_for_each() -> None:
    runs = [run("nats", write=[figure(value=5)]), run("postgresql", write=[figure(value=4), figure("own", 1)])]
    text = with_tables(MARKED.format("postgresql nats", "write"), runs)
    assert "| what | PostgreSQL | NATS | target |" in text
    assert "| speed | 4 × | 5 × |  |" in text
    assert "| own | 1 × |  |  |" in text


def test_a_new_run_replaces_all_figures_of_its_benchmarks_and_no_others() -> None:
    stored = [run(iterate=[figure(), figure("gone")], write=[figure()]), run("nats", iterate=[figure()])]
    merged = merge(stored, [run(commit="c2", iterate=[figure(value=4)])])
    assert merged == [run(write=[figure()]), stored[1], run(commit="c2", iterate=[figure(value=4)])]


def test_figures_are_read_as_they_were_stored(tmp_path: Path) -> None:
    runs = [run(iterate=[figure(target=2, note="Noted.", better="less", one_run=False)])]
    save(tmp_path / "runs.json", runs)
    assert load(tmp_path / "runs.json") == runs


def test_the_stored_runs_name_their_commit_and_their_machine() -> None:
    for each in load(STORED):
        assert each.commit and re.match(r"\d{4}-\d\d-\d\d", each.date)
        assert {"cores", "processor", "Python", "SQLite"} <= each.machine.keys()
