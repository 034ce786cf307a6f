"""``readergroup outbox``: shows what waits in an outbox, and the definition of its table."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

import readergroup as rg
from synchronizer.extras import install_hint

from ..words import count
from .screen import print_json, say
from .session import Failed, WrongUsage, session
from .streams import AsJson
from .tables import Table

commands = typer.Typer(
    help="Show what waits in the outbox of a database, and the definition of its table.", no_args_is_help=True
)

_TABLE = "readergroup_outbox"
TableName = Annotated[str, typer.Option("--table", metavar="NAME", help="The table, perhaps with a schema.")]


@commands.command()
def status(
    context: typer.Context,
    database: Annotated[
        str,
        typer.Option(
            metavar="URL",
            help="The database with the outbox: sqlite:///app.db (in this folder), sqlite:////var/lib/app.db or "
            "postgresql://user@host/db.",
            show_default=False,
        ),
    ],
    table_name: TableName = _TABLE,
    as_json: AsJson = False,
) -> None:
    """Show the committed events that wait in an outbox, their age, and the process whose relay moves them."""
    connect = _connect(database)
    with session(context).connect() as client:
        lag = rg.Outbox(client, connect, table=table_name).lag()
    if as_json:
        print_json({"events": lag.events, "seconds": lag.seconds, **lag.model_dump()})
        return
    say(f"relay: {lag.relay or 'none runs; start one with outbox.relay()'}")
    if not lag.streams:
        say("waiting: nothing")
        return
    say(f"waiting: {count(lag.events, 'event')}, the oldest for {lag.seconds:,.1f} s\n")
    rows = [
        (stream, f"{each.events:,}", f"{each.seconds:,.1f}", each.stuck or "-")
        for stream, each in sorted(lag.streams.items())
    ]
    numbers = ("events", "seconds")
    say(Table("stream", *numbers, "stuck because", numbers=numbers, rows=rows))


class Dialect(StrEnum):
    POSTGRESQL = "postgresql"
    SQLITE = "sqlite"


@commands.command()
def ddl(
    dialect: Annotated[Dialect, typer.Argument(metavar="DIALECT", help="The kind of database.")] = Dialect.POSTGRESQL,
    table_name: TableName = _TABLE,
) -> None:
    """Print the statements that create the table of an outbox, for a migration."""
    from ..outbox.table import OutboxTable

    print("".join(f"{statement};\n" for statement in OutboxTable(table_name).ddl(dialect)), end="")


def _connect(database: str) -> Callable[[], Any]:
    scheme, _, rest = database.partition("://")
    if scheme in ("postgresql", "postgres"):
        return lambda: _connect_to_postgresql(database)
    if scheme == "sqlite" and rest.startswith("/") and len(rest) > 1:
        if not Path(rest[1:]).exists():
            raise Failed(f"--database: there is no file {rest[1:]}")
        return lambda: _connect_to_sqlite(rest[1:])
    raise WrongUsage("--database takes sqlite:///app.db or postgresql://user@host/db")


def _connect_to_postgresql(database: str) -> Any:
    try:
        import psycopg
    except ImportError as error:
        raise rg.UnsupportedError(f"psycopg is not installed; {install_hint('postgres')}") from error
    return psycopg.connect(database)


def _connect_to_sqlite(path: str) -> Any:
    import sqlite3
    from urllib.parse import quote

    return sqlite3.connect(f"file:{quote(path)}?mode=rw", uri=True)  # it must exist
