"""The metadata of a stream: its segments, the queries on it, and the updates that change it.

All of it is pure. A stream is created, scaled and sealed in two steps: one update announces the change, then the store
is changed (each step can be repeated), and a second update publishes it. Any client that finds an announced change can
complete it, so no client waits for a process that died in between.

Segments are numbered in order of creation, so a successor has a greater number than its predecessors. The state forgets
a segment some time after its data was truncated, so that it does not grow with the age of the stream.

At the limit of the state a stream can still be truncated, configured, sealed and deleted, and an announced change can
be published: however often that happens, it adds a bounded number of bytes, or none.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Literal

from synchronizer import InvalidArgumentError, Map, NotFoundError, Revision, SealedError, State, Update

from ..errors import StreamExistsError
from .config import (
    MAX_SEGMENTS,
    FrozenModel,
    KeyRange,
    SegmentId,
    StreamConfig,
    StreamCut,
    data_prefix,
    data_segment,
    even_ranges,
    number_of,
    segment_id,
    staged_segments,
    staging_prefix,
)
from .routing import Routes, key_position
from .transactions.committed import CommittedPart, CommittedTransaction, Committer, StreamTransactions


class StreamSegment(FrozenModel):
    """One segment, from the scale that created it until the state forgets it."""

    number: int
    keys: KeyRange
    #: The epoch that began with it.
    epoch: int = 0
    predecessors: tuple[int, ...] = ()
    #: Only published ones: empty for a segment of the newest epoch.
    successors: tuple[int, ...] = ()
    #: When all of its data was truncated, in seconds since 1970.
    retired_at: float | None = None


class Scale(FrozenModel):
    """An announced scale: ``successors`` will replace ``predecessors``."""

    predecessors: tuple[int, ...]
    successors: tuple[StreamSegment, ...]


class Origin(FrozenModel):
    """The source of a copy, with the offsets, by number of segment, where the copy starts and ends."""

    stream: str
    incarnation: str
    by: Literal["segments", "events"]
    start: Map[int, int]
    end: Map[int, int]


class StreamState(State):
    """The metadata of one stream name, through all streams that have it one after the other."""

    name: str
    #: Part of the names of the data segments, so that streams of one name share none. Empty before the first stream.
    incarnation: str = ""
    #: Whether the stream was created and not deleted.
    exists: bool = False
    config: StreamConfig = StreamConfig()
    #: How many scales were published, without the creation; -1 until the creation is published.
    epoch: int = -1
    segments: Map[int, StreamSegment] = Map()
    #: The segments of the newest epoch, in order of their key ranges.
    current: tuple[int, ...] = ()
    #: Where the data starts: one offset for each part of the key range.
    head: Map[int, int] = Map()
    next_number: int = 0
    scale: Scale | None = None
    #: Whether a seal was announced. No scale can begin.
    sealing: bool = False
    #: Whether each segment of the newest epoch is sealed in the store, for good.
    sealed: bool = False
    transactions: StreamTransactions = StreamTransactions()
    #: The source of a copy. Until the stream ``exists``, the copy is being made.
    origin: Origin | None = None

    # ------------------------------------------------------------------ names

    def segment(self, number: int) -> SegmentId:
        return segment_id(self.name, number)

    def data_segment(self, number: int) -> str:
        """Return the name, in the store, of the segment that holds the events."""
        return data_segment(self.segment(number), self.incarnation)

    @property
    def data_prefix(self) -> str:
        """The prefix, in the store, of the names of all its segments, staged ones too, and of no others."""
        return data_prefix(self.name, self.incarnation)

    def staged_segments(self, transaction: CommittedTransaction) -> Iterator[tuple[int, str]]:
        """Iterate over the staged segments in merge order: the number of the target segment, the name in the store."""
        prefix = staging_prefix(self.name, self.incarnation, transaction.key, transaction.generation)
        for part in transaction.parts:
            yield from zip(part.segments, staged_segments(prefix, part.name, part.segments), strict=True)

    # ------------------------------------------------------------------ questions

    @property
    def is_pending(self) -> bool:
        """Whether a change was announced and is not published."""
        return self.scale is not None or (self.sealing and not self.sealed) or self.transactions.open is not None

    @property
    def is_being_copied(self) -> bool:
        """Whether it is an incomplete copy. Only the processes that make it may see it."""
        return self.origin is not None and not self.exists

    @property
    def is_in_use(self) -> bool:
        """Whether the name has a stream, or an incomplete copy."""
        return self.exists or self.is_being_copied

    @property
    def routes(self) -> Routes:
        return Routes(self.current, [self.segments[number].keys.low for number in self.current])

    def record(self, segment: SegmentId) -> StreamSegment:
        """Return the segment's record. Raise `NotFoundError` if it is not of this stream, or forgotten."""
        number = number_of(segment)
        if segment != self.segment(number):
            raise NotFoundError("the segment belongs to another stream", segment=segment, stream=self.name)
        return self._record(number)

    def _record(self, number: int) -> StreamSegment:
        if number not in self.segments:
            known = "was truncated long ago" if number < self.next_number else "does not exist"
            raise NotFoundError(f"the segment {known}", segment=self.segment(number))
        return self.segments[number]

    def key_range(self, segment: SegmentId) -> KeyRange:
        return self.record(segment).keys

    def successors(self, segment: SegmentId) -> tuple[SegmentId, ...]:
        """Return the published segments that took over its keys, in order of key ranges; none in the newest epoch."""
        return tuple(map(self.segment, self.record(segment).successors))

    def predecessors(self, segment: SegmentId) -> tuple[SegmentId, ...]:
        """Return the segments whose keys it took over, except forgotten ones."""
        return tuple(map(self.segment, self.record(segment).predecessors))

    @property
    def head_cut(self) -> StreamCut:
        """Where the remaining data starts."""
        return self.cut(self.head)

    def cut(self, offsets: Mapping[int, int]) -> StreamCut:
        """Return these offsets, by number of segment, as a cut of this stream."""
        return StreamCut(
            stream=self.name,
            offsets={self.segment(number): offset for number, offset in offsets.items()},
            incarnation=self.incarnation,
        )

    def check_cut(self, cut: StreamCut) -> Mapping[int, int]:
        """Return the cut's offsets by number of segment. Raise if it is of another stream or has gaps or overlaps."""
        if cut.stream != self.name:
            raise InvalidArgumentError(
                "the cut belongs to another stream; use a cut of this stream", cut=str(cut), stream=self.name
            )
        if cut.incarnation not in (None, self.incarnation):
            raise InvalidArgumentError(
                "the cut belongs to a deleted stream of this name; use a cut of the present stream",
                cut=str(cut),
                stream=self.name,
            )
        offsets = {number_of(segment): offset for segment, offset in cut.offsets.items()}
        for segment in cut.offsets:
            self.record(segment)
        self._check_offsets(offsets)
        return offsets

    def check_reachable(self, cut: StreamCut) -> Mapping[int, int]:
        """Return what `check_cut` does. Raise also if no reader can be there, at a segment and at its successor."""
        offsets = self.check_cut(cut)
        later = self.reachable(number for each in offsets for number in self.segments[each].successors)
        if too_early := offsets.keys() & later:
            raise InvalidArgumentError(
                "a cut cannot have a segment together with one of its successors; use a cut of the stream's info, "
                "of a group or of a checkpoint",
                cut=str(cut),
                successors=", ".join(map(self.segment, sorted(too_early))),
            )
        return offsets

    def _check_offsets(self, offsets: Mapping[int, int]) -> None:
        at = 0.0
        for keys in sorted((self._record(number).keys for number in offsets), key=lambda keys: keys.low):
            if keys.low != at:
                raise InvalidArgumentError(
                    "a cut must cover every key exactly once", cut=str(self.cut(offsets)), at=min(at, keys.low)
                )
            at = keys.high
        if at != 1.0:
            raise InvalidArgumentError("a cut must cover every key exactly once", cut=str(self.cut(offsets)), at=at)

    def precedes(self, earlier: StreamCut, later: StreamCut) -> bool:
        """Return whether ``earlier`` is nowhere behind ``later``. Two cuts can each be behind the other somewhere."""
        return self.offsets_precede(self.check_cut(earlier), self.check_cut(later))

    def offsets_precede(self, earlier: Mapping[int, int], later: Mapping[int, int]) -> bool:
        """Return what `precedes` does, for cuts as offsets by number, which cost less."""
        for offsets in (earlier, later):
            self._check_offsets(offsets)
        pairs = self._overlapping(earlier, later)
        return all((number, earlier[number]) <= (other, later[other]) for number, other in pairs)

    def earlier(self, left: Mapping[int, int], right: Mapping[int, int]) -> Mapping[int, int]:
        """Return the cut, as offsets by number, that has for each key the place of the cut that is behind there."""
        return self._combined(left, right, min)

    def later(self, left: Mapping[int, int], right: Mapping[int, int]) -> Mapping[int, int]:
        """Return the cut, as offsets by number, that has for each key the place of the cut that is ahead there."""
        return self._combined(left, right, max)

    def _combined(
        self,
        left: Mapping[int, int],
        right: Mapping[int, int],
        choose: Callable[[tuple[int, int], tuple[int, int]], tuple[int, int]],
    ) -> Mapping[int, int]:
        pairs = self._overlapping(left, right)
        chosen = Map(choose((number, left[number]), (other, right[other])) for number, other in pairs)
        self._check_offsets(chosen)  # two cuts that no group can reach may have none in between
        return chosen

    def _overlapping(self, left: Iterable[int], right: Iterable[int]) -> Iterator[tuple[int, int]]:
        """Iterate over the pairs of segments, one per side, that share keys. Each side covers the key range once."""
        ours, theirs = self._by_keys(left), self._by_keys(right)
        i = j = 0
        while i < len(ours) and j < len(theirs):
            yield ours[i], theirs[j]
            our_end, their_end = self.segments[ours[i]].keys.high, self.segments[theirs[j]].keys.high
            i += our_end <= their_end
            j += their_end <= our_end

    def _by_keys(self, numbers: Iterable[int]) -> list[int]:
        return sorted(numbers, key=lambda number: self.segments[number].keys.low)

    def segments_from(self, cut: StreamCut) -> Mapping[SegmentId, tuple[SegmentId, ...]]:
        """Return each segment from the cut to the newest epoch, with its predecessors among them.

        A segment comes after its predecessors.
        """
        numbers = self.reachable(self.check_cut(cut))
        return {
            self.segment(number): tuple(self.segment(p) for p in self.segments[number].predecessors if p in numbers)
            for number in sorted(numbers)
        }

    def segments_between(self, start: StreamCut, end: StreamCut | None) -> Mapping[SegmentId, tuple[SegmentId, ...]]:
        """Return `segments_from` the start, without those that begin after ``end``, which must not precede it."""
        reached = self.segments_from(start)
        if end is None:
            return reached
        if not self.precedes(start, end):
            raise InvalidArgumentError(
                "the start cut is behind the end cut in some segment; choose an earlier start or a later end",
                start=str(start),
                end=str(end),
            )
        beyond = self.segments_from(end).keys() - end.offsets.keys()
        return {segment: before for segment, before in reached.items() if segment not in beyond}

    def reachable(self, numbers: Iterable[int]) -> set[int]:
        """Return these segments and all that came after them."""
        found: set[int] = set()
        waiting = list(numbers)
        while waiting:
            number = waiting.pop()
            if number not in found:
                found.add(number)
                waiting.extend(self.segments[number].successors)
        return found

    # ------------------------------------------------------------------ what scaling may do

    def split(self, numbers: Sequence[int], into: int = 2) -> AnnounceScale:
        """Return the update that splits each of these segments into equal parts."""
        parts = [
            part for number in self._by_keys(self._scalable(numbers)) for part in self.segments[number].keys.split(into)
        ]
        return AnnounceScale(predecessors=tuple(numbers), ranges=tuple(parts))

    def split_at(self, routing_keys: Collection[str]) -> AnnounceScale:
        """Return the update that splits the segments of these keys, so that a segment begins at each key."""
        places: dict[int, set[float]] = {}
        for key in routing_keys:
            place = key_position(key)
            number = self.routes.segment_at(place)
            if self.segments[number].keys.low == place:
                raise InvalidArgumentError(
                    "a segment begins at this key already", stream=self.name, at=key, segment=number
                )
            places.setdefault(number, set()).add(place)
        numbers = self._by_keys(self._scalable(list(places)))
        parts = [part for number in numbers for part in self.segments[number].keys.split_at(*sorted(places[number]))]
        return AnnounceScale(predecessors=tuple(numbers), ranges=tuple(parts))

    def reshape(self, ranges: Iterable[KeyRange]) -> AnnounceScale:
        """Return the update that replaces the segments of these keys by segments of these ranges."""
        wanted = sorted(ranges, key=lambda each: each.low)
        for left, right in pairwise(wanted):
            if left.overlaps(right):
                raise InvalidArgumentError("two ranges overlap", stream=self.name, ranges=f"{left} and {right}")
        numbers = [n for n in self.current if any(self.segments[n].keys.overlaps(each) for each in wanted)]
        self._scalable(numbers)
        for number in numbers:
            at, high = self.segments[number].keys.low, self.segments[number].keys.high
            for each in wanted:
                if each.low <= at:
                    at = max(at, each.high)
            if at < high:
                raise InvalidArgumentError(
                    "the ranges leave keys of a segment out; add a range for them",
                    stream=self.name,
                    segment=number,
                    missing_from=at,
                    keys=str(self.segments[number].keys),
                )
        return AnnounceScale(predecessors=tuple(numbers), ranges=tuple(wanted))

    def merge(self, numbers: Sequence[int]) -> AnnounceScale:
        """Return the update that merges these segments, which must be neighbours, into one."""
        in_order = self._by_keys(self._scalable(numbers))
        if len(in_order) < 2:
            raise InvalidArgumentError("a merge needs at least two segments", stream=self.name, merge=list(numbers))
        ranges = [self.segments[number].keys for number in in_order]
        if any(left.high != right.low for left, right in pairwise(ranges)):
            raise InvalidArgumentError(
                "only neighbours can be merged; choose segments whose key ranges follow one another",
                stream=self.name,
                merge=list(numbers),
                ranges=", ".join(map(str, ranges)),
            )
        whole = KeyRange(low=ranges[0].low, high=ranges[-1].high)
        return AnnounceScale(predecessors=tuple(in_order), ranges=(whole,))

    def check_takes_events(self) -> None:
        """Raise `SealedError` if the stream is sealed."""
        if self.sealing:
            raise SealedError(
                "the stream is sealed for good and takes no more events; write to another stream", stream=self.name
            )

    def _scalable(self, numbers: Sequence[int]) -> Sequence[int]:
        if self.sealing:
            raise SealedError("a sealed stream cannot be scaled", stream=self.name)
        if not numbers or len(set(numbers)) != len(numbers):
            raise InvalidArgumentError(
                "each segment to scale must be named once", stream=self.name, segments=list(numbers)
            )
        for number in numbers:
            if number not in self.current:
                raise InvalidArgumentError(
                    "only a segment of the newest epoch can be scaled",
                    stream=self.name,
                    segment=number,
                    newest=list(self.current),
                )
        return numbers


# ---------------------------------------------------------------------- updates


class CreateStream(Update[StreamState], tag="create-stream"):
    """Begin a stream, and announce its first segments."""

    incarnation: str
    config: StreamConfig

    def apply_to(self, state: StreamState, revision: Revision) -> StreamState:
        if state.exists:
            raise StreamExistsError("the stream exists", stream=state.name, config=state.config)
        if state.is_being_copied:
            raise StreamExistsError(
                "an unfinished copy has this name; discard it with streams.delete", stream=state.name
            )
        ranges = even_ranges(self.config.scaling.segments)
        first = tuple(StreamSegment(number=number, keys=keys) for number, keys in enumerate(ranges))
        return StreamState(
            name=state.name,
            incarnation=self.incarnation,
            exists=True,
            config=self.config,
            next_number=len(first),
            scale=Scale(predecessors=(), successors=first),
        )


def new_stream(name: str, incarnation: str, config: StreamConfig) -> StreamState:
    """Return the state of a stream that was just created, with its first segments."""
    state, at = StreamState(name=name), Revision(0, 0)
    for update in (CreateStream(incarnation=incarnation, config=config), PublishScale(epoch=0)):
        state = update.apply_to(state, at)
    return state


class AnnounceScale(Update[StreamState], tag="announce-scale"):
    """Fix the segments to replace and the numbers of their successors, one for each of ``ranges``."""

    predecessors: tuple[int, ...]
    ranges: tuple[KeyRange, ...]

    def apply_to(self, state: StreamState, revision: Revision) -> StreamState:
        _check_exists(state)
        if state.is_pending or state.sealed:
            raise InvalidArgumentError(
                "a scale needs a stream that is not sealed and has no other scale or transaction open",
                stream=state.name,
            )
        if not set(self.predecessors) <= set(state.current):
            raise InvalidArgumentError("only segments of the newest epoch can be scaled", stream=state.name)
        replaced = [state.segments[number] for number in self.predecessors]
        if _covered(each.keys for each in replaced) != _covered(self.ranges):
            raise InvalidArgumentError(
                "successors must cover exactly the keys of their predecessors", stream=state.name
            )
        if len(state.current) - len(replaced) + len(self.ranges) > MAX_SEGMENTS:
            raise InvalidArgumentError(
                "the stream would have too many segments; merge some first", stream=state.name, limit=MAX_SEGMENTS
            )
        successors = tuple(
            StreamSegment(
                number=number,
                keys=keys,
                epoch=state.epoch + 1,
                predecessors=tuple(each.number for each in replaced if each.keys.overlaps(keys)),
            )
            for number, keys in enumerate(self.ranges, state.next_number)
        )
        return state.replace(
            scale=Scale(predecessors=self.predecessors, successors=successors),
            next_number=state.next_number + len(successors),
        )


class PublishScale(Update[StreamState], tag="publish-scale", may_exceed_limit=True):
    """Route events to the successors: they exist, and the predecessors are sealed."""

    epoch: int

    def apply_to(self, state: StreamState, revision: Revision) -> StreamState:
        _check_exists(state)
        scale = state.scale
        if scale is None or self.epoch != state.epoch + 1:
            raise InvalidArgumentError("this scale is not open", stream=state.name, epoch=self.epoch)
        segments = state.segments.update({each.number: each for each in scale.successors})
        for number in scale.predecessors:
            successors = tuple(each.number for each in scale.successors if number in each.predecessors)
            segments = segments.set(number, segments[number].model_copy(update={"successors": successors}))
        remaining = [number for number in state.current if number not in scale.predecessors]
        remaining += [each.number for each in scale.successors]
        created = state.epoch < 0
        return state.replace(
            epoch=self.epoch,
            segments=segments,
            current=tuple(sorted(remaining, key=lambda number: segments[number].keys.low)),
            head=Map(dict.fromkeys(remaining, 0)) if created else state.head,
            scale=None,
        )


class AnnounceSeal(Update[StreamState], tag="announce-seal"):
    """Begin to seal the stream: no more scales begin, and its segments are sealed in the store."""

    def apply_to(self, state: StreamState, revision: Revision) -> StreamState:
        _check_exists(state)
        if state.scale is not None:
            raise InvalidArgumentError("a scale is open; finish it before sealing the stream", stream=state.name)
        if state.transactions.open is not None:
            raise InvalidArgumentError(
                "a transaction is not merged; finish it before sealing the stream", stream=state.name
            )
        return state.replace(sealing=True)


class SealStream(Update[StreamState], tag="seal-stream"):
    """Publish the seal: all segments of the newest epoch are sealed in the store, so no data will follow."""

    def apply_to(self, state: StreamState, revision: Revision) -> StreamState:
        _check_exists(state)
        if not state.sealing:
            raise InvalidArgumentError("a seal must be announced before it is published", stream=state.name)
        return state.replace(sealed=True)


class CommitTransaction(Update[StreamState], tag="commit-transaction"):
    """Decide that these parts are events of the stream, in this order. Any client that sees this may merge them.

    Keys not used since ``unused_since`` are forgotten; 0: none, because finding them takes time in proportion to the
    number of keys. Parts begun before ``expired_before`` can no longer be committed.
    """

    key: str
    number: int
    generation: int
    parts: tuple[CommittedPart, ...]
    size: int
    at: float
    unused_since: float
    expired_before: int
    #: Describes the events, to detect a repeated commit of other events.
    digest: str | None = None

    def apply_to(self, state: StreamState, revision: Revision) -> StreamState:
        _check_exists(state)
        state.check_takes_events()
        if state.is_pending:
            raise InvalidArgumentError(
                "a transaction needs a stream with no other transaction or scale open", stream=state.name
            )
        before = state.transactions
        committer = before.committer(self.key)
        if self.number <= committer.number:
            raise InvalidArgumentError(
                "a transaction with this number was committed", stream=state.name, key=self.key, number=self.number
            )
        before.check_parts(self.key, self.generation, self.parts)
        committers = before.committers
        if self.unused_since > 0:
            committers = Map({key: each for key, each in committers.items() if each.at >= self.unused_since})
        known = Committer(number=self.number, generation=committer.generation + 1, at=self.at, digest=self.digest)
        after = StreamTransactions(
            sequence=before.sequence + bool(self.parts),
            committers=committers.set(self.key, known),
            expired_before=max(before.expired_before, self.expired_before),
        )
        if self.parts:
            fields = self.model_dump(include={"key", "number", "generation", "size"})
            merging = CommittedTransaction(sequence=after.sequence, parts=self.parts, **fields)
            after = after.model_copy(update={"open": merging})
        return state.replace(transactions=after)


class FinishTransaction(Update[StreamState], tag="finish-transaction"):
    """Publish the merge: all events of the transaction are in the stream. With ``forget``, forget its key."""

    sequence: int
    forget: bool = False

    def apply_to(self, state: StreamState, revision: Revision) -> StreamState:
        before = state.transactions
        if before.open is None or before.open.sequence != self.sequence:
            raise InvalidArgumentError("this transaction is not open", stream=state.name, sequence=self.sequence)
        committers = before.committers
        if self.forget:
            committers = committers.delete(before.open.key)
        return state.replace(transactions=before.model_copy(update={"open": None, "committers": committers}))


class ForgetTransactions(Update[StreamState], tag="forget-transactions"):
    """Forget these keys: their transactions are over, their committers know it, and no client asks for them again."""

    keys: tuple[str, ...]

    def apply_to(self, state: StreamState, revision: Revision) -> StreamState:
        before = state.transactions
        if before.open is not None and before.open.key in self.keys:
            raise InvalidArgumentError(
                "a transaction must be merged before its key is forgotten", stream=state.name, key=before.open.key
            )
        committers = before.committers
        for key in self.keys:
            if key in committers:
                committers = committers.delete(key)
        return state.replace(transactions=before.model_copy(update={"committers": committers}))


class AbortTransaction(Update[StreamState], tag="abort-transaction"):
    """Make sure that the parts of the key that are not committed never will be."""

    key: str
    at: float

    def apply_to(self, state: StreamState, revision: Revision) -> StreamState:
        _check_exists(state)
        before = state.transactions
        known = before.committer(self.key)
        aborted = known.model_copy(update={"generation": known.generation + 1, "at": self.at})
        return state.replace(
            transactions=before.model_copy(update={"committers": before.committers.set(self.key, aborted)})
        )


class ConfigureStream(Update[StreamState], tag="configure-stream", may_exceed_limit=True):
    """Replace the config. The existing segments stay as they are."""

    config: StreamConfig

    def apply_to(self, state: StreamState, revision: Revision) -> StreamState:
        _check_exists(state)
        return state.replace(config=self.config)


class TruncateStream(Update[StreamState], tag="truncate-stream", may_exceed_limit=True):
    """Give up the data before ``head``. Segments that lie wholly before it are retired."""

    head: Map[int, int]
    at: float

    def apply_to(self, state: StreamState, revision: Revision) -> StreamState:
        _check_exists(state)
        head = state.cut(self.head)
        if not state.precedes(state.head_cut, head):
            raise InvalidArgumentError("a truncation cannot move backwards", head=str(state.head_cut), to=str(head))
        left = state.reachable(self.head)
        segments = state.segments
        for number, each in state.segments.items():
            if number not in left and each.retired_at is None:
                segments = segments.set(number, each.model_copy(update={"retired_at": self.at}))
        return state.replace(head=self.head, segments=segments)


class ForgetSegments(Update[StreamState], tag="forget-segments"):
    """Drop retired segments, whose names in the store are deleted, from the state."""

    numbers: tuple[int, ...]

    def apply_to(self, state: StreamState, revision: Revision) -> StreamState:
        segments = state.segments
        for number in self.numbers:
            each = segments[number]
            if each.retired_at is None:
                raise InvalidArgumentError("only a retired segment can be forgotten", stream=state.name, segment=number)
            segments = segments.delete(number)
            for successor in each.successors:
                if successor in segments:
                    segments = segments.set(successor, _without_predecessor(segments[successor], number))
        return state.replace(segments=segments)


class BeginCopy(Update[StreamState], tag="begin-copy"):
    """Fix the source and bounds of a copy. Its segments have the same numbers as in the source."""

    incarnation: str
    config: StreamConfig
    segments: tuple[StreamSegment, ...]
    origin: Origin

    def apply_to(self, state: StreamState, revision: Revision) -> StreamState:
        if state.is_in_use:
            raise StreamExistsError("the stream or another unfinished copy has this name", stream=state.name)
        segments = Map({each.number: each for each in self.segments})
        last = sorted(self.origin.end, key=lambda number: segments[number].keys.low)
        start = self.origin.start
        return StreamState(
            name=state.name,
            incarnation=self.incarnation,
            config=self.config,
            epoch=max(each.epoch for each in self.segments),
            segments=segments,
            current=tuple(last),
            head=start if self.origin.by == "segments" else Map(dict.fromkeys(start, 0)),
            next_number=max(segments) + 1,
            sealing=True,
            origin=self.origin,
        )


class PublishCopy(Update[StreamState], tag="publish-copy"):
    """Make the copy a stream: all data is copied and all segments are sealed."""

    def apply_to(self, state: StreamState, revision: Revision) -> StreamState:
        if not state.is_being_copied:
            raise InvalidArgumentError("the stream is not an unfinished copy", stream=state.name)
        return state.replace(exists=True, sealed=True)


class DeleteStream(Update[StreamState], tag="delete-stream"):
    """End this stream. The log stays, and can continue with a new incarnation of the name."""

    def apply_to(self, state: StreamState, revision: Revision) -> StreamState:
        return StreamState(name=state.name, incarnation=state.incarnation)


#: All updates of a stream's metadata, for opening its synchronizer.
STREAM_UPDATES: tuple[type[Update[StreamState]], ...] = (
    CreateStream,
    AnnounceScale,
    PublishScale,
    AnnounceSeal,
    SealStream,
    CommitTransaction,
    FinishTransaction,
    ForgetTransactions,
    AbortTransaction,
    ConfigureStream,
    TruncateStream,
    ForgetSegments,
    BeginCopy,
    PublishCopy,
    DeleteStream,
)


def _check_exists(state: StreamState) -> None:
    if not state.exists:
        raise NotFoundError("the stream does not exist", stream=state.name)


def _covered(ranges: Iterable[KeyRange]) -> list[tuple[float, float]]:
    """Return the keys that these ranges cover, as ranges with gaps between them. Overlapping ranges stay apart."""
    covered: list[tuple[float, float]] = []
    for keys in sorted(ranges, key=lambda keys: keys.low):
        if covered and covered[-1][1] == keys.low:
            covered[-1] = (covered[-1][0], keys.high)
        else:
            covered.append((keys.low, keys.high))
    return covered


def _without_predecessor(segment: StreamSegment, number: int) -> StreamSegment:
    return segment.model_copy(update={"predecessors": tuple(p for p in segment.predecessors if p != number)})
