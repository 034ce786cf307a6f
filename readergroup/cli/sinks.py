"""``readergroup sink``: what the database of a `SqlSink` needs."""

from __future__ import annotations

from typing import Annotated

import typer

commands = typer.Typer(help="Prepare the database of a sink.", no_args_is_help=True)


@commands.command()
def ddl(
    table: Annotated[str, typer.Option("--table", help="The table of the positions.")] = "readergroup_progress",
    schema: Annotated[
        str | None, typer.Option("--schema", help="The schema of the tables.", show_default=False)
    ] = None,
) -> None:
    """Print the statements that create the tables of a SqlSink, for SQLite and PostgreSQL."""
    from ..sinks.progress import Tables

    for statement in Tables(table, schema).ddl():
        print(f"{statement};")
