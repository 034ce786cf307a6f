"""The migrations that the documentation prints, run by Alembic and by Django, make the tables that a release needs."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest

import readergroup as rg
from readergroup.sinks import SqlSink
from tests.places import DOCS
from tests.readergroup.outbox.databases import WAYS
from tests.waiting import PATIENCE_SECONDS, until

SINK = DOCS / "howto" / "write-to-a-database.md"
OUTBOX = DOCS / "howto" / "publish-events-with-your-rows.md"
DDL = {SINK: ["sink", "ddl"], OUTBOX: ["outbox", "ddl", "postgresql"]}


def run_alembic(migration: str, url: str) -> None:
    import sqlalchemy
    from alembic import op
    from alembic.operations import Operations
    from alembic.runtime.migration import MigrationContext

    engine = sqlalchemy.create_engine(url.replace("postgresql://", "postgresql+psycopg://"))
    with engine.begin() as connection, Operations.context(MigrationContext.configure(connection)):
        names = {"op": op}
        exec(migration, names)
        names["upgrade"]()
    engine.dispose()


def run_django(migration: str, url: str) -> None:
    with WAYS["django"]("postgresql", url) as application:
        from django.db import connections, migrations
        from django.db.migrations.state import ProjectState

        names = {"migrations": migrations}
        exec(migration, names)
        with connections[application.source].schema_editor(atomic=True) as editor:
            names["Migration"]("0001", "shop").apply(ProjectState(), editor)


@pytest.mark.parametrize("page", DDL, ids=lambda page: page.stem)
@pytest.mark.parametrize(
    ("beginning", "run"), [("def upgrade", run_alembic), ("class Migration", run_django)], ids=["alembic", "django"]
)
def test_a_migration_of_the_page_makes_the_tables(
    page: Path, beginning: str, run: Callable[[str, str], None], database_url: str
) -> None:
    command = [sys.executable, "-m", "readergroup.cli", *DDL[page]]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=True).stdout
    statements = [each.strip() for each in printed.split(";\n") if each.strip()]
    (block,) = re.findall(rf"^    {beginning}.*\n(?:     .*\n)+", page.read_text(), re.MULTILINE)
    migration = textwrap.dedent(block)
    for statement in statements:
        placeholder = '"""' + statement.partition("(")[0] + '(...)"""'
        assert migration.count(placeholder) == 1, placeholder
        migration = migration.replace(placeholder, f'"""{statement}"""')
    assert "(...)" not in migration
    run(migration, database_url)
    with rg.connect("memory://") as client:
        client.streams.create("shop/orders")
        (check_sink if page == SINK else check_outbox)(client, database_url)


def check_sink(client: rg.Client, url: str) -> None:
    with client.writer("shop/orders") as writer:
        writer.write(b"three pears")
    client.streams.seal("shop/orders")
    handled = []
    sink = SqlSink(lambda: psycopg.connect(url), create_table=False)
    group = client.groups.create("billing", streams=["shop/orders"])
    group.pool(lambda event, connection: handled.append(event.raw), sink=sink).run()
    assert handled == [b"three pears"]


def check_outbox(client: rg.Client, url: str) -> None:
    outbox = rg.Outbox(client, lambda: psycopg.connect(url))
    with psycopg.connect(url) as connection:
        outbox.write(connection, "shop/orders", b"three pears")
    with outbox.relay():
        until(lambda: outbox.lag().events == 0, "an empty outbox")
