"""``readergroup state``: lists shared states, and shows them, their history, and compacts them."""

from __future__ import annotations

import base64
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from math import isfinite
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

import typer

import readergroup as rg

from .screen import clipped, count, out, print_json, say, size, table
from .session import Failed, WrongUsage, session
from .streams import AsJson

if TYPE_CHECKING:
    from synchronizer import State, Update
    from synchronizer.log.entries import Entry

commands = typer.Typer(
    help="List shared states; show their values and what changed them; compact their logs.\n\nNAME is as 'state list' "
    "prints it: state/visits for client.synchronizer('visits'), map/prices for client.shared_map('prices').",
    no_args_is_help=True,
)

#: By the first part of the name: where the class of the state and the list of its updates are.
_CLASSES: Final[Mapping[str, tuple[str, str, str]]] = {
    "barrier": ("synchronizer.recipes.coordination.members", "Members", "UPDATES"),
    "config": ("synchronizer.recipes.collections.shared_map", "MapState", "MAP_UPDATES"),
    "counter": ("synchronizer.recipes.collections.shared_counter", "CounterState", "COUNTER_UPDATES"),
    "dead-letter-status": ("readergroup.dead_letters.statuses", "LetterStatuses", "LETTER_UPDATES"),
    "election": ("synchronizer.recipes.coordination.members", "Members", "UPDATES"),
    "group": ("readergroup.group.model.state", "ReaderGroupState", "readergroup.group.model.updates:UPDATES"),
    "lock": ("synchronizer.recipes.coordination.members", "Members", "UPDATES"),
    "map": ("synchronizer.recipes.collections.shared_map", "MapState", "MAP_UPDATES"),
    "membership": ("synchronizer.recipes.coordination.members", "Members", "UPDATES"),
    "semaphore": ("synchronizer.recipes.coordination.members", "Members", "UPDATES"),
    "set": ("synchronizer.recipes.collections.shared_set", "SetState", "SET_UPDATES"),
    "stream": ("readergroup.streams.state", "StreamState", "STREAM_UPDATES"),
}
_OUTBOX: Final = ("readergroup.outbox.state", "OutboxState", "OUTBOX_UPDATES")
#: The states of applications, whose classes only they have, and those of outboxes.
_OWN: Final = "state"
#: Their values are stored as msgpack.
_COLLECTIONS: Final = frozenset({"config", "map", "set"})
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
        names = sorted(
            name
            for kind in (_OWN, *_CLASSES)
            for name in client.store.list(f"{kind}/")
            if prefix is None or name.startswith(prefix)
        )
        rows = [(name, client.store.info(name)) for name in names]
    if as_json:
        print_json([{"name": name, "log_bytes": info.length - info.start_offset} for name, info in rows])
    elif rows:
        shown = [(name, size(info.length - info.start_offset)) for name, info in rows]
        out().print(table("state", "log", numbers=("log",), rows=shown))
    else:
        say("There are no shared states.")


@commands.command()
def show(context: typer.Context, name: Name, of_type: OfType = None, as_json: AsJson = False) -> None:
    """Show the value of a state. Without its class: that of its last snapshot, and what came after it."""
    with session(context).connect() as client:
        if (kind := _kind(name, of_type)) is None:
            _show_raw(client, name, as_json)
            return
        with _opened(client, name, kind) as synchronizer:
            state, revision = synchronizer.snapshot_of_state
    fields = _readable(state.model_dump(), in_collection=_is_collection(name))
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
    with session(context).connect() as client:
        rows = [row for entry in _entries(client, name) for row in _rows(entry, in_collection=_is_collection(name))]
    if as_json:
        for revision, update, fields in rows[-limit:]:
            print_json({"revision": str(revision), "update": update, "fields": fields})
        return
    shown = [
        (str(revision), update, ", ".join(f"{field}={_text(value)}" for field, value in fields.items()))
        for revision, update, fields in rows[-limit:]
    ]
    out().print(table("revision", "update", "fields", rows=shown))
    if len(rows) > limit:
        say(f"\n{count(len(rows) - limit, 'earlier update')} in the log: --limit {len(rows)}")


@commands.command()
def compact(context: typer.Context, name: Name, of_type: OfType = None, as_json: AsJson = False) -> None:
    """Write a snapshot of a state, and delete the log before the last one. Processes do it themselves in time."""
    with session(context).connect() as client:
        if (kind := _kind(name, of_type)) is None:
            raise WrongUsage("a state of your own is compacted with its class: use --type MODULE:CLASS")
        with _opened(client, name, kind) as synchronizer:
            before = synchronizer.bytes_since_compaction
            done = synchronizer.compact()
    if as_json:
        print_json({"name": name, "compacted": done, "bytes": before if done else 0})
    else:
        say(f"{name}: {size(before)} of log compacted" if done else f"{name}: nothing to compact")


# ---------------------------------------------------------------------- classes


class _Kind(NamedTuple):
    state_type: type[State]
    updates: tuple[type[Update[Any]], ...]


def _kind(name: str, of_type: str | None) -> _Kind | None:
    """Return the classes of the state; None if only an application has them."""
    first = name.partition("/")[0]
    if of_type is not None:
        return _own_classes(of_type)
    _check_name(name)
    if first == _OWN and not name.startswith(f"{_OWN}/outbox/"):
        return None
    module, state, updates = _CLASSES.get(first, _OUTBOX)
    elsewhere, _, updates = updates.rpartition(":")
    return _Kind(getattr(import_module(module), state), tuple(getattr(import_module(elsewhere or module), updates)))


def _check_name(name: str) -> None:
    if name.partition("/")[0] not in (_OWN, *_CLASSES):
        raise WrongUsage(f"{name!r} is no name of a state; 'readergroup state list' prints them")


def _own_classes(text: str) -> _Kind:
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
    return _Kind(found, tuple(_updates_of(Update[found])))  # type: ignore[valid-type, type-abstract]


def _updates_of(base: type[Update[Any]]) -> Iterator[type[Update[Any]]]:
    for each in base.__subclasses__():
        if each.tag:
            yield each
        yield from _updates_of(each)


@contextmanager
def _opened(client: rg.Client, name: str, kind: _Kind) -> Iterator[rg.StateSynchronizer[Any]]:
    try:
        synchronizer = rg.StateSynchronizer(
            client.store, name, state_type=kind.state_type, updates=kind.updates, timeout=client.timeout
        )
    except rg.NotFoundError as error:
        raise _no_state(name) from error
    try:
        synchronizer.fetch_updates()
        yield synchronizer
    finally:
        synchronizer.close()


def _no_state(name: str) -> Failed:
    return Failed(f"there is no state {name}; 'readergroup state list' prints the names")


# ---------------------------------------------------------------------- the log, without classes


def _entries(client: rg.Client, name: str) -> Iterator[Entry]:
    """Iterate over the entries that the log still has."""
    from synchronizer.log.entries import EntryLog, previous_of

    _check_name(name)
    log = EntryLog(client.store, name)
    try:
        at = client.store.info(name).start_offset
        previous = previous_of(client.store.read(name, at, 64))
    except rg.NotFoundError as error:
        raise _no_state(name) from error
    while True:
        try:
            entries, is_all = log.read(at, previous)
        except rg.TruncatedError as error:  # compacted meanwhile
            at = error.start_offset
            previous = previous_of(client.store.read(name, at, 64))
            continue
        yield from entries
        if is_all or not entries:
            return
        at, previous = entries[-1].end, entries[-1].checksum


def _rows(entry: Entry, *, in_collection: bool) -> Iterator[tuple[rg.Revision, str, dict[str, Any]]]:
    import msgpack

    kind, *rest = msgpack.unpackb(entry.body, strict_map_key=False)
    match kind:
        case "u":
            for index, (tag, fields) in enumerate(rest[1]):
                yield rg.Revision(entry.offset, index), tag, _readable(fields, in_collection=in_collection)
        case "i":
            fields = _readable(rest[1], in_collection=in_collection)
            yield rg.Revision(entry.offset, 0), "(initial state)", fields
        case "d":
            yield rg.Revision(entry.offset, 0), "(deleted)", {}
        case _:
            yield rg.Revision(entry.offset, 0), f"({kind}, of a newer release)", {}


def _show_raw(client: rg.Client, name: str, as_json: bool) -> None:
    import msgpack

    from synchronizer.log.entries import EntryLog

    entries = list(_entries(client, name))
    mark = EntryLog(client.store, name).mark()
    fields: dict[str, Any] = {}
    after = sum(1 for each in entries if mark is None or each.offset >= mark.next_offset)
    if mark is not None:
        fields = msgpack.unpackb(EntryLog(client.store, name).read_snapshot(mark), strict_map_key=False)[3] or {}
    elif entries:
        _, _, fields = next(_rows(entries[0], in_collection=False))
        after -= 1
    fields = _readable(fields, in_collection=False)
    if as_json:
        print_json({"name": name, "fields": fields, "entries_since": after})
        return
    of = "its last snapshot" if mark is not None else "its beginning"
    say(f"{name}: as of {of}; later changes of its log: {after:,}; --type MODULE:CLASS applies them")
    for field, value in fields.items():
        say(f"{field}: {_text(value)}")


def _is_collection(name: str) -> bool:
    return name.partition("/")[0] in _COLLECTIONS


def _readable(value: Any, *, in_collection: bool) -> Any:
    """Return the value with text in place of bytes, in a form that JSON has."""
    import msgpack

    match value:
        case bytes():
            if in_collection:
                return _readable(msgpack.unpackb(value, strict_map_key=False), in_collection=False)
            try:
                return value.decode()
            except UnicodeDecodeError:
                return base64.b64encode(value).decode()
        case Mapping():
            return {
                key if isinstance(key, str) else str(_readable(key, in_collection=in_collection)): _readable(
                    each, in_collection=in_collection
                )
                for key, each in value.items()
            }
        case list() | tuple() | set() | frozenset():
            return [_readable(each, in_collection=in_collection) for each in value]
        case float() if not isfinite(value):  # JSON has no such number
            return str(value)
        case None | bool() | int() | float() | str():
            return value
    return str(value)


def _text(value: Any) -> str:
    import json

    return clipped(json.dumps(value, ensure_ascii=False), _WIDTH)
