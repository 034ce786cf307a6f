"""``readergroup group create``, ``configure`` and ``remove-reader``: make and change reader groups."""

from __future__ import annotations

import json
from difflib import get_close_matches
from typing import Annotated, Any

import typer

import readergroup as rg

from ..words import count
from .groups import Name, commands, config_in_words, setting_names
from .screen import print_json, say
from .session import Failed, WrongUsage, session
from .streams import AsJson, Yes, confirm
from .times import TIME_HELP, parse_time

Settings = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="FIELD=VALUE",
        help="Fields of the config as 'group describe' shows them, such as reader_timeout_seconds=5, or "
        "max_processing_seconds=none for no limit.",
        show_default=False,
    ),
]


@commands.command()
def create(
    context: typer.Context,
    group: Name,
    settings: Settings = None,
    streams: Annotated[
        list[str] | None,
        typer.Option("--stream", metavar="STREAM", help="A stream to read. Repeat it for several.", show_default=False),
    ] = None,
    start: Annotated[
        str, typer.Option(metavar="PLACE", help=f"Where the group starts: head, tail, or {TIME_HELP}.")
    ] = "head",
    as_json: AsJson = False,
) -> None:
    """Create a reader group. If it exists with this config, nothing changes."""
    if not streams:
        raise WrongUsage("name the streams that the group reads: --stream shop/orders")
    fields = _fields(settings)
    if start != "head":
        fields["start"] = start if start == "tail" else parse_time("--start", start, or_use="head or tail")
    with session(context).connect() as client:
        found = client.groups.create(group, streams=streams, **fields)
        _show(group, found.config, as_json)


@commands.command()
def configure(
    context: typer.Context,
    group: Name,
    settings: Settings = None,
    add_stream: Annotated[
        list[str] | None, typer.Option(metavar="STREAM", help="Read this stream too.", show_default=False)
    ] = None,
    remove_stream: Annotated[
        list[str] | None,
        typer.Option(metavar="STREAM", help="Read it no longer, and forget the position.", show_default=False),
    ] = None,
    start: Annotated[
        str | None,
        typer.Option(
            metavar="PLACE", help=f"Where added streams start: head, tail, or {TIME_HELP}.", show_default=False
        ),
    ] = None,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Change the config of a reader group and the streams that it reads, also while it runs."""
    fields, added, removed = _fields(settings), add_stream or [], remove_stream or []
    if not (fields or added or removed):
        raise WrongUsage("name fields as FIELD=VALUE, or streams with --add-stream or --remove-stream")
    if start not in (None, "head"):
        fields["start"] = start if start == "tail" else parse_time("--start", start, or_use="head or tail")
    with session(context).connect() as client:
        found = client.groups.get(group)
        known = found.config.streams
        if unknown := [stream for stream in removed if stream not in known]:
            raise WrongUsage(f"{group} does not read {', '.join(unknown)}; it reads {', '.join(known)}")
        if removed:
            confirm(f"Let {group} forget its positions in {', '.join(removed)}?", yes)
        if added or removed:
            new = [each for each in added if each not in known]
            fields["streams"] = [*(each for each in known if each not in removed), *new]
        _show(group, found.configure(**fields), as_json)


@commands.command()
def remove_reader(
    context: typer.Context,
    group: Name,
    reader: Annotated[str, typer.Argument(metavar="READER", help="The id of the reader.", show_default=False)],
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Remove a reader from a group. Others continue with its segments, from its last commit. If it runs, it stops."""
    with session(context).connect() as client:
        found = client.groups.get(group)
        state = found.state
        if reader not in state.readers:
            raise Failed(
                f"the group {group} has no reader {reader!r}; its readers: {', '.join(state.readers) or 'none'}"
            )
        segments = sorted(state.segments_of(reader))
        confirm(f"Remove the reader {reader} of the group {group}, with {count(len(segments), 'segment')}?", yes)
        was_there = found.remove_reader(reader)
    if as_json:
        print_json({"group": group, "reader": reader, "removed": was_there, "segments": segments})
    else:
        say(f"{group}: {reader} {'removed' if was_there else 'had left already'}")


def _fields(settings: list[str] | None) -> dict[str, Any]:
    known = setting_names()
    fields: dict[str, Any] = {}
    for each in settings or ():
        name, equals, value = each.partition("=")
        if not equals or not name:
            raise WrongUsage(f"write a field as FIELD=VALUE, such as reader_timeout_seconds=5, not {each!r}")
        if name not in known:
            near = get_close_matches(name, known, n=1)
            meant = f"; did you mean {near[0]!r}?" if near else ""
            raise WrongUsage(f"{name!r} is no field that can be set here; 'group describe' shows those that can{meant}")
        try:
            fields[name] = None if value == "none" else json.loads(value)
        except (ValueError, RecursionError):
            fields[name] = value
    return fields


def _show(group: str, config: rg.ReaderGroupConfig, as_json: bool) -> None:
    if as_json:
        print_json({"group": group, "config": config})
        return
    say(f"{group}: reads {', '.join(config.streams)}")
    say(config_in_words(config))


# The help lists them before the commands of `groups`.
commands.registered_commands.sort(key=lambda each: each.callback not in (create, configure))
