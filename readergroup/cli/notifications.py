"""``readergroup group notifications``: shows the recorded notifications of a group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

import readergroup as rg
from synchronizer.threads.flag import Flag

from .groups import Name, commands
from .screen import out, print_json, say, warn
from .session import WrongUsage, ended_by_signal, session
from .streams import AsJson
from .times import shown_time
from .watching import words

if TYPE_CHECKING:
    from rich.table import Table

_TIME_WIDTH = len("2026-01-31T23:59:59Z")


@commands.command()
def notifications(
    context: typer.Context,
    group: Name,
    start: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="REVISION",
            help="Start at this revision of the group, such as 120:0. Default: the oldest.",
            show_default=False,
        ),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Continue with new notifications, until Ctrl-C.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the recorded notifications of a group: changes of segments and readers, end of data, lag.

    Times are in UTC, by the clock of the recording process. With --follow, ends with Ctrl-C, and waits while the
    store is unavailable. With --json, prints one line per notification.
    """
    first = _revision(start)
    stop = Flag()
    with ended_by_signal(stop.set), session(context).connect() as client:
        record = client.groups.get(group).notification_record
        if follow and ((found := record.range()) is None or found.start == found.end):
            warn(_nothing(group))
        is_empty = True
        for notification in record.follow(first, stop=stop) if follow else record.read(first):
            is_empty = False
            if as_json:
                print_json({"type": type(notification).__name__, **notification.model_dump(mode="json")})
            else:
                out().print(_row(notification))
            if stop.is_set():
                return
    if is_empty and not as_json and not stop.is_set():
        say(_nothing(group))


def _nothing(group: str) -> str:
    return f"Nothing is recorded for {group}. A process records notifications after it calls record_notifications()."


def _revision(text: str | None) -> rg.Revision | None:
    try:
        return None if text is None else rg.Revision.parse(text)
    except rg.InvalidArgumentError as error:
        raise WrongUsage(str(error)) from error


def _row(notification: rg.Notification) -> Table:
    """Return a row with the time, the revision and the notification, folded if it is long."""
    from rich.table import Table

    row = Table.grid(padding=(0, 2))
    row.add_column(width=_TIME_WIDTH)
    row.add_column(min_width=8, justify="right", no_wrap=True)
    row.add_column(overflow="fold")
    row.add_row(shown_time(notification.seen_at), str(notification.revision), words(notification))
    return row
