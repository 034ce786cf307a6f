"""``readergroup state``: lists shared states, and shows them, their history, and compacts them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

import readergroup as rg

from ..states.kinds import PREFIXES, Kind, is_collection, is_name, kind_of, opened
from ..words import count
from .screen import clipped, print_json, say, size
from .session import Failed, WrongUsage, session
from .streams import AsJson
from .tables import Table

if TYPE_CHECKING:
    from synchronizer import Update

commands = typer.Typer(
    help="List shared states; show their values and what changed them; compact their logs.\n\nNAME is as 'state list' "
    "prints it: state/visits for client.synchronizer('visits'), map/prices for client.shared_map('prices').",
    no_args_is_help=True,
)

_WIDTH: Final = 200

Name = Annotated[str, typer.Argument(metavar="NAME", help="The state, as 'state list' prints it.", show_default=False)]
OfType = Annotated[
    str | None,
    typer.Option(
        "--type",
        metavar="MODULE:CLASS",
        help="The class of a state of your own, such as shop.visits:Counter. Its module has the updates too.",
    ),
]


@commands.command(name="list")
def list_states(
    context: typer.Context,
    prefix: Annotated[
        str | None, typer.Argument(metavar="PREFIX", help="Only names that begin so. Default: all.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the shared states, with those of groups, streams and locks."""
    with session(context).connect() as client:
        names = [
            name
            for kind in PREFIXES
            for name in client.store.list(f"{kind}/")
            if prefix is None or name.startswith(prefix)
        ]
        rows = sorted(client.store.infos(names).items())
    if as_json:
        print_json([{"name": name, "log_bytes": info.length - info.start_offset} for name, info in rows])
    elif rows:
        shown = [(name, size(info.length - info.start_offset)) for name, info in rows]
        say(Table("state", "log", numbers=("log",), rows=shown))
    else:
        say("There are no shared states." if prefix is None else "No shared state matches.")


@commands.command()
def show(context: typer.Context, name: Name, of_type: OfType = None, as_json: AsJson = False) -> None:
    """Show the value of a state. Without its class: that of its last snapshot, and what came after it."""
    from ..states.history import readable

    with session(context).connect() as client, _named(name):
        if (kind := _kind(name, of_type)) is None:
            _show_raw(client, name, as_json)
            return
        with opened(client, name, kind) as synchronizer:
            state, revision = synchronizer.snapshot_of_state
    fields = readable(state.model_dump(), in_collection=is_collection(name))
    if as_json:
        print_json({"name": name, "revision": str(revision), "state": fields})
        return
    say(f"{name}: {type(state).__name__} at revision {revision}")
    for field, value in fields.items():
        say(f"{field}: {_text(value)}")


@commands.command()
def history(
    context: typer.Context,
    name: Name,
    limit: Annotated[int, typer.Option(metavar="N", min=1, help="The last N updates.")] = 20,
    as_json: AsJson = False,
) -> None:
    """Show the last updates of a state, as far as its log still has them. With --json, one object per line."""
    from ..states.history import history_of

    _check_name(name)
    with session(context).connect() as client, _named(name):
        found = history_of(client.store, name, limit)
    if as_json:
        for each in found.updates:
            print_json({"revision": str(each.revision), "update": each.update, "fields": each.fields})
        return
    shown = [
        (str(each.revision), each.update, ", ".join(f"{field}={_text(value)}" for field, value in each.fields.items()))
        for each in found.updates
    ]
    say(Table("revision", "update", "fields", rows=shown))
    if found.earlier:
        say(f"\n{count(found.earlier, 'earlier update')} in the log: --limit {found.earlier + len(shown)}")


@commands.command()
def compact(context: typer.Context, name: Name, of_type: OfType = None, as_json: AsJson = False) -> None:
    """Write a snapshot of a state, and delete the log before the last one. Processes do it themselves in time."""
    with session(context).connect() as client, _named(name):
        if (kind := _kind(name, of_type)) is None:
            raise WrongUsage("a state of your own is compacted with its class: use --type MODULE:CLASS")
        with opened(client, name, kind) as synchronizer:
            before = synchronizer.bytes_since_compaction
            done = synchronizer.compact()
    if as_json:
        print_json({"name": name, "compacted": done, "bytes": before if done else 0})
    else:
        say(f"{name}: {size(before)} of log compacted" if done else f"{name}: nothing to compact")


# ---------------------------------------------------------------------- classes


def _kind(name: str, of_type: str | None) -> Kind | None:
    """Return the classes of the state; None if only an application has them."""
    if of_type is not None:
        return _own_classes(of_type)
    _check_name(name)
    return kind_of(name)


def _own_classes(text: str) -> Kind:
    from synchronizer import State, Update

    module, _, name = text.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise WrongUsage(f"--type {text}: {error}; use MODULE:CLASS, such as shop.visits:Counter") from error
    if not (isinstance(found, type) and issubclass(found, State)):
        raise WrongUsage(f"--type {text} is no class of a state; it must derive from rg.State")
    return Kind(found, tuple(_updates_of(Update[found])))  # type: ignore[valid-type, type-abstract]


def _updates_of(base: type[Update[Any]]) -> Iterator[type[Update[Any]]]:
    for each in base.__subclasses__():
        if each.tag:
            yield each
        yield from _updates_of(each)


def _check_name(name: str) -> None:
    if not is_name(name):
        raise WrongUsage(
            f"{name!r} is no name of a state, which begins with its kind, such as state/{name} or map/{name}; "
            "'readergroup state list' prints the names"
        )


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Say in the block if there is no state of this name."""
    try:
        yield
    except rg.NotFoundError as error:
        raise Failed(f"there is no state {name}; 'readergroup state list' prints the names") from error


def _show_raw(client: rg.Client, name: str, as_json: bool) -> None:
    from ..states.history import last_snapshot

    found = last_snapshot(client.store, name)
    if as_json:
        print_json({"name": name, "fields": found.fields, "entries_since": found.entries_since})
        return
    of = "its last snapshot" if found.is_snapshot else "its beginning"
    say(f"{name}: as of {of}; later changes of its log: {found.entries_since:,}; --type MODULE:CLASS applies them")
    for field, value in found.fields.items():
        say(f"{field}: {_text(value)}")


def _text(value: Any) -> str:
    import json

    return clipped(json.dumps(value, ensure_ascii=False), _WIDTH)
