"""``readergroup stream``: creates, shows, configures, scales, seals, truncates and deletes streams.

`transfer` copies them, `retention` and `scaling` have what the policies need.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer

import readergroup as rg

from ..words import count
from .retention import (
    ConsumedBy,
    MaxAge,
    MaxBytes,
    MinAge,
    MinBytes,
    in_words,
    policy_of,
    retain_all,
    show_report,
)
from .scaling import (
    LeastSegments,
    MaxSegments,
    ScaleBytes,
    ScaleEvents,
    Segments,
    scaling_in_words,
    scaling_of,
    show_scaling,
)
from .screen import print_json, say, size
from .session import WrongUsage, expected_to_exist, session
from .tables import Table
from .times import shown_time

if TYPE_CHECKING:
    from ..streams.state import StreamState

commands = typer.Typer(
    help="Create, show, configure, scale, seal, truncate, copy, export, import and delete streams.",
    no_args_is_help=True,
)

Name = Annotated[
    str, typer.Argument(metavar="STREAM", help="The name of the stream, as 'scope/name'.", show_default=False)
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation. Without a terminal, it is required.")]
Split = Annotated[list[str], typer.Option(metavar="SEGMENTS", help="Segments to split, such as 1,2 or shop/orders/1.")]
Merge = Annotated[list[str], typer.Option(metavar="SEGMENTS", help="Neighbouring segments to merge, such as 1,2.")]

#: The text of a cut, as ``str`` makes it.
_PRINTED_CUT: Final = re.compile(r"(\S+/\S+)\[([0-9]+:[0-9]+(?:, [0-9]+:[0-9]+)*)\]")
Tags = Annotated[
    list[str] | None,
    typer.Option("--tag", metavar="NAME=VALUE", help="A tag; may be given several times.", show_default=False),
]

_NO_SEGMENTS: Final[list[str]] = []
#: The most numbers of segments, or runs of them, on one line.
_NUMBERS: Final = 10
_OTHER_PROGRAMS: Final = (
    "A program that calls streams.create with another config fails at its next start: change it, or call streams.info "
    "there instead."
)
#: Where a cut is in what commands print.
_CUT_IN_JSON: Final = "the value of head or tail of 'stream info --json'"


@commands.command()
def create(
    context: typer.Context,
    stream: Name,
    segments: Segments = None,
    scale_events: ScaleEvents = None,
    scale_bytes: ScaleBytes = None,
    max_segments: MaxSegments = None,
    max_age: MaxAge = None,
    max_bytes: MaxBytes = None,
    min_age: MinAge = None,
    min_bytes: MinBytes = None,
    consumed_by: ConsumedBy = None,
    tag: Tags = None,
    as_json: AsJson = False,
) -> None:
    """Create a stream. If it exists with these options, nothing changes."""
    retention = policy_of(max_age, max_bytes, min_age, min_bytes, consumed_by)
    scaling = scaling_of(segments, scale_events, scale_bytes, max_segments)
    with session(context).connect(may_create=True) as client:
        show_change(client.streams.create(stream, scaling=scaling, retention=retention, tags=_tags(tag)), as_json)


@commands.command()
def configure(
    context: typer.Context,
    stream: Name,
    segments: LeastSegments = None,
    scale_events: ScaleEvents = None,
    scale_bytes: ScaleBytes = None,
    max_segments: MaxSegments = None,
    no_scaling: Annotated[
        bool, typer.Option("--no-scaling", help="Scale no more by itself: the stream keeps its segments.")
    ] = False,
    max_age: MaxAge = None,
    max_bytes: MaxBytes = None,
    min_age: MinAge = None,
    min_bytes: MinBytes = None,
    consumed_by: ConsumedBy = None,
    no_retention: Annotated[bool, typer.Option("--no-retention", help="Keep all events from now on.")] = False,
    tag: Tags = None,
    no_tags: Annotated[bool, typer.Option("--no-tags", help="Remove all tags.")] = False,
    as_json: AsJson = False,
) -> None:
    """Set how a stream scales by itself, which events it deletes, or its tags: options replace all of a kind."""
    retention = policy_of(max_age, max_bytes, min_age, min_bytes, consumed_by)
    scaling = scaling_of(segments, scale_events, scale_bytes, max_segments)
    if retention is not None and no_retention:
        raise WrongUsage("use either options such as --retention-max-age 7d, or --no-retention")
    if scaling is not None and no_scaling:
        raise WrongUsage("use either --scale-events or --scale-bytes, or --no-scaling")
    if scaling is not None and scaling.load is None:
        raise WrongUsage(
            "--segments is the least number for --scale-events or --scale-bytes; split or merge segments with "
            "'readergroup stream scale'"
        )
    tags = {} if no_tags else _tags(tag)
    if no_tags and tag:
        raise WrongUsage("use either --tag or --no-tags")
    if retention is None and scaling is None and tags is None and not no_retention and not no_scaling:
        raise WrongUsage(
            "use options such as --scale-events 1000, --no-scaling, --retention-max-age 7d or --no-retention"
        )
    with session(context).connect() as client:
        if no_scaling:
            scaling = rg.ScalingPolicy.fixed(len(client.streams.info(stream).segments))
        found = client.streams.configure(
            stream, scaling=scaling, retention="none" if no_retention else retention, tags=tags
        )
    if as_json:
        print_json(found)
        return
    if no_scaling:
        kept = count(len(found.segments), "segment")
        say(f"{found.name}: keeps its {kept}; from now on only 'stream scale' changes their number")
    elif scaling is not None:
        say(f"{found.name}: {scaling_in_words(found.config.scaling)}")
    if retention is not None or no_retention:
        say(f"{found.name}: {in_words(found.config.retention)}")
    if tags is not None:
        say(f"{found.name}: {_tags_in_words(found.config) or 'no tags'}")
    say(_OTHER_PROGRAMS)


@commands.command()
def retain(
    context: typer.Context,
    stream: Annotated[
        str | None, typer.Argument(metavar="STREAM", help="Default: all with a retention policy.", show_default=False)
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Delete nothing; show what would be deleted.")] = False,
    as_json: AsJson = False,
) -> None:
    """Delete what retention policies no longer keep. Readers and writers do this once a minute; use it from cron."""
    with session(context).connect() as client:
        retain_all(client, stream, dry_run=dry_run, as_json=as_json)


@commands.command(name="list")
def list_streams(
    context: typer.Context,
    scope: Annotated[
        str | None,
        typer.Argument(metavar="SCOPE", help="Show only the streams of this scope. Default: all.", show_default=False),
    ] = None,
    tag: Tags = None,
    with_size: Annotated[
        bool, typer.Option("--size", help="Show how much data the store keeps of each, and begin with the largest.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List the streams."""
    tags = _tags(tag)
    none = "There are no streams." if scope is None and tags is None else "No stream matches."
    with session(context).connect() as client:
        if with_size:
            if as_json:
                raise WrongUsage("--json has the head and the tail of each stream, and no size; leave out --size")
            _list_by_size(client, list(client.streams.states(scope, tag=tags)), none)
            return
        if as_json:
            print_json(list(client.streams.describe_all(scope, tag=tags)))
            return
        rows = [
            (state.name, f"{len(state.current):,}", f"{max(0, state.epoch):,}", _condition(state))
            for state in client.streams.states(scope, tag=tags)
        ]
    if rows:
        say(Table("stream", "segments", "epoch", "is", numbers=("segments", "epoch"), rows=rows))
    else:
        say(none)


def _list_by_size(client: rg.Client, states: Sequence[StreamState], none: str) -> None:
    segments = {state.name: [state.data_segment(number) for number in state.segments] for state in states}
    found = client.store.infos([segment for each in segments.values() for segment in each])
    sizes = {
        stream: sum(found[segment].length - found[segment].start_offset for segment in each if segment in found)
        for stream, each in segments.items()
    }
    rows = [(stream, size(kept)) for stream, kept in sorted(sizes.items(), key=lambda each: (-each[1], each[0]))]
    if rows:
        say(Table("stream", "size", numbers=("size",), rows=rows))
        say(f"\nThey hold {size(sum(sizes.values()))}, without what states, groups and the store itself need.")
    else:
        say(none)


@commands.command("describe", hidden=True)  # as that of a group is called
@commands.command()
def info(context: typer.Context, stream: Name, as_json: AsJson = False) -> None:
    """Show a stream: its segments with their key ranges, the start and end of its data, and what its policies do."""
    with session(context).connect() as client:
        found = client.streams.info(stream)
        report = None
        if found.config.retention is not None and not as_json:
            report = client.streams.retain(stream, dry_run=True)
    if as_json:
        print_json(found)
        return
    described = f"{count(len(found.segments), 'segment')}, epoch {found.epoch}, {_condition(found)}"
    say(f"{found.name}: {', '.join(filter(None, (described, _tags_in_words(found.config))))}")
    say("")
    rows = []
    for segment, keys in found.segments.items():
        starts, ends = found.head.offsets.get(segment, 0), found.tail.offsets[segment]
        rows.append((segment, str(keys), f"{starts:,}", f"{ends:,}", size(ends - starts)))
    numbers = ("starts at", "ends at", "size")
    say(Table("segment", "keys", *numbers, numbers=numbers, rows=rows))
    earlier = sorted(set(found.head.offsets) - set(found.segments), key=_number_of)
    if earlier:
        say(f"\nThe data at the head starts in earlier segments: {_places(found.head, earlier)}.")
    if found.watermark is not None:
        say(f"\nWatermark of event time: {shown_time(found.watermark, 'milliseconds')}")
    if found.scaling is not None:
        show_scaling(found.config.scaling, found.scaling)
    if report is not None:
        say(f"\nRetention: {in_words(report.policy)}. Next:")
        show_report(report, dry_run=True)


@commands.command()
def scale(
    context: typer.Context,
    stream: Name,
    split: Split = _NO_SEGMENTS,
    merge: Merge = _NO_SEGMENTS,
    at: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY", help="Split the segment of this routing key at the key.", show_default=False),
    ] = None,
    ranges: Annotated[
        str | None,
        typer.Option(
            metavar="RANGES",
            help="Key ranges of new segments, such as 0-0.2,0.2-0.5. They replace all segments that they overlap.",
            show_default=False,
        ),
    ] = None,
    into: Annotated[
        int | None, typer.Option(min=2, help="The number of equal parts for --split. Default: 2.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Split segments, or merge neighbours into one. Writers and readers continue."""
    if sum(map(bool, (split, merge, at, ranges))) != 1:
        raise WrongUsage("use one of --split SEGMENTS, --merge SEGMENTS, --at KEY and --ranges RANGES")
    if into is not None and not split:
        raise WrongUsage("--into needs --split SEGMENTS")
    if at and not all(at):
        raise WrongUsage("--at needs a routing key, not an empty text")
    with session(context).connect() as client:
        if split:
            found = client.streams.scale(stream, split=_segments(split), into=into or 2)
        elif merge:
            found = client.streams.scale(stream, merge=_segments(merge))
        elif at:
            found = client.streams.scale(stream, at=at)
        else:
            found = client.streams.scale(stream, ranges=_ranges(ranges or ""))
    show_change(found, as_json)


@commands.command()
def seal(context: typer.Context, stream: Name, yes: Yes = False, as_json: AsJson = False) -> None:
    """Seal a stream, permanently. It takes no more events, and a group is done when it has read it to the end."""
    with session(context).connect() as client:
        client.streams.info(stream)
        confirm(f"Seal the stream {stream}, so that it takes no more events?", yes)
        show_change(client.streams.seal(stream), as_json)


@commands.command()
def truncate(
    context: typer.Context,
    stream: Name,
    cut: Annotated[
        str,
        typer.Argument(
            metavar="CUT",
            help=(
                f"'tail', or a cut: {_CUT_IN_JSON}, or that of a stream in stream_cuts of 'group describe --json'. "
                "'-' reads the cut from standard input."
            ),
        ),
    ],
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Delete the data before a cut, permanently."""
    with session(context).connect() as client:
        tail = client.streams.info(stream).tail
        place = tail if cut == "tail" else parse_cut(cut)
        confirm(f"Delete the data of the stream {stream} before {'its tail' if cut == 'tail' else place}?", yes)
        client.streams.truncate(stream, place)
        found = client.streams.info(stream)
    if as_json:
        print_json(found)
    else:
        say(f"{found.name}: data starts in {_places(found.head, sorted(found.head.offsets, key=_number_of))}")


@commands.command()
def delete(context: typer.Context, stream: Name, yes: Yes = False, as_json: AsJson = False) -> None:
    """Delete a stream and its data, permanently."""
    with session(context).connect() as client:
        # Deletion discards an unfinished copy.
        with expected_to_exist("stream"), suppress(rg.StreamBeingCopiedError):
            client.streams.info(stream)
        confirm(f"Delete the stream {stream} and all its data?", yes)
        client.streams.delete(stream)
    if as_json:
        print_json({"stream": stream, "deleted": True})
    else:
        say(f"{stream}: deleted")


def confirm(question: str, yes: bool) -> None:
    """Ask on a terminal, unless ``yes``; raise `WrongUsage` where nobody can answer."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise WrongUsage(f"{question} Nobody can answer without a terminal; add --yes to do it")
    try:
        is_confirmed = typer.confirm(question, err=True)
    except typer.Abort:  # Ctrl-C or Ctrl-D: what is printed next begins a line
        print(file=sys.stderr)
        raise
    if not is_confirmed:
        raise typer.Abort


def show_change(found: rg.StreamInfo, as_json: bool) -> None:
    """Print the present form of a stream on one line."""
    if as_json:
        print_json(found)
        return
    segments = _numbers_in_words([_number_of(segment) for segment in found.segments])
    say(f"{found.name}: {count(len(found.segments), 'segment')} ({segments}), epoch {found.epoch}, {_condition(found)}")


def _numbers_in_words(numbers: list[int]) -> str:
    """Return the numbers of segments: all of a few, and the runs of many."""
    if len(numbers) <= _NUMBERS:
        return ", ".join(map(str, numbers))
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    shown = [(" to " if run[-1] > run[0] + 1 else ", ").join(map(str, run)) for run in runs[:_NUMBERS]]
    return ", ".join(shown + ["..."] * (len(runs) > _NUMBERS))


def _number_of(segment: rg.SegmentId) -> int:
    from ..streams.config import number_of

    return number_of(segment)


def _condition(found: rg.StreamInfo | StreamState) -> str:
    return "sealed" if found.sealed else "open"


def _tags(given: list[str] | None) -> dict[str, str] | None:
    if not given:
        return None
    tags: dict[str, str] = {}
    for each in given:
        name, _, value = each.partition("=")
        if not name or not value:
            raise WrongUsage(f"a tag must be written like team=payments, not {each!r}")
        if tags.setdefault(name, value) != value:
            raise WrongUsage(f"a stream has one value of a tag, so give --tag {name}=... once")
    return tags


def _tags_in_words(config: rg.StreamConfig) -> str:
    return ", ".join(f"{name}={value}" for name, value in sorted((config.tags or {}).items()))


def _places(cut: rg.StreamCut, segments: list[rg.SegmentId]) -> str:
    if len(segments) > _NUMBERS:
        numbers = _numbers_in_words([_number_of(segment) for segment in segments])
        return f"{count(len(segments), 'segment')} ({numbers}); 'stream info --json' has their offsets, as head"
    return ", ".join(f"{segment} at {cut.offsets[segment]:,}" for segment in segments)


def _segments(given: list[str]) -> list[int | str]:
    """Return numbers and names of segments."""
    parts = [part.strip() for each in given for part in each.split(",")]
    if not all("/" in part or (part.isascii() and part.isdigit()) for part in parts):
        raise WrongUsage(f"segments must be written like 1,2 or shop/orders/1, not {','.join(given)!r}")
    return [part if "/" in part else int(part) for part in parts]


def _ranges(text: str) -> list[tuple[float, float]]:
    try:
        parts = [each.split("-") for each in text.split(",")]
        return [(float(low), float(high)) for low, high in parts]
    except ValueError as error:
        raise WrongUsage(f"ranges must be written like 0-0.2,0.2-0.5, not {text!r}") from error


def parse_place(text: str | None) -> rg.StreamCut | Literal["head", "tail"] | None:
    """Parse the value of an option for a cut."""
    match text:
        case None | "head" | "tail":
            return text
    return parse_cut(text)


def parse_cut(text: str) -> rg.StreamCut:
    from pydantic import ValidationError

    text = sys.stdin.read() if text == "-" else text
    try:
        if printed := _PRINTED_CUT.fullmatch(text.strip()):
            offsets = (each.split(":") for each in printed[2].split(", "))
            cut = {"stream": printed[1], "offsets": {f"{printed[1]}/{number}": int(at) for number, at in offsets}}
            return rg.StreamCut.model_validate(cut)
        return rg.StreamCut.model_validate_json(text)
    except ValidationError as error:
        raise WrongUsage(
            f"this is not a cut; use {_CUT_IN_JSON}, that of a stream in stream_cuts of 'group describe --json', or "
            "text such as 'shop/orders[0:120, 1:80]'"
        ) from error
