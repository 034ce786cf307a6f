"""What ``readergroup watch`` shows on a terminal, looked at in one process."""

from __future__ import annotations

import io

from rich.console import Console

import readergroup as rg
from readergroup import testing
from readergroup.cli.watching import _picture, _Rates, line_of
from readergroup.testing import failing_store, manual_clock, reader_group_client  # noqa: F401
from synchronizer.liveness.lease import Lease, LeaseObserver


def drawn(group: rg.ReaderGroup, observer: LeaseObserver, rates: _Rates, *, width: int = 80) -> str:
    text = io.StringIO()
    Console(width=width, file=text).print(_picture(group, observer, rates))
    return text.getvalue()


def test_it_says_of_whom_there_is_no_sign_of_life(
    reader_group_client: rg.Client,  # noqa: F811
    manual_clock: testing.InstantClock,  # noqa: F811
) -> None:
    """Where no other reader is at work, nobody declares one dead."""
    client = reader_group_client
    client.streams.create("shop/orders")
    group = client.groups.create("g", streams=["shop/orders"], reader_timeout_seconds=10)
    leases = [Lease(client.store, group.synchronizer.segment, name, client.clock) for name in ("r1", "r2")]
    for lease in leases:
        group._updater.add_reader(lease.name, lease)
    observer, rates = LeaseObserver(), _Rates()

    def shown() -> str:
        return drawn(group, observer, rates, width=200)

    for _ in range(4):
        assert "g: 2 readers, 0 events behind" in shown()
        manual_clock.advance(3)
        leases[0].renew({}, 10)
    assert "g: 2 readers (lease expired: r2), 0 events behind" in shown()
    leases[1].renew({}, 10)
    assert "g: 2 readers, 0 events behind" in shown()


def test_it_says_how_fast_each_segment_is_read(
    reader_group_client: rg.Client,  # noqa: F811
    manual_clock: testing.InstantClock,  # noqa: F811
) -> None:
    client = reader_group_client
    client.streams.create("shop/orders")
    with client.writer("shop/orders") as writer:
        writer.write(b"x" * 9000)
    group = client.groups.create("g", streams=["shop/orders"], reader_timeout_seconds=1000)
    rates = _Rates()

    def shown() -> str:
        return drawn(group, LeaseObserver(), rates)

    assert "B/s" not in shown()
    with group.reader() as reader:
        assert reader.read(timeout=1) is not None
        reader.read(timeout=0)
        reader.commit()
        manual_clock.advance(3)
        assert "3.0 kB/s" in shown()
        manual_clock.advance(3)
        assert "0 bytes/s" in shown()


def test_it_shows_the_segments_in_the_order_of_their_numbers(
    reader_group_client: rg.Client,  # noqa: F811
) -> None:
    client = reader_group_client
    client.streams.create("shop/orders", scaling=rg.ScalingPolicy.fixed(11))
    group = client.groups.create("g", streams=["shop/orders"])
    shown = drawn(group, LeaseObserver(), _Rates())
    in_order = [f"shop/orders/{number}" for number in range(11)]
    assert [line.split()[0] for line in shown.splitlines() if line.startswith("shop/orders/")] == in_order
    notifications: list[rg.SegmentNotification] = []
    group.segment_notifier.register_listener(notifications.append)
    group.segment_notifier.poll()
    assert line_of(notifications[0]).endswith(f"segments: 11 to read ({', '.join(in_order)})")
