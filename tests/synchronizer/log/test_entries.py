from __future__ import annotations

import os
import struct
import zlib

import pytest

from synchronizer import (
    CorruptStateError,
    InvalidArgumentError,
    OutcomeUnknownError,
    Revision,
    SegmentStore,
    UnknownUpdateError,
    open_store,
)
from synchronizer.log.entries import EntryLog, Mark, decode_entries, encode_entry
from synchronizer.state import StateCodec
from synchronizer.stores.memory import MemoryStore
from tests.golden import golden
from tests.seeds import some_and_broad
from tests.synchronizer.accounts import UPDATES, Account, Add, Note, Put, failing, opened


def test_revisions_are_ordered_as_the_log_is() -> None:
    revisions = [Revision(0, 0), Revision(0, 1), Revision(9, 0), Revision(10, 0), Revision(10, 11)]
    shuffled = [revisions[place] for place in (3, 1, 4, 0, 2)]
    assert sorted(shuffled) == revisions


def test_a_revision_has_a_text_form() -> None:
    assert str(Revision(120, 3)) == "120:3"
    assert Revision.parse("120:3") == Revision(120, 3)
    for text in ("", "120", "120:", ":3", "-1:0", "120:3 ", "120:3:4", "a:b"):
        with pytest.raises(InvalidArgumentError):
            Revision.parse(text)


def test_tokens_of_one_log_never_meet() -> None:
    replica = opened(open_store("memory://"))
    tokens = []
    for number in range(1, 20):
        first = replica.applied_length
        replica.update_state_unconditionally(*[Note()] * number)
        tokens += [Revision(first, index).token for index in range(number)]
        assert replica.revision == Revision(first, number - 1)
    assert tokens == sorted(set(tokens)) and tokens[0] > 0


def _log(*bodies: bytes) -> bytes:
    data, previous = b"", 0
    for number, body in enumerate(bodies):
        entry, previous = encode_entry(b"process.", number, previous, body)
        data += entry
    return data


def test_entries_come_back_as_they_were_written() -> None:
    data = _log(b"first", b"", b"third" * 1000)
    entries = decode_entries("s", data, 70, 0)
    assert [entry.body for entry in entries] == [b"first", b"", b"third" * 1000]
    assert [entry.call for entry in entries] == [0, 1, 2]
    assert [entry.offset for entry in entries] == [70, entries[0].end, entries[1].end]
    assert entries[-1].end == 70 + len(data)


@pytest.mark.parametrize("flipped", some_and_broad([0x80, 0x01, 0xFF]))
def test_a_flipped_bit_anywhere_in_a_log_is_found(flipped: int) -> None:
    source = open_store("memory://")
    replica = opened(source)
    starts = [0]
    for number in range(3):
        starts.append(replica.applied_length)
        replica.update_state_unconditionally(Put(key=f"key-{number}", value=number))
    data = source.read("account", 0, 10_000)
    for place in range(len(data)):
        damaged = bytearray(data)
        damaged[place] ^= flipped
        with pytest.raises(CorruptStateError) as raised:
            opened(_store_with(bytes(damaged)))
        assert raised.value.facts["segment"] == "account"
        assert raised.value.facts["offset"] == max(start for start in starts if start <= place)


def test_a_log_that_is_cut_off_inside_an_entry_is_damaged() -> None:
    source = open_store("memory://")
    replica = opened(source)
    boundaries = {0, replica.applied_length}
    for _ in range(2):
        boundaries.add(replica.update_state_unconditionally(Add()) and replica.applied_length)
    data = source.read("account", 0, 10_000)
    for length in range(len(data)):
        if length in boundaries:
            opened(_store_with(data[:length]))
        else:
            with pytest.raises(CorruptStateError, match="damaged"):
                opened(_store_with(data[:length]))


def test_a_damaged_entry_stops_those_behind_it_from_being_applied() -> None:
    store = open_store("memory://")
    one, two = opened(store), opened(store)
    one.update_state_unconditionally(Add())
    two.fetch_updates()
    one.update_state_unconditionally(Add())
    place = one.applied_length - 1
    one.update_state_unconditionally(Add())
    _flip(store, "account", place)
    for _ in range(2):
        with pytest.raises(CorruptStateError):
            two.fetch_updates()
    assert two.state.value == 1


def test_an_entry_that_does_not_follow_the_one_before_is_found() -> None:
    first, second, other = _log(b"first"), _log(b"first", b"second"), _log(b"other", b"second")
    with pytest.raises(CorruptStateError, match="lost acknowledged data") as raised:
        decode_entries("s", first + other[len(first) :], 0, 0)
    assert raised.value.facts["offset"] == len(first)
    assert len(decode_entries("s", second, 0, 0)) == 2


def test_an_entry_of_a_later_version_says_to_deploy_its_release() -> None:
    replica = opened(store := open_store("memory://"))
    data, _ = encode_entry(b"process.", 1, replica._replica.checksum, b"?")
    later = data[:8] + b"\x02" + data[9:]
    store.append("account", later[:4] + _crc(later[8:]) + later[8:])
    with pytest.raises(UnknownUpdateError, match="deploy") as raised:
        replica.fetch_updates()
    assert raised.value.facts["version"] == 2


def test_an_entry_longer_than_one_read_is_read_whole() -> None:
    store = open_store("memory://")
    one, two = opened(store), opened(store)
    one.update_state_unconditionally(Note(text="x" * 3_000_000), Note(text="short"))
    one.update_state_unconditionally(Add())
    assert two.fetch_updates() == Account(value=1, note="short")


def test_a_long_log_is_read_to_its_end() -> None:
    store = open_store("memory://")
    one, two = opened(store), opened(store)
    for number in range(30):
        one.update_state_unconditionally(Note(text="x" * 100_000), Note(text=str(number)))
    assert two.fetch_updates().note == "29"
    assert opened(store).state.note == "29"


def test_reads_that_are_cut_short_inside_an_entry_are_continued() -> None:
    store = failing()
    one, two = opened(store.inner), opened(store)
    for _ in range(3):
        one.update_state_unconditionally(Add(), Note(text="three entries of odd length"))
    store.cut_reads()
    assert two.fetch_updates().value == 3


@pytest.mark.parametrize("where", ["snapshot", "mark"])
def test_a_flipped_bit_in_a_snapshot_or_a_mark_is_found(where: str) -> None:
    store = open_store("memory://")
    replica = opened(store)
    replica.update_state_unconditionally(Put(key="a", value=1))
    replica.compact()
    replica.update_state_unconditionally(Put(key="b", value=1))
    assert opened(store).state == replica.state
    (snapshot,) = store.list("snapshot/")
    length = store.info(snapshot).length if where == "snapshot" else len(store.attributes("account")["mark"])
    for place in range(length):
        _flip(store, snapshot, place) if where == "snapshot" else _flip_mark(store, place)
        with pytest.raises(CorruptStateError):
            opened(store)
        _flip(store, snapshot, place) if where == "snapshot" else _flip_mark(store, place)
    assert opened(store).state == replica.state


def test_a_snapshot_may_be_larger_than_an_append() -> None:
    stream = EntryLog(store := failing(), "s")
    store.create("s")
    body = os.urandom(20_000_000)
    store.lose_answers()
    store.fail_appends()
    store.lose_requests()
    for _ in range(3):
        with pytest.raises(Exception, match="lost|fault"):
            stream.write_snapshot(Revision(5, 0), "name", body)
    snapshot = stream.write_snapshot(Revision(5, 0), "name", body)
    assert stream.read_snapshot(Mark(Revision(5, 0), 9, snapshot, 1)) == body


class TestMovingTheMark:
    old = Mark(Revision(5, 0), 9, "snapshot/s@5", 1)
    new = Mark(Revision(9, 0), 12, "snapshot/s@9", 1)

    def test_it_moves_if_nobody_was_faster(self) -> None:
        stream = self._stream(failing())
        assert stream.move_mark(self.old, self.new)
        assert not stream.move_mark(self.old, self.new._replace(snapshot="snapshot/s@another"))
        assert stream.mark() == self.new

    def test_a_lost_answer_is_settled_by_the_same_call_again(self) -> None:
        for stored in (True, False):
            stream = self._stream(store := failing())
            store.lose_answers() if stored else store.lose_requests()
            with pytest.raises(Exception, match="lost"):
                stream.move_mark(self.old, self.new)
            assert (stream.mark() == self.new) is stored
            assert stream.move_mark(self.old, self.new)
            assert stream.mark() == self.new

    def _stream(self, store: SegmentStore) -> EntryLog:
        store.create("s")
        stream = EntryLog(store, "s")
        assert stream.move_mark(None, self.old)
        return stream


CODEC = StateCodec(Account, tuple(UPDATES))
STATE = Account(value=3, entries=Account().entries.set("ä", -1))
MARK = Mark(Revision(120, 1), 180, "snapshot/account@120", 1)


UPDATES_OF_STATE = [Add(), Put(key="ä", value=-1), Note()]


def test_entries_are_written_and_read_as_in_the_first_release() -> None:
    for name, today, value in (
        ("state-initial-v1.msgpack", CODEC.encode_initial(STATE), STATE),
        ("state-updates-v1.msgpack", CODEC.encode_updates(UPDATES_OF_STATE), UPDATES_OF_STATE),
        ("state-tombstone-v1.msgpack", CODEC.encode_tombstone(), None),
    ):
        assert golden(name, today) == today
        assert CODEC.decode_body(golden(name, today)) == value


def test_a_log_is_written_and_read_as_in_the_first_release() -> None:
    today = _log(CODEC.encode_initial(STATE), CODEC.encode_updates([Add()]))
    stored = golden("state-log-v1.bin", today)
    assert stored == today
    assert opened(_store_with(stored)).state == STATE.replace(value=4)


def test_a_snapshot_and_its_mark_are_written_and_read_as_in_the_first_release() -> None:
    today = CODEC.encode_snapshot(STATE, 0x01020304)
    stored = golden("state-snapshot-v1.msgpack", today)
    assert stored == today
    assert CODEC.decode_snapshot(stored) == (STATE, 0x01020304)
    mark = golden("state-mark-v1.bin", MARK.encode())
    assert mark == MARK.encode()
    assert Mark.decode("account", mark) == MARK


def test_a_sealed_log_refuses_updates() -> None:
    store = open_store("memory://")
    replica = opened(store)
    store.seal("account")
    with pytest.raises(Exception, match="sealed") as raised:
        replica.update_state_unconditionally(Add())
    assert not isinstance(raised.value, OutcomeUnknownError)


def _store_with(log: bytes) -> SegmentStore:
    store = open_store("memory://")
    store.create("account")
    if log:
        store.append("account", log)
    return store


def _flip(store: SegmentStore, segment: str, place: int) -> None:
    assert isinstance(store, MemoryStore)
    held = store._memory.segments[segment]
    assert held is not None
    held.data[place] ^= 0x10


def _flip_mark(store: SegmentStore, place: int) -> None:
    assert isinstance(store, MemoryStore)
    held = store._memory.segments["account"]
    assert held is not None
    mark = bytearray(held.attributes["mark"])
    mark[place] ^= 0x10
    held.attributes["mark"] = bytes(mark)


def _crc(data: bytes) -> bytes:
    return struct.pack("<I", zlib.crc32(data))
