"""The suite finds what authors of backends are likely to get wrong: each store here is wrong in one point."""

from __future__ import annotations

import fnmatch
import inspect
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import pytest

from synchronizer import (
    ANY,
    Appended,
    AppendResult,
    AttributeChange,
    Conflict,
    NotFoundError,
    SealedError,
    SegmentCopy,
    SegmentInfo,
    SegmentStart,
    SegmentStore,
)
from synchronizer.stores.memory import MemoryStore
from synchronizer.testing import SegmentStoreConformance
from tests.waiting import until

Changes = Mapping[str, AttributeChange]


class Wrong(MemoryStore):
    """Remembers where appends ended, and takes an append apart where a subclass wants to do it differently."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: dict[str, list[int]] = {}

    def append(
        self, segment: str, data: bytes, *, expected_offset: int | None = None, attributes: Changes | None = None
    ) -> AppendResult:
        result = self.answered(segment, data, expected_offset, attributes or {})
        if isinstance(result, Appended):
            self.ends.setdefault(segment, []).append(result.length)
        return result

    def answered(self, segment: str, data: bytes, expected_offset: int | None, changes: Changes) -> AppendResult:
        return super().append(segment, data, expected_offset=expected_offset, attributes=changes)


class ReadsOneAppendAtATime(Wrong):
    def read(self, segment: str, offset: int, max_bytes: int) -> bytes:
        end = next((end for end in self.ends.get(segment, []) if end > offset), offset + max_bytes)
        return super().read(segment, offset, min(max_bytes, max(1, end - offset)))


class ReadsAThousandAppendsAtMost(Wrong):
    def read(self, segment: str, offset: int, max_bytes: int) -> bytes:
        beyond = [end for end in self.ends.get(segment, []) if end > offset]
        end = beyond[999] if len(beyond) > 999 else offset + max_bytes
        return super().read(segment, offset, min(max_bytes, end - offset))


class ReadsAMegabyteAtMost(Wrong):
    def read(self, segment: str, offset: int, max_bytes: int) -> bytes:
        return super().read(segment, offset, min(max_bytes, 1 << 20))


class ConflictsWithoutDelta(Wrong):
    def answered(self, segment: str, data: bytes, expected_offset: int | None, changes: Changes) -> AppendResult:
        result = super().answered(segment, data, expected_offset, changes)
        return Conflict(result.length, b"", result.attributes) if isinstance(result, Conflict) else result


class ConflictsWithTheFirstMissedAppendOnly(Wrong):
    def answered(self, segment: str, data: bytes, expected_offset: int | None, changes: Changes) -> AppendResult:
        result = super().answered(segment, data, expected_offset, changes)
        if not isinstance(result, Conflict) or expected_offset is None:
            return result
        end = next((end for end in self.ends.get(segment, []) if end > expected_offset), expected_offset)
        return Conflict(result.length, result.delta[: end - expected_offset], result.attributes)


class ConflictsWithTheWrongAttributesOnly(Wrong):
    def answered(self, segment: str, data: bytes, expected_offset: int | None, changes: Changes) -> AppendResult:
        result = super().answered(segment, data, expected_offset, changes)
        if not isinstance(result, Conflict):
            return result
        wrong = {
            name: value
            for name, value in result.attributes.items()
            if changes[name].expected is not ANY and changes[name].expected != value
        }
        return Conflict(result.length, result.delta, wrong)


class ComparesBeforeItWrites(Wrong):
    """Somebody else may write between the comparison and the change."""

    def answered(self, segment: str, data: bytes, expected_offset: int | None, changes: Changes) -> AppendResult:
        unchanged = {name: AttributeChange(change.expected, change.expected) for name, change in changes.items()}
        if ANY not in [change.expected for change in changes.values()]:
            result = super().answered(segment, b"", expected_offset, unchanged)  # type: ignore[arg-type]
            if isinstance(result, Conflict):
                return result
            time.sleep(0.001)
            changes = {name: AttributeChange(ANY, change.new) for name, change in changes.items()}
        return super().answered(segment, data, expected_offset, changes)


class ForgetsWhatItOnlyCompared(Wrong):
    """Somebody else may change what is compared and not changed, before the rest is written."""

    def answered(self, segment: str, data: bytes, expected_offset: int | None, changes: Changes) -> AppendResult:
        compared = {name: change for name, change in changes.items() if change.expected == change.new}
        if compared:
            result = super().answered(segment, b"", None, compared)
            if isinstance(result, Conflict):
                return result
            time.sleep(0.001)
        rest = {name: change for name, change in changes.items() if name not in compared}
        return super().answered(segment, data, expected_offset, rest)


class KeepsAFewMessagesOfASegment(Wrong):
    """As where old values of attributes are dropped by a limit that counts for the data too."""

    def answered(self, segment: str, data: bytes, expected_offset: int | None, changes: Changes) -> AppendResult:
        result = super().answered(segment, data, expected_offset, changes)
        if len(self.ends.get(segment, [])) > 50 and changes:
            self.truncate(segment, self.ends[segment][-50])
        return result


class WritesDataBeforeAttributes(Wrong):
    def answered(self, segment: str, data: bytes, expected_offset: int | None, changes: Changes) -> AppendResult:
        unchanged = {name: AttributeChange(change.expected, change.expected) for name, change in changes.items()}
        if not data or not changes or ANY in [change.expected for change in changes.values()]:
            return super().answered(segment, data, expected_offset, changes)
        result = super().answered(segment, data, expected_offset, unchanged)  # type: ignore[arg-type]
        if isinstance(result, Appended):
            time.sleep(0.001)
            super().answered(segment, b"", None, changes)
        return result


class WritesLargeAppendsInParts(Wrong):
    def answered(self, segment: str, data: bytes, expected_offset: int | None, changes: Changes) -> AppendResult:
        if len(data) <= 1 << 20:
            return super().answered(segment, data, expected_offset, changes)
        result = super().answered(segment, data[: 1 << 20], expected_offset, changes)
        if isinstance(result, Conflict):
            return result
        time.sleep(0.03)
        rest = super().answered(segment, data[1 << 20 :], None, {})
        assert isinstance(result, Appended) and isinstance(rest, Appended)
        return Appended(result.offset, rest.length)


class TakesEmptyAttributesForAbsentOnes(Wrong):
    def answered(self, segment: str, data: bytes, expected_offset: int | None, changes: Changes) -> AppendResult:
        now = self.attributes(segment, names=[name for name in changes if name])
        lenient = {
            name: AttributeChange(ANY if not change.expected and not now.get(name) else change.expected, change.new)
            if change.expected is not ANY
            else change
            for name, change in changes.items()
        }
        return super().answered(segment, data, expected_offset, lenient)


class ComparesValuesAsNumbers(Wrong):
    def answered(self, segment: str, data: bytes, expected_offset: int | None, changes: Changes) -> AppendResult:
        now = self.attributes(segment, names=changes.keys())
        lenient = {
            name: AttributeChange(
                ANY if _number(now.get(name)) == _number(change.expected) else change.expected, change.new
            )
            for name, change in changes.items()
        }
        return super().answered(segment, data, expected_offset, lenient)


def _number(value: object) -> object:
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return value


class KeepsAttributesInTheLastAppend(Wrong):
    def truncate(self, segment: str, offset: int) -> None:
        super().truncate(segment, offset)
        if offset == self.info(segment).length:
            super().append(segment, b"", attributes=dict.fromkeys(self.attributes(segment), AttributeChange(ANY, None)))


class SealsData(Wrong):
    """An append that changes attributes only is still taken."""

    def answered(self, segment: str, data: bytes, expected_offset: int | None, changes: Changes) -> AppendResult:
        try:
            return super().answered(segment, data, expected_offset, changes)
        except SealedError:
            if data or not changes:
                raise
            held = self._memory.segment(segment)
            held.attributes.update({name: change.new or b"" for name, change in changes.items()})
            return Appended(held.length, held.length)


class ConflictsBeforeItSaysSealed(Wrong):
    def answered(self, segment: str, data: bytes, expected_offset: int | None, changes: Changes) -> AppendResult:
        info = self.info(segment)
        if info.sealed and expected_offset not in (None, info.length):
            return Conflict(info.length)
        return super().answered(segment, data, expected_offset, changes)


class ListsByPattern(Wrong):
    def list(self, prefix: str = "") -> Iterator[str]:
        super().list(prefix)
        return iter([name for name in super().list() if fnmatch.fnmatchcase(name, f"{prefix}*")])


class ListsLikeSql(Wrong):
    def list(self, prefix: str = "") -> Iterator[str]:
        super().list(prefix)
        pattern = re.escape(prefix).replace("%", ".*").replace("_", ".")
        return iter([name for name in super().list() if re.match(pattern, name)])


class FindsAttributesByPattern(Wrong):
    def attributes(
        self, segment: str, prefix: str = "", *, names: Collection[str] | None = None
    ) -> Mapping[str, bytes]:
        found = super().attributes(segment, names=names)
        return {name: value for name, value in found.items() if fnmatch.fnmatchcase(name, f"{prefix}*")}


class FoldsNames(Wrong):
    """As a database does whose collation takes cases and accents for the same."""

    def create(self, segment: str) -> bool:
        if any(name.casefold() == segment.casefold() for name in self.list()):
            return False
        return super().create(segment)


class DeletesByPattern(Wrong):
    def delete(self, segment: str) -> None:
        super().delete(segment)
        for name in fnmatch.filter(list(super().list()), segment):
            super().delete(name)


class JoinsNamesToKeys(Wrong):
    """Attributes of all segments in one table, under keys of which two names can give the same."""

    def answered(self, segment: str, data: bytes, expected_offset: int | None, changes: Changes) -> AppendResult:
        result = super().answered(segment, data, expected_offset, changes)
        for name in changes:
            for other in list(self.list()):
                if other != segment and f"{segment}/{name}".startswith(f"{other}/"):
                    rest = f"{segment}/{name}".removeprefix(f"{other}/")
                    super().answered(other, b"", None, {rest: AttributeChange(ANY, changes[name].new)})
        return result


class ForgetsDeletedNames(Wrong):
    def delete(self, segment: str) -> None:
        super().delete(segment)
        del self._memory.segments[segment]


class CreatesBeforeItLooks(Wrong):
    def create(self, segment: str) -> bool:
        exists = segment in self._memory.segments
        time.sleep(0.001)
        return super().create(segment) or not exists


class LosesTheLengthOfWhatIsTruncated(Wrong):
    def truncate(self, segment: str, offset: int) -> None:
        super().truncate(segment, offset)
        held = self._memory.segment(segment)
        if not held.data:
            held.start_offset = 0


class TruncatesAtAppends(Wrong):
    def truncate(self, segment: str, offset: int) -> None:
        super().truncate(
            segment, max((end for end in self.ends.get(segment, []) if end <= offset), default=min(offset, 0))
        )


class MissesWhatCameJustBefore(Wrong):
    """Whoever waits hears what comes later, and never looks at what is there."""

    def wait(self, known: Mapping[str, int], timeout: float) -> frozenset[str]:
        return super().wait({name: self.info(name).length for name in known}, timeout)


class LooksAndThenListens(Wrong):
    """An append that comes in between is heard by nobody."""

    def wait(self, known: Mapping[str, int], timeout: float) -> frozenset[str]:
        changed = super().wait(known, 0)
        if changed or not timeout:
            return changed
        until(lambda: super(LooksAndThenListens, self).wait(known, 0), "an append in between")
        return super().wait({name: self.info(name).length for name in known}, timeout)


class WaitsForGrowth(Wrong):
    def wait(self, known: Mapping[str, int], timeout: float) -> frozenset[str]:
        grown = [name for name, length in known.items() if self.info(name).length > length]
        return super().wait(known, timeout) & set(grown)


class TellsOfOneChange(Wrong):
    def wait(self, known: Mapping[str, int], timeout: float) -> frozenset[str]:
        return frozenset(sorted(super().wait(known, timeout))[:1])


class IsWokenByAttributes(Wrong):
    def __init__(self) -> None:
        super().__init__()
        self.changed = False

    def answered(self, segment: str, data: bytes, expected_offset: int | None, changes: Changes) -> AppendResult:
        self.changed = self.changed or not data and bool(changes)
        return super().answered(segment, data, expected_offset, changes)

    def wait(self, known: Mapping[str, int], timeout: float) -> frozenset[str]:
        found = super().wait(known, timeout)
        return found or (frozenset(known) if self.changed else found)


class ShowsItsOwnAttributes(Wrong):
    def attributes(
        self, segment: str, prefix: str = "", *, names: Collection[str] | None = None
    ) -> Mapping[str, bytes]:
        super().attributes(segment, prefix, names=names)
        return _Live(lambda: self._memory.segment(segment).attributes)


class _Live(Mapping[str, bytes]):
    """What a segment has at each look."""

    def __init__(self, look: Callable[[], Mapping[str, bytes]]) -> None:
        self._look = look

    def __getitem__(self, name: str) -> bytes:
        return self._look()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._look())

    def __len__(self) -> int:
        return len(self._look())


class SealsWithoutSaying(Wrong):
    def seal(self, segment: str) -> SegmentInfo:
        final = super().seal(segment)
        return SegmentInfo(final.name, final.start_offset, final.length, sealed=False)


class IgnoresMissingSegments(Wrong):
    def wait(self, known: Mapping[str, int], timeout: float) -> frozenset[str]:
        try:
            return super().wait(known, timeout)
        except NotFoundError:
            return frozenset(known)


class CopiesToTheEnd(Wrong):
    def copy_segments(self, copies: Sequence[SegmentCopy]) -> bool:
        return super().copy_segments(
            [SegmentCopy(each.source, each.segment, each.start, self.info(each.source).length) for each in copies]
        )


class CopiesToTheBeginning(Wrong):
    def copy_segments(self, copies: Sequence[SegmentCopy]) -> bool:
        made = super().copy_segments(copies)
        for each in copies:
            self._memory.segment(each.segment).start_offset = 0
        return made


class CopiesOneByOne(Wrong):
    def copy_segments(self, copies: Sequence[SegmentCopy]) -> bool:
        made = False
        for each in copies:
            made = super().copy_segments([each])
        return made


class CreatesOneByOne(Wrong):
    def create_together(self, segments: Mapping[str, bytes]) -> bool:
        made = True
        for name, data in segments.items():
            made = super().create_together({name: data}) and made
        return made


class ForgetsTheFirstBytes(Wrong):
    def create_together(self, segments: Mapping[str, bytes], *, start_offsets: Mapping[str, int] | None = None) -> bool:
        return super().create_together(dict.fromkeys(segments, b""))


class AnswersForDeletedSegmentsToo(Wrong):
    def infos(self, segments: Collection[str]) -> Mapping[str, SegmentInfo]:
        nothing = {name: SegmentInfo(name, 0, 0, sealed=False) for name in segments}
        return {**nothing, **super().infos(segments)}


class AnswersForTheFirstSegments(Wrong):
    def infos(self, segments: Collection[str]) -> Mapping[str, SegmentInfo]:
        return super().infos(list(segments)[:500])


class ReadsTheStartsOfDeletedSegments(Wrong):
    def read_starts(self, segments: Collection[str], max_bytes: int) -> Mapping[str, SegmentStart]:
        return {**dict.fromkeys(segments, SegmentStart(0, b"")), **super().read_starts(segments, max_bytes)}


class TakesAllStartsForTheFirstOffset(Wrong):
    def read_starts(self, segments: Collection[str], max_bytes: int) -> Mapping[str, SegmentStart]:
        return {name: SegmentStart(0, data) for name, (_, data) in super().read_starts(segments, max_bytes).items()}


class CreatesAtTheFirstOffset(Wrong):
    def create(self, segment: str, *, start_offset: int = 0) -> bool:
        return super().create(segment)


class CreatesTogetherAtTheFirstOffset(Wrong):
    def create_together(self, segments: Mapping[str, bytes], *, start_offsets: Mapping[str, int] | None = None) -> bool:
        return super().create_together(segments)


class ForgetsAtAnyOffset(Wrong):
    def forget(self, segment: str, *, expected_offset: int | None = None) -> None:
        super().forget(segment)


class ForgetsDeletedNamesAtAnOffset(Wrong):
    def forget(self, segment: str, *, expected_offset: int | None = None) -> None:
        if segment in self._memory.segments and segment not in self.list():
            super().forget(segment)
        super().forget(segment, expected_offset=expected_offset)


class LooksBeforeItForgets(Wrong):
    """Somebody else may append, or create the segment again, between the look and the change."""

    def forget(self, segment: str, *, expected_offset: int | None = None) -> None:
        if expected_offset is not None:
            if segment not in self.list() or self.info(segment).length != expected_offset:
                return
            time.sleep(0.001)
        super().forget(segment)


class LeavesCopiesOpen(Wrong):
    def copy_segments(self, copies: Sequence[SegmentCopy]) -> bool:
        made = super().copy_segments(copies)
        for each in copies:
            self._memory.segment(each.segment).sealed = False
        return made


Suite = SegmentStoreConformance
#: Each wrong store, and the test that finds it.
FOUND: Sequence[tuple[type[Wrong], Callable[..., None]]] = [
    (ReadsOneAppendAtATime, Suite.test_a_read_returns_as_many_bytes_as_are_there),
    (ReadsAThousandAppendsAtMost, Suite.test_many_small_appends_are_read_in_one_piece),
    (ReadsAMegabyteAtMost, Suite.test_a_large_append_is_seen_whole_or_not_at_all),
    (ConflictsWithoutDelta, Suite.test_an_append_at_another_offset_than_expected_writes_nothing),
    (ConflictsWithTheFirstMissedAppendOnly, Suite.test_many_small_appends_are_read_in_one_piece),
    (ConflictsWithTheWrongAttributesOnly, Suite.test_one_unexpected_attribute_prevents_everything),
    (ComparesBeforeItWrites, Suite.test_of_many_changes_of_one_attribute_one_succeeds),
    (WritesDataBeforeAttributes, Suite.test_data_and_attributes_are_seen_together),
    (WritesLargeAppendsInParts, Suite.test_a_large_append_is_seen_whole_or_not_at_all),
    (TakesEmptyAttributesForAbsentOnes, Suite.test_an_empty_attribute_is_not_an_absent_one),
    (ComparesValuesAsNumbers, Suite.test_values_are_compared_byte_by_byte),
    (KeepsAttributesInTheLastAppend, Suite.test_attributes_that_are_written_with_data_outlive_the_data),
    (SealsData, Suite.test_a_sealed_segment_refuses_every_append),
    (ConflictsBeforeItSaysSealed, Suite.test_a_sealed_segment_refuses_every_append),
    (ListsByPattern, Suite.test_only_names_with_the_prefix_are_listed),
    (ListsLikeSql, Suite.test_only_names_with_the_prefix_are_listed),
    (FindsAttributesByPattern, Suite.test_attributes_are_found_by_prefix),
    (FoldsNames, Suite.test_names_that_look_alike_are_different_segments),
    (DeletesByPattern, Suite.test_what_is_done_to_a_segment_is_not_done_to_those_that_look_alike),
    (JoinsNamesToKeys, Suite.test_segment_and_attribute_are_two_names),
    (ForgetsDeletedNames, Suite.test_a_deleted_name_is_never_used_again),
    (ForgetsWhatItOnlyCompared, Suite.test_attributes_that_are_only_compared_do_not_change_meanwhile),
    (KeepsAFewMessagesOfASegment, Suite.test_an_attribute_that_changes_often_takes_nothing_from_the_data),
    (CreatesBeforeItLooks, Suite.test_of_many_that_create_a_segment_one_has_created_it),
    (LosesTheLengthOfWhatIsTruncated, Suite.test_everything_can_be_truncated),
    (TruncatesAtAppends, Suite.test_large_segments_are_truncated_at_any_byte),
    (MissesWhatCameJustBefore, Suite.test_a_wait_for_what_has_changed_returns_at_once),
    (LooksAndThenListens, Suite.test_a_wait_that_begins_beside_an_append_hears_it),
    (WaitsForGrowth, Suite.test_a_segment_shorter_than_was_known_has_changed),
    (TellsOfOneChange, Suite.test_a_wait_for_what_has_changed_returns_at_once),
    (IsWokenByAttributes, Suite.test_a_change_of_attributes_or_of_another_segment_wakes_nobody),
    (ShowsItsOwnAttributes, Suite.test_attributes_that_were_read_stay_as_they_were),
    (SealsWithoutSaying, Suite.test_sealing_returns_the_final_info_each_time),
    (IgnoresMissingSegments, Suite.test_a_segment_that_was_never_created_is_not_found),
    (CopiesToTheEnd, Suite.test_segments_are_copied_with_their_offsets_and_sealed),
    (CopiesToTheBeginning, Suite.test_segments_are_copied_with_their_offsets_and_sealed),
    (LeavesCopiesOpen, Suite.test_segments_are_copied_with_their_offsets_and_sealed),
    (CopiesOneByOne, Suite.test_one_segment_that_cannot_be_copied_prevents_them_all),
    (CreatesOneByOne, Suite.test_one_segment_that_cannot_be_created_prevents_them_all),
    (ForgetsTheFirstBytes, Suite.test_segments_are_created_together_with_their_first_bytes),
    (AnswersForDeletedSegmentsToo, Suite.test_many_segments_are_asked_for_at_once),
    (AnswersForTheFirstSegments, Suite.test_many_segments_are_asked_for_at_once),
    (ReadsTheStartsOfDeletedSegments, Suite.test_the_starts_of_many_segments_are_read_at_once),
    (TakesAllStartsForTheFirstOffset, Suite.test_the_starts_of_many_segments_are_read_at_once),
    (CreatesAtTheFirstOffset, Suite.test_a_segment_is_forgotten_only_at_the_expected_offset),
    (CreatesTogetherAtTheFirstOffset, Suite.test_segments_that_are_created_together_begin_where_asked_for),
    (ForgetsAtAnyOffset, Suite.test_a_segment_is_forgotten_only_at_the_expected_offset),
    (ForgetsDeletedNamesAtAnOffset, Suite.test_the_name_of_a_deleted_segment_is_not_forgotten_at_an_offset),
    (LooksBeforeItForgets, Suite.test_a_segment_is_appended_to_or_forgotten_at_an_offset),
    (LooksBeforeItForgets, Suite.test_a_late_forgetting_leaves_the_next_segment_of_the_name),
]


@pytest.mark.parametrize(("kind", "test"), FOUND, ids=lambda item: getattr(item, "__name__", ""))
def test_the_suite_finds(kind: type[Wrong], test: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    assert passes(test, Wrong)
    monkeypatch.setattr("synchronizer.testing.store_conformance._LONG", 0.5)  # what is missed here, is missed for ever
    assert not passes(test, kind)


def passes(test: Callable[..., None], kind: type[SegmentStore]) -> bool:
    """Whether the store passes with each set of parameters that the test has."""
    return all(_passes_once(test, kind, arguments) for arguments in _parameters(test))


def _passes_once(test: Callable[..., None], kind: type[SegmentStore], arguments: Mapping[str, Any]) -> bool:
    with kind() as store:
        try:
            test(SegmentStoreConformance(), store, **arguments)
        except (Exception, pytest.fail.Exception):
            return False
        return True


def _parameters(test: Callable[..., None]) -> Iterator[Mapping[str, Any]]:
    marks = [mark for mark in getattr(test, "pytestmark", []) if mark.name == "parametrize"]
    if not marks:
        assert list(inspect.signature(test).parameters) == ["self", "store"]
        yield {}
    for mark in marks:
        name, values = mark.args
        yield from ({name: value} for value in values)
