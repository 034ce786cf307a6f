"""``readergroup config``: reads and changes shared configurations, by single commands and at a prompt."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Annotated, Final

import typer

from synchronizer import NotFoundError

from ..words import count
from .entries import Entries, as_json, read
from .session import Failed, session
from .streams import AsJson, Yes, confirm

if TYPE_CHECKING:
    from synchronizer.recipes.collections.shared_config import ConfigEntries

commands = typer.Typer(
    help=(
        "Read and change a shared configuration. A VALUE that is valid JSON is read as JSON, such as 5, true or "
        "'\"5\"'; any other value is text."
    ),
    no_args_is_help=True,
)

#: The prefix of the logs of configurations: `ConfigEntries.kind`, without loading it.
_PREFIX: Final = "config/"
#: Values may begin with a minus.
_WITH_VALUES: Final = {"ignore_unknown_options": True}

Name = Annotated[str, typer.Argument(metavar="NAME", help="The name of the configuration.", show_default=False)]
Key = Annotated[str, typer.Argument(metavar="KEY", help="The key.", show_default=False)]
Value = Annotated[str, typer.Argument(metavar="VALUE", help="The value: JSON or text.", show_default=False)]
Current = Annotated[
    str | None,
    typer.Argument(
        metavar="CURRENT", help="Change the key only if this is its value. Default: any value.", show_default=False
    ),
]


@commands.command(name="list")
def list_configurations(context: typer.Context, as_object: AsJson = False) -> None:
    """List the configurations."""
    with session(context).connect() as client:
        names = [log.removeprefix(_PREFIX) for log in client.store.list(_PREFIX)]
    print(as_json(names) if as_object else "\n".join(names) or "there are no configurations")


@commands.command()
def get_all(context: typer.Context, name: Name, as_object: AsJson = False) -> None:
    """Show all entries."""
    with _opened(context, name) as entries:
        print(as_json(entries.copy()) if as_object else Entries(entries).get_all())


@commands.command()
def get(context: typer.Context, name: Name, key: Key, as_object: AsJson = False) -> None:
    """Show the value of a key: text as it is, other values as JSON. With --json, text is JSON too."""
    with _opened(context, name) as entries:
        value = Entries(entries).get(key)
        print(as_json(entries[key]) if as_object else value)


@commands.command(context_settings=_WITH_VALUES)
def put(context: typer.Context, name: Name, key: Key, value: Value, as_object: AsJson = False) -> None:
    """Set the value of a key."""
    with _opened(context, name, may_create=True) as entries:
        _print(Entries(entries).put(key, value), as_object, key=key, value=read(value))


@commands.command(context_settings=_WITH_VALUES)
def put_if_absent(context: typer.Context, name: Name, key: Key, value: Value, as_object: AsJson = False) -> None:
    """Set the value of a key that has none; fail if it has one."""
    with _opened(context, name, may_create=True) as entries:
        _print(Entries(entries).put_if_absent(key, value), as_object, key=key, value=read(value))


@commands.command(context_settings=_WITH_VALUES)
def replace(
    context: typer.Context, name: Name, key: Key, value: Value, current: Current = None, as_object: AsJson = False
) -> None:
    """Replace the value of a key; fail if it has none, or one that is not CURRENT."""
    with _opened(context, name) as entries:
        _print(Entries(entries).replace(key, value, current), as_object, key=key, value=read(value))


@commands.command(context_settings=_WITH_VALUES)
def remove(context: typer.Context, name: Name, key: Key, current: Current = None, as_object: AsJson = False) -> None:
    """Remove a key; fail if it does not exist, or if its value is not CURRENT."""
    with _opened(context, name) as entries:
        _print(Entries(entries).remove(key, current), as_object, key=key, removed=True)


@commands.command()
def clear(context: typer.Context, name: Name, yes: Yes = False, as_object: AsJson = False) -> None:
    """Remove all keys."""
    with _opened(context, name) as entries:
        confirm(f"Remove all {count(len(entries), 'key')} of {name}?", yes)
        _print(Entries(entries).clear(), as_object, removed=True)


@commands.command()
def refresh(context: typer.Context, name: Name, as_object: AsJson = False) -> None:
    """Show the number of keys and the revision of the last change."""
    with _opened(context, name) as entries:
        text = Entries(entries).refresh()
        _print(text, as_object, keys=len(entries), revision=str(entries.synchronizer.revision))


@commands.command()
def shell(context: typer.Context, name: Name) -> None:
    """Read and change a configuration at a prompt, or with lines from standard input.

    Reads use the prompt's own copy, as of its last change or refresh. Type 'help' for the commands, and 'exit' or
    Ctrl-D to end.
    """
    with _opened(context, name, may_create=True) as entries:
        at_prompt = Entries(entries)
        is_done = True
        try:
            for line in _lines(f"{name}> "):
                if line.strip() == "exit":
                    return
                is_done = False
                answer = at_prompt.answer(line)
                is_done = True  # before printing: Ctrl-C right after the answer ends the prompt in order
                if answer:
                    print(answer, flush=True)
        except KeyboardInterrupt:
            if not is_done:
                raise


@contextmanager
def _opened(context: typer.Context, name: str, *, may_create: bool = False) -> Iterator[ConfigEntries]:
    from synchronizer.recipes.collections.shared_config import ConfigEntries

    with session(context).connect(may_create=may_create) as client:
        if not may_create:
            try:
                client.store.info(f"{_PREFIX}{name}")
            except NotFoundError as error:
                raise Failed(f"there is no configuration {name}; create it with 'readergroup config put'") from error
        with ConfigEntries(client.store, name, timeout=client.timeout) as entries:
            yield entries


def _print(text: str, as_object: bool, **fields: object) -> None:
    print(as_json(fields) if as_object else text)


def _lines(prompt: str) -> Iterator[str]:
    """Iterate over the lines that are typed, or piped in, until the end of input or Ctrl-C."""
    if not sys.stdin.isatty():
        yield from sys.stdin
        return
    with suppress(ImportError):
        import readline  # noqa: F401  lets `input` edit the line and recall earlier ones
    while True:
        try:
            yield input(prompt)
        except (EOFError, KeyboardInterrupt):
            print()
            return
