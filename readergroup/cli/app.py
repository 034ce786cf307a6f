"""The command ``readergroup`` and its options."""

from __future__ import annotations

import logging
from importlib.metadata import version
from typing import Annotated

import typer

from . import demo, groups, reading, streams, watching, writing
from .screen import say
from .session import Commands, Session

app = typer.Typer(
    cls=Commands,
    name="readergroup",
    help="Streams and reader groups in a SQLite file.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(streams.commands, name="stream")
app.add_typer(groups.commands, name="group")
app.command()(writing.write)
app.command()(reading.read)
app.command()(watching.watch)
app.command()(demo.demo)


def _print_version(wanted: bool) -> None:
    if wanted:
        say(f"readergroup {version('readergroup')}")
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    url: Annotated[
        str | None,
        typer.Option(
            envvar="READERGROUP_URL",
            help="The store, such as sqlite:///shop.db (in this folder) or sqlite:////var/lib/shop.db.",
            show_default=False,
        ),
    ] = None,
    _version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    context.obj = Session(url)


def main() -> None:
    """Run the command that stands in ``sys.argv``, and exit."""
    logging.basicConfig(level=logging.WARNING, format="readergroup: %(message)s")
    app()
