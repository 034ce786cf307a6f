"""The command ``readergroup`` and its options."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from synchronizer import ReaderGroupError

from . import (
    config,
    configuring,
    dead_letters,
    demo,
    doctor,
    groups,
    notifications,
    outbox,
    peeking,
    reading,
    serving,
    sinks,
    states,
    streams,
    transfer,
    watching,
    writing,
)
from .screen import say
from .session import Commands, Session

app = typer.Typer(
    cls=Commands,
    name="readergroup",
    help="Streams and reader groups in a SQLite file, PostgreSQL or NATS.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
streams.commands.command()(transfer.copy)
streams.commands.command()(transfer.export)
streams.commands.command(name="import")(transfer.import_events)
app.add_typer(streams.commands, name="stream")
groups.commands.command()(configuring.create)
groups.commands.command()(configuring.configure)
groups.commands.command()(configuring.remove_reader)
groups.commands.command()(notifications.notifications)
app.add_typer(groups.commands, name="group")
app.add_typer(config.commands, name="config")
app.add_typer(states.commands, name="state")
app.add_typer(sinks.commands, name="sink")
app.add_typer(outbox.commands, name="outbox")
app.add_typer(dead_letters.commands, name="dead-letters")
app.command()(writing.write)
app.command()(reading.read)
app.command()(peeking.peek)
app.command()(watching.watch)
app.command()(serving.serve)
app.command()(demo.demo)
app.command()(doctor.doctor)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        say(f"readergroup {version('readergroup')}")
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    url: Annotated[
        str | None,
        typer.Option(
            envvar="READERGROUP_URL",
            help="The store: sqlite:///shop.db (in this folder), sqlite:////var/lib/shop.db, postgresql://user@host/db"
            " or nats://host:4222.",
            show_default=False,
        ),
    ] = None,
    _version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    context.obj = Session(url)


class _Words(logging.Formatter):
    """Log expected store errors on one line; show tracebacks only for unexpected ones."""

    def format(self, record: logging.LogRecord) -> str:
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, (ReaderGroupError, OSError)):
            return super().format(record)
        said = self.formatMessage(logging.makeLogRecord({**record.__dict__, "message": record.getMessage()}))
        return said if str(error) in said else f"{said}: {error}"


def run() -> None:
    """Run the command in ``sys.argv``, and exit."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Words("readergroup: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    _forget_commands_except(_command_in(sys.argv[1:]))
    app()


def _command_in(arguments: Sequence[str]) -> str | None:
    """Return the first argument, after the address of the store."""
    rest = iter(arguments)
    for argument in rest:
        if argument == "--url":
            next(rest, None)
        elif not argument.startswith("--url="):
            return argument
    return None


def _forget_commands_except(name: str | None) -> None:
    """Forget the other commands, which take 30 ms to prepare, unless this is not the name of a command."""
    groups = [each for each in app.registered_groups if each.name == name]
    commands = [each for each in app.registered_commands if each.callback and each.callback.__name__ == name]
    if groups or commands:
        app.registered_groups, app.registered_commands = groups, commands
