"""``readergroup dead-letters``: lists, shows, replays and discards the events that pools and queues have set aside."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

import readergroup as rg

from ..words import count
from .screen import clipped, print_json, progress, say
from .session import Failed, WrongUsage, check_not_negative, session
from .streams import AsJson, Name, Yes, confirm
from .tables import Table
from .times import TIME_HELP, parse_time, shown_time

if TYPE_CHECKING:
    from ..dead_letters.statuses import Status

commands = typer.Typer(
    help="List, show, replay and discard dead letters: the events that pools and queues have set aside.",
    no_args_is_help=True,
)

#: What a table shows of an error.
_ERROR_WIDTH: Final = 200

Letters = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="LETTER",
        help="Letters, as 'dead-letters list' names them, or their events, as logs name them. Default: all.",
        show_default=False,
    ),
]
IsQueue = Annotated[
    bool, typer.Option("--queue", help="STREAM is an event queue: its letters, instead of those in a stream.")
]
Error = Annotated[
    str | None,
    typer.Option(metavar="TEXT", help="Only letters with this text, in this case, in their error, such as ValueError."),
]
Since = Annotated[
    str | None, typer.Option(metavar="TIME", help=f"Only letters that were set aside since then: {TIME_HELP}.")
]
Until = Annotated[str | None, typer.Option(metavar="TIME", help="Only letters that were set aside before then.")]
Key = Annotated[str | None, typer.Option(metavar="KEY", help="Only letters with this routing key.")]
Limit = Annotated[
    int | None, typer.Option(metavar="N", help="At most N letters. Default: no limit.", callback=check_not_negative)
]


@commands.command(name="list")
def list_letters(
    context: typer.Context,
    stream: Name,
    status: Annotated[
        str, typer.Option(metavar="STATUS", help="Which letters: pending, replayed, discarded or all.")
    ] = "pending",
    error: Error = None,
    since: Since = None,
    until: Until = None,
    key: Key = None,
    limit: Limit = None,
    is_queue: IsQueue = False,
    as_json: AsJson = False,
) -> None:
    """List dead letters with the first line of their errors, and count the others. With --json, one object per line."""
    wanted = _status(status)
    filters = _filters(error, since, until, key)
    with session(context).connect() as client:
        letters = _letters(client, stream, is_queue)
        if as_json:
            for each in letters.list(status=wanted, limit=limit, **filters):
                print_json(_fields(each))
            return
        counts: dict[Status, int] = {"pending": 0, "replayed": 0, "discarded": 0}
        rows: list[tuple[str, ...]] = []
        for each in letters.list(status=None, **filters):
            counts[each.status] += 1
            if wanted in (None, each.status) and (limit is None or len(rows) < limit):
                rows.append(_row(each))
    if rows:
        say(Table("letter", "set aside", "key", "from", "error", "is", rows=rows))
        say("")
    shown = sum(counts.values()) if wanted is None else counts[wanted]
    more = f"; shown are the first {len(rows):,}" if len(rows) < shown else ""
    say(f"{stream}: {', '.join(f'{number:,} {each}' for each, number in counts.items())}{more}")


@commands.command()
def show(
    context: typer.Context,
    stream: Name,
    letter: Annotated[
        str,
        typer.Argument(
            metavar="LETTER",
            help="A letter, as 'dead-letters list' names it, or its event, as logs name it.",
            show_default=False,
        ),
    ],
    is_queue: IsQueue = False,
    as_json: AsJson = False,
) -> None:
    """Show a dead letter: its event, why it was set aside, and what became of it."""
    with session(context).connect() as client:
        found = _letters(client, stream, is_queue).show(letter)
    if as_json:
        print_json(_fields(found))
        return
    say(f"{_name(found)}: {found.status}, set aside at {shown_time(found.written_at)}")
    say(f"event: {found.letter.pointer}")
    if found.routing_key is not None:
        say(f"key: {found.routing_key}")
    for name, value in found.headers.items():
        say(f"header {name}: {_text(value)}")
    say(f"attempts: {found.letter.attempts:,}")
    say(f"error: {found.letter.error}")
    say(f"data: {_text(found.letter.data)}")


@commands.command()
def replay(
    context: typer.Context,
    stream: Name,
    letters: Letters = None,
    error: Error = None,
    since: Since = None,
    until: Until = None,
    key: Key = None,
    limit: Limit = None,
    is_queue: IsQueue = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Write the events of pending letters back to their streams, each once. You can repeat an interrupted command."""
    _work(
        context,
        "replay",
        stream,
        is_queue,
        letters,
        {**_filters(error, since, until, key), "limit": limit},
        yes,
        as_json,
    )


@commands.command()
def discard(
    context: typer.Context,
    stream: Name,
    letters: Letters = None,
    error: Error = None,
    since: Since = None,
    until: Until = None,
    key: Key = None,
    limit: Limit = None,
    is_queue: IsQueue = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Mark pending letters as discarded, permanently, so that no replay takes them. They stay in the stream."""
    _work(
        context,
        "discard",
        stream,
        is_queue,
        letters,
        {**_filters(error, since, until, key), "limit": limit},
        yes,
        as_json,
    )


def _work(
    context: typer.Context,
    what: str,
    stream: str,
    is_queue: bool,
    names: list[str] | None,
    filters: dict[str, Any],
    yes: bool,
    as_json: bool,
) -> None:
    if names and any(value is not None for value in filters.values()):
        raise WrongUsage("name letters, or use options to select them, but not both")
    others = settled = 0  # the pending letters, if none of them matches; those named that are not pending
    with session(context).connect() as client:
        letters = _letters(client, stream, is_queue)
        pointers: list[rg.EventPointer] = []
        if names:
            found = {each.pointer: each.status for each in map(letters.show, names)}
            pointers = [*found]
            pending = [*found.values()].count("pending")
            settled = len(found) - pending
        else:
            pending = sum(1 for _ in letters.list(**filters))
            if not pending and filters["limit"] != 0:
                others = sum(1 for _ in letters.list())
        call: Callable[..., int] = letters.replay if what == "replay" else letters.discard
        if pending or names:
            if pending:
                confirm(f"{what.capitalize()} {count(pending, 'dead letter')} of {stream}?", yes)
            with _progress(f"{what} of {stream}", pending) as on_progress:
                pending = call(*pointers, **({} if names else filters), on_progress=on_progress)
    done = {"replay": "replayed", "discard": "discarded"}[what]
    if as_json:
        print_json({"stream": stream, done: pending})
    else:
        more = f"; none of {count(others, 'pending letter')} matches" if others else ""
        more += f"; {settled:,} of those named {'was' if settled == 1 else 'were'} no longer pending" if settled else ""
        say(f"{stream}: {count(pending, 'dead letter')} {done}{more}")


@contextmanager
def _progress(title: str, total: int) -> Iterator[Callable[[int], None]]:
    shown = 0
    with progress(title, total) as advance:

        def on_progress(done: int) -> None:
            nonlocal shown
            advance(done - shown, f"{done:,} of {total:,}")
            shown = done

        yield on_progress


def _filters(error: str | None, since: str | None, until: str | None, key: str | None) -> dict[str, Any]:
    return {
        "error": error,
        "since": None if since is None else parse_time("--since", since),
        "until": None if until is None else parse_time("--until", until),
        "routing_key": key,
    }


def _status(text: str) -> Status | None:
    match text:
        case "all":
            return None
        case "pending" | "replayed" | "discarded":
            return text
    raise WrongUsage(f"--status takes pending, replayed, discarded or all, not {text!r}")


def _letters(client: rg.Client, name: str, is_queue: bool) -> rg.DeadLetters:
    from synchronizer.recipes.queue.dead_letters import QUEUE_PREFIX

    segment = f"{QUEUE_PREFIX}{name}"
    has_queue = segment in client.store.list(segment)
    if is_queue:
        if not has_queue:
            queues = [each.removeprefix(QUEUE_PREFIX) for each in client.store.list(QUEUE_PREFIX)]
            raise Failed(f"there is no queue {name}; the queues: {', '.join(queues) or 'none'}")
        return client.dead_letters(queue=name)
    if has_queue and ("/" not in name or not client.streams.exists(name)):
        raise WrongUsage(f"{name} is an event queue; add --queue")
    return client.dead_letters(name)


def _name(letter: rg.StoredDeadLetter) -> str:
    if letter.is_of_queue:
        return str(letter.pointer.offset)
    return f"{letter.pointer.segment.rpartition('/')[2]}:{letter.pointer.offset}"


def _row(letter: rg.StoredDeadLetter) -> tuple[str, ...]:
    first, _, rest = letter.letter.error.partition("\n")
    return (
        _name(letter),
        shown_time(letter.written_at),
        letter.routing_key or "-",
        letter.stream,
        clipped(f"{first} ..." if rest else first, _ERROR_WIDTH),
        letter.status,
    )


def _fields(letter: rg.StoredDeadLetter) -> dict[str, object]:
    found: dict[str, object] = {
        "letter": str(letter.pointer),
        "status": letter.status,
        "set_aside_at": letter.written_at.isoformat(),
        "stream": letter.stream,
        "pointer": str(letter.letter.pointer),
        "error": letter.letter.error,
        "attempts": letter.letter.attempts,
    }
    if letter.routing_key is not None:
        found["routing_key"] = letter.routing_key
    if letter.event_time is not None:
        found["event_time"] = letter.event_time.isoformat()
    if letter.headers:
        found["headers_base64"] = {name: base64.b64encode(value).decode() for name, value in letter.headers.items()}
    try:
        found["data"] = letter.letter.data.decode()
    except UnicodeDecodeError:
        found["data_base64"] = base64.b64encode(letter.letter.data).decode()
    return found


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return f"{base64.b64encode(data).decode()} (base64)"
