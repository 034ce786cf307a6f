from __future__ import annotations

import zlib

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from synchronizer import (
    CorruptStoreError,
    Deadline,
    SegmentStore,
    SystemClock,
    UnknownUpdateError,
    UnsupportedError,
    open_store,
)
from synchronizer.backoff import Backoff
from synchronizer.recipes.queue.dead_letters import DeadEvent, DeadLetters, DoneLetters, encode_dead_event
from synchronizer.recipes.queue.frames import OVERHEAD_BYTES, Frame, decode_frames, encode_frame, read_frames
from synchronizer.testing import FailingStore
from tests.golden import golden

EVENTS = [b"", b"one", bytes(range(256))]
DEAD = {"data": b"\x00event", "offset": 1 << 40, "error": "ValueError: ä", "attempts": 5}


def _backoff() -> Backoff:
    clock = SystemClock()
    return Backoff(clock, Deadline(clock, 0))


def _store_with(data: bytes, segment: str = "queue/q") -> SegmentStore:
    store = open_store("memory://")
    store.create(segment)
    store.append(segment, data)
    return store


def test_events_are_written_and_read_as_in_the_first_release() -> None:
    today = b"".join(map(encode_frame, EVENTS))
    stored = golden("queue-events-v1.bin", today)
    assert stored == today
    assert [frame.data for frame in read_frames(_store_with(stored), "queue/q", 0)] == EVENTS


def test_a_dead_letter_is_written_and_read_as_in_the_first_release() -> None:
    stored = golden("queue-dead-letter-v1.bin", b"")
    (dead,) = DeadLetters(_store_with(stored, "dead-letters/q"), "q").read(_backoff)
    assert dead == DeadEvent(**DEAD, place=0, end=len(stored), written_at=0.0)  # type: ignore[arg-type]


def test_a_dead_letter_with_its_time_is_written_and_read_as_in_its_first_release() -> None:
    today = encode_dead_event(**DEAD, written_at=1_700_000_000.25)  # type: ignore[arg-type]
    stored = golden("queue-dead-letter-v2.bin", today)
    assert stored == today
    (dead,) = DeadLetters(_store_with(stored, "dead-letters/q"), "q").read(_backoff)
    assert dead == DeadEvent(**DEAD, place=0, end=len(stored), written_at=1_700_000_000.25)  # type: ignore[arg-type]


def test_which_letters_are_done_is_written_and_read_as_in_its_first_release() -> None:
    done = DoneLetters((0, 100, 300, 400), (200, 1 << 40))
    stored = golden("queue-done-letters-v1.msgpack", done.encode())
    assert stored == done.encode() and DoneLetters.decode(stored) == done
    assert [done.status_of(place) for place in (0, 100, 200, 300)] == ["replayed", "pending", "discarded", "replayed"]
    with pytest.raises(UnsupportedError, match="newer release"):
        DoneLetters.decode(msgpack.packb([2, [], []]))


@given(st.lists(st.binary(max_size=40), max_size=6), st.integers(0, 400), st.integers(0, 1 << 50))
def test_whole_frames_come_back_and_an_incomplete_one_is_left(events: list[bytes], cut: int, offset: int) -> None:
    data = b"".join(map(encode_frame, events))[:cut]
    frames = decode_frames("q", data, offset)
    whole = [sum(OVERHEAD_BYTES + len(event) for event in events[: n + 1]) for n in range(len(events))]
    assert [frame.data for frame in frames] == events[: sum(end <= cut for end in whole)]
    assert [frame.end - offset for frame in frames] == [end for end in whole if end <= cut]
    assert [frame.offset for frame in frames] == [offset, *(frame.end for frame in frames)][: len(frames)]


@given(st.integers(0, OVERHEAD_BYTES + 4), st.integers(0, 7))
def test_no_damage_goes_unnoticed(at: int, bit: int) -> None:
    damaged = bytearray(encode_frame(b"first") + encode_frame(b"second"))
    damaged[at] ^= 1 << bit
    with pytest.raises(CorruptStoreError) as raised:
        read_frames(_store_with(bytes(damaged)), "queue/q", 0)
    assert raised.value.facts["segment"] == "queue/q"
    assert raised.value.facts["offset"] == 0


def test_what_is_cut_off_at_the_end_is_damage() -> None:
    store = _store_with(encode_frame(b"whole") + encode_frame(b"half")[:-2])
    (whole,) = read_frames(store, "queue/q", 0)
    with pytest.raises(CorruptStoreError, match="damaged") as raised:
        read_frames(store, "queue/q", whole.end)
    assert raised.value.facts["offset"] == whole.end


def test_a_segment_that_is_shorter_than_it_was_is_damage() -> None:
    with pytest.raises(CorruptStoreError, match="lost"):
        read_frames(_store_with(b""), "queue/q", 5)


def test_an_event_that_a_newer_release_wrote_is_not_taken_for_damage() -> None:
    newer = b"\x02event"
    frame = (5).to_bytes(4, "little") + zlib.crc32(newer).to_bytes(4, "little") + newer
    with pytest.raises(UnknownUpdateError, match="newer release"):
        decode_frames("q", frame, 0)


def test_an_event_that_is_larger_than_one_read_is_read_whole() -> None:
    large = bytes(5 * 1024 * 1024)
    store = FailingStore(_store_with(encode_frame(large) + encode_frame(b"next")))
    store.cut_reads()
    first, *_ = read_frames(store, "queue/q", 0)
    assert first == Frame(0, OVERHEAD_BYTES + len(large), large)
    assert [frame.data for frame in read_frames(store, "queue/q", first.end)] == [b"next"]
