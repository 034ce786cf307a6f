"""The command ``readergroup`` and its options."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from functools import partial
from importlib import import_module
from io import TextIOWrapper
from typing import Annotated, Final

import typer
from typer.main import get_command_name
from typer.models import CommandInfo

from synchronizer import ReaderGroupError

from .escaping import printable
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
        return printable(self._format(record))

    def _format(self, record: logging.LogRecord) -> str:
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, (ReaderGroupError, OSError)):
            return super().format(record)
        said = self.formatMessage(logging.makeLogRecord({**record.__dict__, "message": record.getMessage()}))
        return said if str(error) in said else f"{said}: {error}"


def app_with(*words: str) -> typer.Typer:
    """Return the app with the command that a command line of these words names.

    It takes 30 ms to load and prepare the others. They are all in it if the words name no command, as the help and the
    errors need them.
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
    named = [each for each in words[:1] if each in _MODULES]
    for name in named or _MODULES:
        first, *others = _MODULES[name].split()
        module = import_module(f".{first}", __package__)
        if hasattr(module, "commands"):
            app.add_typer(_group_with(words[1:2], module.commands, others), name=name, cls=Commands)
        else:
            app.command()(getattr(module, name))
    return app


def _group_with(words: Sequence[str], commands: typer.Typer, others: Sequence[str]) -> typer.Typer:
    """Return the group with the command of this name, or with all of them and those that the other modules add."""

    def named() -> list[CommandInfo]:
        return [each for each in commands.registered_commands if _name_of(each) in words]

    for other in others:
        if not named():
            import_module(f".{other}", __package__)
    group = copy(commands)
    group.registered_commands = named() or commands.registered_commands
    return group


def _name_of(command: CommandInfo) -> str:
    assert command.callback is not None
    return command.name or get_command_name(command.callback.__name__)


def run() -> None:
    """Run the command in ``sys.argv``, and exit."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # half of a surrogate pair, in a key, is no valid text
    handler = logging.StreamHandler()
    words = [*_words_in(sys.argv[1:])]
    handler.setFormatter(_Words("readergroup: %(message)s"))
    handler.addFilter(partial(_is_of_use, words))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    app_with(*words)()


def _is_of_use(words: Sequence[str], record: logging.LogRecord) -> bool:
    """Whether to print a record: how durable NATS is only where a store is made or checked."""
    if record.name == "asyncio" and "eof_received" in str(record.msg):
        return False  # asyncio says it of each TLS connection that nats-py closes
    return "sync_interval" not in str(record.msg) or not {"create", "doctor"}.isdisjoint(words[:2])


def _words_in(arguments: Sequence[str]) -> Iterator[str]:
    """Iterate over the arguments after the address of the store."""
    rest = iter(arguments)
    for argument in rest:
        if argument == "--url":
            next(rest, None)
        elif not argument.startswith("--url="):
            yield argument
            yield from rest
