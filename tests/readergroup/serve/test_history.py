"""What the web view remembers of a group."""

from __future__ import annotations

import pytest

import readergroup as rg
from readergroup.serve import history
from readergroup.serve.history import GroupHistory
from tests.readergroup.serve.serving import GROUP, STREAM, filled
from tests.waiting import until


def test_spans_follow_owners_splits_and_waiting_segments() -> None:
    with filled("memory://", segments=1) as client:
        group = client.groups.get(GROUP)
        seen = GroupHistory()
        at = 0.0

        def look() -> list[tuple[str, str | None, float, float | None]]:
            nonlocal at
            at += 1.0
            group.lag()  # which follows the stream
            seen.see(*group.synchronizer.snapshot_of_state, at)
            return [(each.segment[-1], each.owner, each.start, each.end) for each in seen.spans()]

        assert look() == [("0", "", 1.0, None)]
        reader = group.reader("r1")
        assert look() == [("0", "", 1.0, 2.0), ("0", "r1", 2.0, None)]
        assert seen.owner_changes == 1
        client.streams.scale(STREAM, split=[0])
        assert look()[2:] == [("1", None, 3.0, None), ("2", None, 3.0, None)]
        until(lambda: reader.read(timeout=0) is None and len(reader.assigned_segments) == 2)
        spans = look()
        assert ("0", "r1", 2.0, 4.0) in spans
        assert {each[:2] for each in spans if each[3] is None} == {("1", "r1"), ("2", "r1")}
        reader.close()
        assert {each[:2] for each in look() if each[3] is None} == {("1", ""), ("2", "")}
        assert seen.owner_changes == 3


def test_an_older_state_changes_nothing() -> None:
    with filled("memory://") as client:
        group = client.groups.get(GROUP)
        seen = GroupHistory()
        old = group.synchronizer.snapshot_of_state
        with group.reader("r1"):
            seen.see(*group.synchronizer.snapshot_of_state, 1.0)
            before = seen.spans()
            seen.see(*old, 2.0)
            assert seen.spans() == before


def test_the_past_is_bounded_in_time_and_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MAX_SPANS", 100)
    monkeypatch.setattr(history, "KEPT_SECONDS", 60.0)
    monkeypatch.setattr(history, "CURVE", 20)
    with filled("memory://", segments=4) as client:
        group = client.groups.get(GROUP)
        seen = GroupHistory()
        at = 0.0
        for number in range(60):
            at += 1.0
            reader = group.reader(f"r{number % 2}")
            seen.see(*group.synchronizer.snapshot_of_state, at)
            seen.see_lag(group.lag())
            reader.close()
            at += 1.0
            seen.see(*group.synchronizer.snapshot_of_state, at)
            spans = seen.spans()
            assert len(spans) <= history.MAX_SPANS + 4
            assert all(each.end is None or each.end >= at - history.KEPT_SECONDS for each in spans)
        assert {len(curve) for curve in seen.curves()[1].values()} == {history.CURVE}
        monkeypatch.setattr(history, "MAX_DRAWN_SEGMENTS", 1)
        seen.see(*_changed(group), at)
        assert [each for each in seen.spans() if each.end is None] == []


def _changed(group: rg.ReaderGroup) -> tuple[rg.ReaderGroupState, rg.Revision]:
    group.reader("another")
    return group.synchronizer.snapshot_of_state


def test_only_checkpoints_that_were_seen_to_complete_have_a_time() -> None:
    with filled("memory://") as client:
        group = client.groups.get(GROUP)
        group.checkpoint("before")
        seen = GroupHistory()
        seen.see(*group.synchronizer.snapshot_of_state, 1.0)
        assert (seen.checkpoints, seen.last_checkpoint_at) == (0, None)
        group.checkpoint("after")
        seen.see(*group.synchronizer.snapshot_of_state, 2.0)
        assert (seen.checkpoints, seen.last_checkpoint_at) == (1, 2.0)
