"""``readergroup watch``: shows a group while it works."""

from __future__ import annotations

from collections.abc import Mapping
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Final

import typer

import readergroup as rg
from synchronizer import ReaderGroupError

from ..words import count
from .escaping import printable
from .groups import Name, lag_table
from .screen import out, print_json, size
from .session import ended_by_signal, session
from .streams import AsJson
from .times import shown_time

if TYPE_CHECKING:
    from rich.console import RenderableType

    from synchronizer.liveness.lease import LeaseObserver

#: How often the lag is checked. Notifications arrive at once.
_LOOK_SECONDS: Final = 1.0


def watch(context: typer.Context, group: Name, as_json: AsJson = False) -> None:
    """Show a group's segments, owners and lag as they change, and its notifications as they arrive.

    Ends with Ctrl-C, or when the group has read all of its streams to the end. With --json, prints one line per
    notification.
    """
    heard = _Heard()
    with ended_by_signal(heard.stop), session(context).connect() as client:
        found = client.groups.get(group)
        for notifier in (
            found.segment_notifier,
            found.reader_notifier,
            found.end_of_data_notifier,
            found.retention_notifier,
        ):
            notifier.register_listener(heard.put)
        found.lag_notifier().register_listener(heard.put_lag)
        if as_json:
            _print_json_lines(heard)
        elif out().is_terminal:
            _show_live(found, heard)
        else:
            _print_lines(heard)


class _Heard:
    """Notifications that wait to be shown."""

    def __init__(self) -> None:
        # A queue that is safe in signal handlers; None marks the end.
        self._queue: SimpleQueue[rg.Notification | None] = SimpleQueue()
        self.put = self._queue.put
        self._lag_was_high = False

    def put_lag(self, notification: rg.LagNotification) -> None:
        """Put it, unless it is the first one and says that all is well."""
        if notification.behind or notification.stalled or self._lag_was_high:
            self._lag_was_high = True
            self.put(notification)

    def stop(self) -> None:
        self._queue.put(None)

    def take(self) -> list[rg.Notification] | None:
        """Return the notifications that arrive within a moment; None at the end."""
        taken = []
        try:
            found = self._queue.get(timeout=_LOOK_SECONDS)
            while found is not None:
                taken.append(found)
                found = self._queue.get_nowait()
        except Empty:
            return taken
        return None


def _print_json_lines(heard: _Heard) -> None:
    while (taken := heard.take()) is not None:
        for notification in taken:
            print_json({"type": type(notification).__name__, **notification.model_dump(mode="json")})
        if _ended(taken):
            return


def _print_lines(heard: _Heard) -> None:
    while (taken := heard.take()) is not None:
        for notification in taken:
            out().print(line_of(notification))
        if _ended(taken):
            return


def _show_live(group: rg.ReaderGroup, heard: _Heard) -> None:
    from rich.live import Live

    from synchronizer.liveness.lease import LeaseObserver

    leases, rates = LeaseObserver(), _Rates()
    with Live(_picture(group, leases, rates), console=out(), auto_refresh=False) as live:
        while (taken := heard.take()) is not None:
            for notification in taken:
                live.console.print(line_of(notification))
            live.update(_picture(group, leases, rates), refresh=True)
            if _ended(taken):
                return


def _ended(taken: list[rg.Notification]) -> bool:
    return any(isinstance(notification, rg.EndOfDataNotification) for notification in taken)


class _Rates:
    """How fast the committed positions move, from one look to the next."""

    def __init__(self) -> None:
        self._looked_at = 0.0
        self._offsets: Mapping[rg.SegmentId, int] = {}

    def look(self, lag: rg.GroupLag, now: float) -> Mapping[rg.SegmentId, float]:
        """Return the bytes per second of the segments that were there at the last look."""
        offsets = {segment: each.offset for segment, each in lag.segments.items()}
        before, passed = self._offsets, now - self._looked_at
        self._offsets, self._looked_at = offsets, now
        common = offsets.keys() & before.keys() if passed > 0 else ()
        return {segment: max(0, offsets[segment] - before[segment]) / passed for segment in common}


def _picture(group: rg.ReaderGroup, leases: LeaseObserver, rates: _Rates) -> RenderableType:
    try:
        lag = group.lag()
        read = rates.look(lag, group.synchronizer.clock.monotonic())
        silent = _silent(group, leases)
    except ReaderGroupError as error:
        return printable(str(error))
    from rich.console import Group

    readers = count(group.state.number_of_readers, "reader")
    without = f" (lease expired: {', '.join(silent)})" if silent else ""
    return Group("", lag_table(lag, read), f"\n{group.name}: {readers}{printable(without)}, {behind(lag)}")


def _silent(group: rg.ReaderGroup, leases: LeaseObserver) -> list[str]:
    """Return the readers whose lease has expired: a group without live readers never declares them dead."""
    from synchronizer.liveness.lease import read_leases

    state, synchronizer = group.state, group.synchronizer
    with_lease = {reader: found for reader, found in state.readers.items() if found.lease is not None}
    asked_at = synchronizer.clock.monotonic()
    values = read_leases(synchronizer.store, synchronizer.segment, with_lease.values())
    now = synchronizer.clock.monotonic()
    timeout_seconds = state.config.reader_timeout_seconds
    return sorted(leases.observe(now, with_lease, values, timeout_seconds, renewed_at=now, asked_at=asked_at))


def behind(lag: rg.GroupLag | rg.LagSample | rg.LagNotification) -> str:
    return f"{count(lag.events, 'event')} behind ({size(lag.bytes)}, {lag.seconds:,.1f} s)"


def line_of(notification: rg.Notification) -> str:
    """Return a notification on one line, for people."""
    return f"{shown_time(notification.seen_at)}  {words(notification)}"


def words(notification: rg.Notification) -> str:
    """Return a notification in words, and whether it skips changes."""
    gap = "  (some earlier changes are missing)" if notification.gap else ""
    return printable(_words_of_kind(notification)) + gap


def _words_of_kind(notification: rg.Notification) -> str:
    from ..group import words as of_group
    from ..streams.config import parts_of

    match notification:
        case rg.SegmentNotification(segments=segments) if segments:
            return f"{of_group.words(notification)} ({', '.join(sorted(segments, key=parts_of))})"
        case rg.LagSample():
            return f"lag: {behind(notification)}"
        case rg.LagNotification():
            stalled = [
                f"{segment} stalls at {reader or 'no reader'}" for segment, reader in notification.stalled.items()
            ]
            level = "the group is" if notification.behind else "within the limit:"
            return f"lag: {'; '.join([f'{level} {behind(notification)}', *stalled])}"
        case _:
            return of_group.words(notification)
