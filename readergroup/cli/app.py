"""The command ``readergroup`` and its options."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Annotated, Final

import typer

from synchronizer import ReaderGroupError

from .screen import say
from .session import Commands, Session

#: The modules with each command, in the order of the help. A group of commands is the ``commands`` of its first module,
#: to which the others add.
_MODULES: Final[Mapping[str, str]] = {
    "stream": "streams transfer",
    "group": "groups configuring notifications",
    "config": "config",
    "state": "states",
    "sink": "sinks",
    "outbox": "outbox",
    "dead-letters": "dead_letters",
    "write": "writing",
    "read": "reading",
    "peek": "peeking",
    "watch": "watching",
    "serve": "serving",
    "demo": "demo",
    "doctor": "doctor",
}


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        say(f"readergroup {version('readergroup')}")
        raise typer.Exit


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


def app_with(name: str | None = None) -> typer.Typer:
    """Return the app with the command of this name only, so that the others need not be loaded and prepared.

    Without a name, or with one that no command has, all commands are in it, as their help and errors need them.
    """
    app = typer.Typer(
        cls=Commands,
        name="readergroup",
        help="Streams and reader groups in a SQLite file, PostgreSQL or NATS.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="markdown",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_options)
    for each in [name] if name is not None and name in _MODULES else _MODULES:
        first, *_ = [import_module(f".{module}", __package__) for module in _MODULES[each].split()]
        if hasattr(first, "commands"):
            app.add_typer(first.commands, name=each)
        else:
            app.command()(getattr(first, each))
    return app


def run() -> None:
    """Run the command in ``sys.argv``, and exit."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Words("readergroup: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    app_with(_command_in(sys.argv[1:]))()


def _command_in(arguments: Sequence[str]) -> str | None:
    """Return the first argument, after the address of the store."""
    rest = iter(arguments)
    for argument in rest:
        if argument == "--url":
            next(rest, None)
        elif not argument.startswith("--url="):
            return argument
    return None
