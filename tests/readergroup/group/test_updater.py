"""What a reader says about a segment counts only under the assignment that it speaks of."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import readergroup as rg
from readergroup.group.model.positions import SegmentPosition
from readergroup.group.updater import GroupUpdater
from synchronizer.liveness.lease import Lease

SEGMENT = rg.SegmentId("shop/orders/0")
LEASE = "lease-1"


class Assigned:
    """A reader that had the segment under one token, and has it back under another."""

    def __init__(self, client: rg.Client) -> None:
        client.streams.create("shop/orders")
        with client.writer("shop/orders") as writer:
            for _ in range(10):
                writer.write(b"an event")
        group = client.groups.create("billing", streams=["shop/orders"])
        self.synchronizer = group.synchronizer
        self.updater = GroupUpdater(group.synchronizer, client.streams)
        self.updater.add_reader("reader-1", Lease(client.store, group.synchronizer.segment, LEASE, client.clock))
        self.before = SegmentPosition(self.token, 0)
        self.synchronizer.update_state_unconditionally(
            rg.ReleaseSegment(reader="reader-1", segment=SEGMENT, offset=0),
            rg.ReassignSegment(segment=SEGMENT, reader="reader-1"),
        )
        assert self.token > self.before.token

    @property
    def token(self) -> int:
        token = self.synchronizer.state.segments[SEGMENT].token
        assert token is not None
        return token

    @property
    def late(self) -> dict[rg.SegmentId, SegmentPosition]:
        end = self.synchronizer.store.info(f"data/shop/orders/{self.stream_incarnation}/0").length
        return {SEGMENT: SegmentPosition(self.before.token, end)}

    @property
    def stream_incarnation(self) -> str:
        return self.synchronizer.state.streams["shop/orders"].incarnation


@pytest.fixture
def assigned() -> Iterator[Assigned]:
    with rg.connect("memory://") as client:
        yield Assigned(client)


def test_a_late_release_leaves_the_present_assignment_alone(assigned: Assigned) -> None:
    token = assigned.token
    assigned.updater.release("reader-1", LEASE, assigned.late)
    assert (assigned.token, assigned.synchronizer.state.segments[SEGMENT].offset) == (token, 0)


def test_a_late_completion_leaves_the_present_assignment_alone(assigned: Assigned) -> None:
    assigned.updater.streams.seal("shop/orders")
    assigned.updater.follow_stream("shop/orders")
    held = assigned.late[SEGMENT]
    assigned.updater.complete("reader-1", LEASE, SEGMENT, held)
    assert not assigned.synchronizer.state.segments[SEGMENT].completed


def test_a_position_reached_under_an_older_assignment_does_not_count_at_leaving(assigned: Assigned) -> None:
    assert assigned.updater.remove_reader("reader-1", lease=LEASE, reached=assigned.late)
    assert assigned.synchronizer.state.segments[SEGMENT].offset == 0
