"""``readergroup outbox`` shows what waits in an outbox of a database, and the definition of its table."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import psycopg
import pytest
from typer.testing import CliRunner, Result

import readergroup as rg
from tests.command import app
from tests.readergroup.outbox.databases import KINDS, connect_to, place_of
from tests.waiting import until


def run(*words: str) -> Result:
    return CliRunner(env={"COLUMNS": "80"}).invoke(app, list(words))


@pytest.mark.parametrize("kind", KINDS)
def test_the_state_of_an_outbox_is_shown(request: pytest.FixtureRequest, kind: str, tmp_path: Path) -> None:
    place = place_of(kind, request, tmp_path)
    database = place if kind == "postgresql" else f"sqlite:///{place}"
    words = ("--url", f"sqlite:///{tmp_path}/store.db", "outbox", "status", "--database", database)
    with rg.connect(f"sqlite:///{tmp_path}/store.db") as client:
        outbox = rg.Outbox(client, lambda: connect_to(kind, place))
        if kind == "sqlite":
            Path(place).touch()
        assert "the outbox table does not exist" in run(*words).stderr
        outbox.create_table()
        shown = run(*words)
        assert shown.exit_code == 0, shown.stderr
        assert "none runs" in shown.stdout and "waiting: nothing" in shown.stdout
        with closing(connect_to(kind, place)) as connection:
            outbox.write(connection, "shop/missing", b"1")
            connection.commit()
        with outbox.relay():
            until(lambda: outbox.lag().streams["shop/missing"].stuck, "a reason")
            shown = run(*words)
            assert "waiting: 1 event" in shown.stdout and "shop/missing" in shown.stdout
            found = json.loads(run(*words, "--json").stdout)
    assert found["events"] == 1 and found["relay"]
    assert "no stream of this name" in found["streams"]["shop/missing"]["stuck"]


def test_the_printed_definition_creates_the_table(database_url: str) -> None:
    for dialect in ("postgresql", "sqlite"):
        printed = run("outbox", "ddl", dialect, "--table", "events").stdout
        with closing(sqlite3.connect(":memory:") if dialect == "sqlite" else psycopg.connect(database_url)) as database:
            database.executescript(printed) if dialect == "sqlite" else database.execute(printed)
            assert database.execute("SELECT count(*) FROM events").fetchone() == (1,)


def test_a_wrong_database_is_an_error_that_says_what_is_right(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/store.db"
    with rg.connect(store):
        pass
    for database in ("mysql://host/db", "app.db", "sqlite://", "sqlite:///"):
        failed = run("--url", store, "outbox", "status", "--database", database)
        assert failed.exit_code == 2 and "--database takes" in failed.stderr
    failed = run("--url", store, "outbox", "status", "--database", f"sqlite:///{tmp_path}/typo.db")
    assert failed.exit_code == 1 and f"there is no file {tmp_path}/typo.db" in failed.stderr
    assert not (tmp_path / "typo.db").exists()
    failed = run("outbox", "ddl", "mysql")
    assert failed.exit_code == 2 and "'postgresql', 'sqlite'" in failed.stderr
