"""``readergroup group``: shows, checkpoints, resets and deletes reader groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING, Annotated

import typer

import readergroup as rg

from ..words import count
from .screen import print_json, say, size
from .session import WrongUsage, expected_to_exist, session
from .streams import AsJson, Yes, confirm
from .tables import Table
from .times import TIME_HELP, parse_time

if TYPE_CHECKING:
    from ..group.model.state import ReaderGroupState, SegmentState
    from ..group.starting import ResetTarget

commands = typer.Typer(
    help="Create, show, configure, checkpoint, reset and delete reader groups.", no_args_is_help=True
)

Name = Annotated[str, typer.Argument(metavar="GROUP", help="The name of the group.", show_default=False)]


@commands.command(name="list")
def list_groups(context: typer.Context, as_json: AsJson = False) -> None:
    """List the reader groups. 'group lag' shows how far one of them is behind."""
    with session(context).connect() as client:
        found = dict(client.groups.states())
    if as_json:
        print_json([_summary(name, state) for name, state in found.items()])
    elif not found:
        say("There are no reader groups.")
    else:
        rows = [
            (name, ", ".join(state.config.streams), f"{state.number_of_segments:,}", f"{len(state.readers):,}")
            for name, state in found.items()
        ]
        numbers = ("segments", "readers")
        say(Table("group", "streams", *numbers, numbers=numbers, rows=rows))


@commands.command("info", hidden=True)  # as that of a stream is called
@commands.command()
def describe(context: typer.Context, group: Name, as_json: AsJson = False) -> None:
    """Show a group: its config, its readers, and the owner and position of each segment."""
    from ..group.conditions import condition
    from ..retries.waiting import summary
    from ..streams.config import by_number

    with session(context).connect() as client:
        found = client.groups.get(group)
        cuts = found.stream_cuts()
        state = found.state
        waiting = summary(client.store, group)
        wait = None if waiting.due is None else max(0.0, waiting.due - client.clock.time())
        deleted = () if as_json else _deleted_streams(client, state)
    if as_json:
        print_json(
            {
                **_summary(group, state),
                "config": state.config,
                "segments": {segment: _describe(segment, each) for segment, each in sorted(state.segments.items())},
                "stream_cuts": dict(cuts),
                **({} if wait is None else {"waiting_for_retry": waiting.events, "next_retry_in_seconds": wait}),
            }
        )
        return
    positions = {segment: offset for cut in cuts.values() for segment, offset in cut.offsets.items()}
    readers = count(len(state.readers), "reader")
    ended = "; it has read its streams to their end" if state.end_of_data else ""
    say(f"{group}: reads {', '.join(state.config.streams)} with {readers}{ended}")
    say(config_in_words(state.config))
    say("")
    are_weighed = state.config.balance == "load" or any(found.weight for found in state.segments.values())
    rows = [
        (
            *(segment, found.owner or "-", f"{positions.get(segment, found.offset):,}"),
            *((f"{found.load:,}",) if are_weighed else ()),
            condition(found),
        )
        for segment, found in by_number(state.segments)
    ]
    numbers = ("offset", *(("load",) if are_weighed else ()))
    say(Table("segment", "reader", *numbers, "is", numbers=numbers, rows=rows))
    idle = sorted(reader for reader in state.readers if not state.segments_of(reader))
    if idle:
        say(f"\nReaders without a segment: {', '.join(idle)}")
    _say_deleted(deleted)
    if wait is not None:
        more = "" if waiting.is_all else "More than "
        verb = "waits" if waiting.events == 1 else "wait"
        say(f"\n{more}{count(waiting.events, 'event')} {verb} for a retry, the next in {wait:,.0f} s")


def _deleted_streams(client: rg.Client, state: ReaderGroupState) -> Sequence[str]:
    return [stream for stream in state.config.streams if not client.streams.exists(stream)]


def _say_deleted(streams: Sequence[str]) -> None:
    if streams:
        say(f"\nDeleted streams, of which nothing is left to read: {', '.join(streams)}")


def config_in_words(config: rg.ReaderGroupConfig) -> str:
    """Return the settings as ``group create`` and ``group configure`` take them."""
    return ", ".join(f"{field}={_setting(getattr(config, field))}" for field in setting_names())


def setting_names() -> Sequence[str]:
    """Return the fields of the config that ``group create`` and ``group configure`` take as FIELD=VALUE."""
    return [field for field in rg.ReaderGroupConfig.model_fields if field not in ("streams", "start", "end")]


def _setting(value: float | str) -> str:
    return value if isinstance(value, str) else "none" if value == inf else f"{value:g}"


@commands.command()
def lag(context: typer.Context, group: Name, as_json: AsJson = False) -> None:
    """Show how far a group is behind its streams, by the positions that its readers have committed.

    If many events remain, their number is estimated from the size of the next events.
    """
    with session(context).connect() as client:
        behind = client.groups.get(group)
        found = behind.lag()
        deleted = () if as_json else _deleted_streams(client, behind.state)
    if as_json:
        print_json({"group": group, **found.totals._asdict(), "segments": dict(found.segments)})
    else:
        say(lag_table(found))
        _say_deleted(deleted)
        say(f"\n{group} is {count(found.events, 'event')} behind ({size(found.bytes)}, {found.seconds:,.1f} s)")


@commands.command()
def checkpoint(
    context: typer.Context,
    group: Name,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name of the checkpoint.", show_default=False)],
    timeout: Annotated[float, typer.Option(min=0, help="Seconds to wait until all readers have passed it.")] = 30.0,
    as_json: AsJson = False,
) -> None:
    """Take a checkpoint: let all readers of a group pass it, and show their positions there."""
    with session(context).connect() as client:
        taken = client.groups.get(group).checkpoint(name, timeout=timeout)
    if as_json:
        print_json(taken)
    else:
        say(f"{group}: {', '.join(map(str, taken.cuts.values()))}")


@commands.command()
def cancel_checkpoint(
    context: typer.Context,
    group: Name,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name of the checkpoint.", show_default=False)],
    as_json: AsJson = False,
) -> None:
    """Cancel a checkpoint that waits for readers. They go on without it."""
    with session(context).connect() as client:
        was_cancelled = client.groups.get(group).cancel_checkpoint(name)
    if as_json:
        print_json({"group": group, "checkpoint": name, "cancelled": was_cancelled})
        return
    say(f"{group}: {name} {'was cancelled' if was_cancelled else 'is not outstanding'}")


@commands.command()
def reset(
    context: typer.Context,
    group: Name,
    to: Annotated[
        str,
        typer.Option(
            help=(
                f"'head', 'tail', the name of a checkpoint, {TIME_HELP}, or JSON: what 'group checkpoint --json' "
                "prints, or the value of stream_cuts of 'group describe --json'."
            ),
            show_default=False,
        ),
    ],
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Move a group to another position. Running readers continue there."""
    with session(context).connect() as client:
        found = client.groups.get(group)
        place = _reset_target(found, to)
        confirm(f"Reset the reader group {group} to {to}?", yes)
        found.reset(place)
        cuts = found.stream_cuts()
    if as_json:
        print_json({"group": group, "stream_cuts": dict(cuts)})
        return
    say(f"{group}: continues at {', '.join(map(str, cuts.values()))}")


def _reset_target(group: rg.ReaderGroup, text: str) -> ResetTarget:
    match text:
        case "head" | "tail":
            return text
    if text.startswith("{"):
        from pydantic import TypeAdapter, ValidationError

        place = TypeAdapter[rg.Checkpoint | dict[str, rg.StreamCut]](rg.Checkpoint | dict[str, rg.StreamCut])
        try:
            return place.validate_json(text)
        except ValidationError as error:
            raise WrongUsage(
                "the JSON is neither a checkpoint nor cuts by stream; use what 'group checkpoint --json' prints, or "
                "the value of stream_cuts of 'group describe --json'"
            ) from error
    checkpoints = group.checkpoints
    if text in checkpoints:
        return checkpoints[text]
    names = ", ".join(checkpoints) or "none"
    return parse_time("--to", text, or_use=f"head, tail or a checkpoint of the group; its checkpoints: {names}")


@commands.command()
def delete(context: typer.Context, group: Name, yes: Yes = False, as_json: AsJson = False) -> None:
    """Delete a group and its positions, permanently."""
    with session(context).connect() as client:
        with expected_to_exist("group"):
            client.groups.get(group)
        confirm(f"Delete the reader group {group} and its positions?", yes)
        client.groups.delete(group)
    if as_json:
        print_json({"group": group, "deleted": True})
    else:
        say(f"{group}: deleted")


def lag_table(lag: rg.GroupLag, rates: Mapping[rg.SegmentId, float] | None = None) -> Table:
    """Return a table with a row for each segment that is not read to its end, and its ``rates`` in bytes per second."""
    from ..streams.config import by_number

    rows = [
        (
            *(segment, each.owner or "-", f"{each.events:,}", size(each.bytes), f"{each.seconds:,.1f}"),
            *(() if rates is None else (f"{size(round(rates[segment]))}/s" if segment in rates else "",)),
        )
        for segment, each in by_number(lag.segments)
    ]
    numbers = ("events", "size", "seconds", *(() if rates is None else ("read",)))
    return Table("segment", "reader", *numbers, numbers=numbers, rows=rows)


def _summary(name: str, state: rg.ReaderGroupState) -> dict[str, object]:
    return {
        "group": name,
        "streams": list(state.config.streams),
        "number_of_segments": state.number_of_segments,
        "readers": {reader: sorted(state.segments_of(reader)) for reader in sorted(state.readers)},
        "unassigned": sorted(state.unassigned),
        "end_of_data": state.end_of_data,
    }


def _describe(segment: rg.SegmentId, found: SegmentState) -> dict[str, object]:
    from ..group.conditions import condition

    return {
        "owner": found.owner,
        "fencing_token": found.token,
        "target": found.target,
        "load": found.load,
        "is": condition(found),
    }
