"""The metadata of a stream, without a store: what its updates make of it and what it answers."""

from __future__ import annotations

import random
from collections.abc import Iterable
from datetime import timedelta
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from readergroup.errors import StreamExistsError
from readergroup.streams.config import KeyRange, RetentionPolicy, ScalingPolicy, SegmentId, StreamConfig, StreamCut
from readergroup.streams.routing import key_position
from readergroup.streams.state import (
    STREAM_UPDATES,
    AbortTransaction,
    AnnounceScale,
    AnnounceSeal,
    BeginCopy,
    CommitTransaction,
    ConfigureStream,
    CreateStream,
    DeleteStream,
    FinishTransaction,
    ForgetSegments,
    ForgetTransactions,
    Origin,
    PublishCopy,
    PublishScale,
    Scale,
    SealStream,
    StreamSegment,
    StreamState,
    TruncateStream,
)
from readergroup.streams.transactions.committed import (
    CommittedPart,
    CommittedTransaction,
    Committer,
    StreamTransactions,
)
from synchronizer import InvalidArgumentError, Map, NotFoundError, Revision, SealedError, Update
from synchronizer.state import StateCodec
from tests.golden import check_history, golden, unpacked

NAME = "shop/orders"
R = Revision(0, 0)


def apply(state: StreamState, *updates: Update[StreamState]) -> StreamState:
    for update in updates:
        state = update.apply_to(state, R)
    return state


def created(segments: int = 1) -> StreamState:
    config = StreamConfig(scaling=ScalingPolicy.fixed(segments))
    return apply(StreamState(name=NAME), CreateStream(incarnation="a1", config=config), PublishScale(epoch=0))


def split(state: StreamState, *numbers: int) -> StreamState:
    return apply(state, state.split(numbers), PublishScale(epoch=state.epoch + 1))


def merge(state: StreamState, *numbers: int) -> StreamState:
    return apply(state, state.merge(numbers), PublishScale(epoch=state.epoch + 1))


def cut(**offsets: int) -> StreamCut:
    """cut(s0=5, s2=0)"""
    return StreamCut(stream=NAME, offsets={SegmentId(f"{NAME}/{key[1:]}"): value for key, value in offsets.items()})


def ids(*numbers: int) -> tuple[SegmentId, ...]:
    return tuple(SegmentId(f"{NAME}/{number}") for number in numbers)


def scaled_at_random(seed: int, steps: int) -> list[StreamState]:
    """A stream through ``steps`` random splits and merges; the state after each."""
    rng = random.Random(seed)
    states = [created(rng.randint(1, 4))]
    for _ in range(steps):
        state = states[-1]
        if len(state.current) > 1 and rng.random() < 0.5:
            first = rng.randrange(len(state.current) - 1)
            last = rng.randint(first + 2, min(first + 4, len(state.current)))
            states.append(merge(state, *state.current[first:last]))
        else:
            states.append(split(state, *rng.sample(state.current, rng.randint(1, min(2, len(state.current))))))
    return states


def covers_every_key_once(state: StreamState, numbers: Iterable[int]) -> bool:
    ranges = sorted((state.segments[number].keys for number in numbers), key=lambda keys: keys.low)
    joined = all(left.high == right.low for left, right in zip(ranges, ranges[1:], strict=False))
    return joined and ranges[0].low == 0.0 and ranges[-1].high == 1.0


histories = st.builds(scaled_at_random, st.integers(0, 2**32), st.integers(0, 12))


@given(histories)
def test_every_epoch_covers_every_key_once_and_is_in_order(states: list[StreamState]) -> None:
    for epoch, state in enumerate(states):
        assert state.epoch == epoch
        assert covers_every_key_once(state, state.current)
        lows = [state.segments[number].keys.low for number in state.current]
        assert lows == sorted(lows)


@given(histories)
def test_predecessors_and_successors_agree_and_share_keys(states: list[StreamState]) -> None:
    state = states[-1]
    for number, each in state.segments.items():
        assert (each.successors == ()) == (number in state.current)
        for successor in each.successors:
            assert number in state.segments[successor].predecessors
            assert state.segments[successor].keys.overlaps(each.keys)
            assert successor > number
        for predecessor in each.predecessors:
            assert number in state.segments[predecessor].successors


@given(histories, st.data())
def test_from_any_epoch_the_segments_to_the_newest_come_after_their_predecessors(
    states: list[StreamState], data: st.DataObject
) -> None:
    state, then = states[-1], data.draw(st.sampled_from(states))
    found = state.segments_from(state.cut(dict.fromkeys(then.current, 0)))
    seen: set[SegmentId] = set()
    for segment, predecessors in found.items():
        assert set(predecessors) <= seen
        expected = set(state.predecessors(segment)) if segment not in ids(*then.current) else set()
        assert set(predecessors) == expected
        seen.add(segment)
    assert set(ids(*state.current)) <= seen


@given(histories, st.data())
def test_cuts_of_later_epochs_do_not_precede_those_of_earlier_ones(
    states: list[StreamState], data: st.DataObject
) -> None:
    state = states[-1]
    earlier, later = sorted(data.draw(st.tuples(*[st.integers(0, len(states) - 1)] * 2)))
    cuts = [state.cut(dict.fromkeys(states[index].current, 7)) for index in (earlier, later)]
    assert state.precedes(cuts[0], cuts[1])
    assert state.precedes(cuts[1], cuts[0]) == (earlier == later)


@settings(deadline=None)
@given(histories, st.data())
def test_truncated_segments_are_retired_and_can_be_forgotten_without_a_trace(
    states: list[StreamState], data: st.DataObject
) -> None:
    state, then = states[-1], data.draw(st.sampled_from(states))
    state = apply(state, TruncateStream(head=Map(dict.fromkeys(then.current, 3)), at=9.0))
    assert state.head_cut == state.cut(dict.fromkeys(then.current, 3))
    retired = {number for number, each in state.segments.items() if each.retired_at == 9.0}
    assert retired == {number for number in state.segments if number not in _reachable(state, then.current)}

    state = apply(state, ForgetSegments(numbers=tuple(retired)))

    assert retired.isdisjoint(state.segments)
    assert retired.isdisjoint(p for each in state.segments.values() for p in each.predecessors)
    assert covers_every_key_once(state, state.head)
    for number in retired:
        with pytest.raises(NotFoundError, match="truncated long ago"):
            state.successors(state.segment(number))


def _reachable(state: StreamState, numbers: Iterable[int]) -> set[int]:
    found = set(numbers)
    for number in sorted(state.segments):
        if number in found:
            found.update(state.segments[number].successors)
    return found


def test_a_stream_that_is_created_has_no_segments_before_they_are_published() -> None:
    state = apply(StreamState(name=NAME), CreateStream(incarnation="a1", config=StreamConfig()))
    assert state.exists and state.is_pending and state.current == ()
    state = apply(state, PublishScale(epoch=0))
    assert not state.is_pending
    assert state.current == (0,)
    assert state.head_cut == StreamCut(stream=NAME, offsets={ids(0)[0]: 0}, incarnation="a1")


def test_an_announced_scale_changes_nothing_that_is_routed_or_read() -> None:
    before = created(2)
    state = apply(before, before.split([0]))
    assert state.current == before.current
    assert state.successors(ids(0)[0]) == ()
    assert [each.number for each in state.scale.successors] == [2, 3]  # type: ignore[union-attr]


def test_one_scale_is_open_at_a_time() -> None:
    state = created(2)
    announce = state.split([1])
    state = apply(state, state.split([0]))
    with pytest.raises(InvalidArgumentError, match="no other scale"):
        apply(state, announce)


def test_a_scale_is_published_once() -> None:
    state = created(2)
    state = apply(state, state.split([0]), PublishScale(epoch=1))
    for epoch in (1, 2):
        with pytest.raises(InvalidArgumentError, match="not open"):
            apply(state, PublishScale(epoch=epoch))


def test_successors_must_take_over_exactly_the_keys_of_their_predecessors() -> None:
    for ranges in [((0.0, 0.5), (0.5, 0.9)), ((0.0, 0.6), (0.5, 1.0)), ((0.0, 0.5),), ((0.0, 1.0), (0.0, 1.0))]:
        keys = tuple(KeyRange(low=low, high=high) for low, high in ranges)
        with pytest.raises(InvalidArgumentError, match="exactly the keys"):
            apply(created(), AnnounceScale(predecessors=(0,), ranges=keys))


@pytest.mark.parametrize("numbers", [[], [0, 0], [7], [-1]])
def test_a_segment_that_is_not_of_the_newest_epoch_cannot_be_scaled(numbers: list[int]) -> None:
    state = split(created(2), 1)
    for scale in (state.split, state.merge):
        with pytest.raises(InvalidArgumentError):
            scale(numbers)
    with pytest.raises(InvalidArgumentError, match="newest epoch"):
        state.split([1])


def test_only_neighbours_can_be_merged() -> None:
    state = created(4)
    with pytest.raises(InvalidArgumentError, match="only neighbours"):
        state.merge([0, 2])
    with pytest.raises(InvalidArgumentError, match="at least two"):
        state.merge([1])
    assert merge(state, 2, 1).segments[4].keys == KeyRange(low=0.25, high=0.75)


@pytest.mark.parametrize("into", [2, 3, 7, 100])
def test_a_segment_splits_into_equal_parts(into: int) -> None:
    state = created(3)
    state = apply(state, state.split([1], into), PublishScale(epoch=1))
    assert len(state.current) == 2 + into and covers_every_key_once(state, state.current)
    widths = [state.segments[number].keys.high - state.segments[number].keys.low for number in state.current[1:-1]]
    assert max(widths) - min(widths) < 1e-12


def test_a_segment_begins_at_each_key_that_the_stream_is_split_at() -> None:
    state = created(2)
    state = apply(state, state.split_at(["a", "b", "c", "a"]), PublishScale(epoch=1))
    assert covers_every_key_once(state, state.current)
    for key in "abc":
        assert state.segments[state.routes.segment_of(key)].keys.low == key_position(key)
    with pytest.raises(InvalidArgumentError, match="begins at this key already.*at='b'"):
        state.split_at(["d", "b"])


@given(st.lists(st.floats(0, 1, exclude_min=True, exclude_max=True), max_size=8), st.integers(1, 5))
def test_any_ranges_take_over_whole_segments(places: list[float], segments: int) -> None:
    state = created(segments)
    bounds = [0.0, *sorted(set(places)), 1.0]
    ranges = [KeyRange(low=low, high=high) for low, high in pairwise(bounds)]
    after = apply(state, state.reshape(reversed(ranges)), PublishScale(epoch=1))
    assert [after.segments[number].keys for number in after.current] == ranges
    for number in after.current:
        assert set(after.segments[number].predecessors) == {
            each for each in state.current if state.segments[each].keys.overlaps(after.segments[number].keys)
        }


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        ([(0.0, 0.3), (0.25, 0.5)], r"overlap.*\[0, 0.3\) and \[0.25, 0.5\)"),
        ([(0.0, 0.3)], r"leave keys.*segment=0 missing_from=0.3"),
        ([(0.1, 0.5)], r"leave keys.*segment=0 missing_from=0.0"),
        ([(0.0, 0.2), (0.3, 0.5)], r"leave keys.*segment=0 missing_from=0.2"),
        ([(0.0, 0.7)], r"leave keys.*segment=1 missing_from=0.7"),
    ],
)
def test_gaps_and_overlaps_of_ranges_are_named(ranges: list[tuple[float, float]], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        created(2).reshape(KeyRange(low=low, high=high) for low, high in ranges)


def test_a_sealed_stream_is_not_scaled() -> None:
    state = apply(created(2), AnnounceSeal())
    assert state.is_pending
    with pytest.raises(SealedError):
        state.split([0])
    state = apply(state, SealStream())
    assert state.sealed and not state.is_pending
    with pytest.raises(SealedError):
        state.merge([0, 1])


def test_a_seal_waits_for_the_end_of_a_scale_and_is_announced_first() -> None:
    state = created(2)
    with pytest.raises(InvalidArgumentError, match="announced"):
        apply(state, SealStream())
    state = apply(state, state.split([0]))
    with pytest.raises(InvalidArgumentError, match="a scale is open"):
        apply(state, AnnounceSeal())


def test_a_stream_cannot_be_created_twice_but_again_after_it_was_deleted() -> None:
    again = CreateStream(incarnation="b2", config=StreamConfig())
    with pytest.raises(StreamExistsError):
        apply(created(), again)
    state = apply(split(created(2), 0), DeleteStream())
    assert not state.exists and state.incarnation == "a1"
    assert apply(state, again, PublishScale(epoch=0)).data_segment(0) == "data/shop/orders/b2/0"


def test_nothing_but_creation_can_be_done_with_a_stream_that_does_not_exist() -> None:
    state = apply(created(), DeleteStream())
    for update in (
        AnnounceScale(predecessors=(), ranges=()),
        PublishScale(epoch=0),
        AnnounceSeal(),
        SealStream(),
        ConfigureStream(config=StreamConfig()),
        TruncateStream(head=Map({0: 0}), at=0.0),
    ):
        with pytest.raises(NotFoundError):
            apply(state, update)


@pytest.mark.parametrize(
    "wrong",
    [
        StreamCut(stream="shop/other", offsets={SegmentId("shop/other/0"): 0}),
        StreamCut(stream=NAME, offsets={ids(0)[0]: 0, ids(1)[0]: 0}, incarnation="older"),
        cut(s0=0),
        cut(s1=0),
        cut(s0=0, s1=0, s2=0),
        cut(s2=0, s1=0),
    ],
    ids=str,
)
def test_a_cut_of_another_stream_or_with_gaps_or_overlaps_is_refused(wrong: StreamCut) -> None:
    with pytest.raises(InvalidArgumentError):
        split(created(2), 0).check_cut(wrong)


def test_a_cut_with_a_segment_that_does_not_exist_is_refused() -> None:
    with pytest.raises(NotFoundError, match="does not exist"):
        created(2).check_cut(cut(s0=0, s9=0))


def test_a_cut_may_hold_a_finished_segment_beside_newer_ones() -> None:
    state = split(created(2), 0)
    assert state.check_cut(cut(s2=5, s3=6, s1=7)) == {2: 5, 3: 6, 1: 7}
    assert state.segments_from(cut(s0=9, s1=7)) == {
        ids(0)[0]: (),
        ids(1)[0]: (),
        ids(2)[0]: ids(0),
        ids(3)[0]: ids(0),
    }


def test_two_cuts_may_each_be_behind_the_other() -> None:
    state = created(2)
    assert not state.precedes(cut(s0=1, s1=2), cut(s0=2, s1=1))
    assert not state.precedes(cut(s0=2, s1=1), cut(s0=1, s1=2))
    assert state.precedes(cut(s0=1, s1=1), cut(s0=1, s1=2))


def test_a_truncation_does_not_go_back() -> None:
    state = apply(created(2), TruncateStream(head=Map({0: 10, 1: 0}), at=0.0))
    with pytest.raises(InvalidArgumentError, match="cannot move backwards"):
        apply(state, TruncateStream(head=Map({0: 9, 1: 5}), at=0.0))


def test_only_what_is_retired_is_forgotten() -> None:
    with pytest.raises(InvalidArgumentError, match="retired"):
        apply(split(created(2), 0), ForgetSegments(numbers=(0,)))


def test_a_stream_does_not_get_more_segments_than_the_limit() -> None:
    state = created(10_000)
    with pytest.raises(InvalidArgumentError, match="too many segments"):
        apply(state, state.split([0]))


ON_THE_WIRE: list[Update[StreamState]] = [
    CreateStream(incarnation="a1", config=StreamConfig(scaling=ScalingPolicy.fixed(2))),
    PublishScale(epoch=0),
    AnnounceScale(predecessors=(0,), ranges=(KeyRange(low=0.0, high=0.25), KeyRange(low=0.25, high=0.5))),
    PublishScale(epoch=1),
    ConfigureStream(config=StreamConfig(scaling=ScalingPolicy.fixed(3))),
    TruncateStream(head=Map({2: 10, 3: 20, 1: 30}), at=1_700_000_000.5),
    ForgetSegments(numbers=(0,)),
    AnnounceSeal(),
    SealStream(),
    DeleteStream(),
]


COPY_ON_THE_WIRE: list[Update[StreamState]] = [
    BeginCopy(
        incarnation="b2",
        config=StreamConfig(scaling=ScalingPolicy.fixed(2)),
        segments=(
            StreamSegment(number=1, keys=KeyRange(low=0.5, high=1.0)),
            StreamSegment(number=2, keys=KeyRange(low=0.0, high=0.5), epoch=1, successors=(3, 4)),
            StreamSegment(number=3, keys=KeyRange(low=0.0, high=0.25), epoch=2, predecessors=(2,)),
            StreamSegment(number=4, keys=KeyRange(low=0.25, high=0.5), epoch=2, predecessors=(2,)),
        ),
        origin=Origin(
            stream="shop/source", incarnation="a1", by="segments", start=Map({1: 0, 2: 9}), end=Map({1: 7, 3: 5, 4: 6})
        ),
    ),
    PublishCopy(),
]


def test_a_copy_is_begun_once_published_once_and_nothing_else_happens_before() -> None:
    begun, whole = COPY_ON_THE_WIRE
    create = CreateStream(incarnation="a1", config=StreamConfig())
    being_copied = apply(StreamState(name=NAME), begun)
    for state, update in (
        (created(), begun),
        (being_copied, begun),
        (being_copied, create),
        (apply(being_copied, whole), begun),
    ):
        with pytest.raises(StreamExistsError):
            apply(state, update)
    for update in (AnnounceSeal(), SealStream(), ConfigureStream(config=StreamConfig())):
        with pytest.raises(NotFoundError):
            apply(being_copied, update)
    for state in (created(), apply(being_copied, whole), StreamState(name=NAME)):
        with pytest.raises(InvalidArgumentError, match="not an unfinished copy"):
            apply(state, whole)
    assert apply(being_copied, DeleteStream()) == StreamState(name=NAME, incarnation="b2")
    assert apply(being_copied, DeleteStream(), create).exists


TRANSACTIONS_ON_THE_WIRE: list[Update[StreamState]] = [
    CommitTransaction(
        key="job",
        number=3,
        generation=0,
        parts=(
            CommittedPart(name="655cb26a0123456789abcdef", segments=(0, 1)),
            CommittedPart(name="655cb26bfedcba9876543210", segments=(1,)),
        ),
        size=1234,
        at=1_700_565_610.5,
        unused_since=1_699_960_810.5,
        expired_before=1_700_478_000,
    ),
    FinishTransaction(sequence=1),
    AbortTransaction(key="other", at=1_700_565_620.0),
    CommitTransaction(
        key="single", number=1, generation=0, parts=(), size=0, at=1_700_565_625.0, unused_since=0.0, expired_before=0
    ),
    CommitTransaction(
        key="once",
        number=1,
        generation=0,
        parts=(CommittedPart(name="655cb26c0123456789abcdef", segments=(0,)),),
        size=99,
        at=1_700_565_630.0,
        unused_since=1_700_565_611.0,
        expired_before=1_700_474_400,
    ),
    FinishTransaction(sequence=2, forget=True),
]


def test_the_key_of_a_transaction_that_is_not_merged_is_not_forgotten() -> None:
    commit, finish = TRANSACTIONS_ON_THE_WIRE[:2]
    with pytest.raises(InvalidArgumentError, match="must be merged before"):
        apply(created(2), commit, ForgetTransactions(keys=("job",)))
    assert not apply(created(2), commit, finish, ForgetTransactions(keys=("job",))).transactions.committers


def test_keys_are_looked_through_only_where_the_entry_says_since_when() -> None:
    commit, finish = TRANSACTIONS_ON_THE_WIRE[:2]
    later = TRANSACTIONS_ON_THE_WIRE[4]
    assert isinstance(later, CommitTransaction)
    kept = apply(created(2), commit, finish, later.model_copy(update={"unused_since": 0.0}))
    assert set(kept.transactions.committers) == {"job", "once"}
    dropped = apply(created(2), commit, finish, later)
    assert set(dropped.transactions.committers) == {"once"}


def test_one_transaction_is_merged_at_a_time_and_nothing_else_is_begun_meanwhile() -> None:
    commit, finish, abort = TRANSACTIONS_ON_THE_WIRE[:3]
    open_ = apply(created(2), commit)
    assert open_.is_pending and not apply(open_, finish).is_pending
    another = TRANSACTIONS_ON_THE_WIRE[4]
    for update in (commit, another, open_.split([0]), AnnounceSeal(), FinishTransaction(sequence=2)):
        with pytest.raises(InvalidArgumentError):
            apply(open_, update)
    for state in (split_announced(), apply(created(2), AnnounceSeal()), StreamState(name=NAME)):
        with pytest.raises((InvalidArgumentError, SealedError, NotFoundError)):
            apply(state, another)
    with pytest.raises(InvalidArgumentError, match="not open"):
        apply(apply(open_, finish), finish)
    assert apply(open_, abort, finish, another).transactions.sequence == 2


def split_announced() -> StreamState:
    return apply(created(2), created(2).split([0]))


def test_a_number_is_committed_once_and_a_part_once() -> None:
    commit, finish = TRANSACTIONS_ON_THE_WIRE[:2]
    assert isinstance(commit, CommitTransaction)
    state = apply(created(2), commit, finish)
    for number in (2, 3):
        with pytest.raises(InvalidArgumentError, match="was committed"):
            apply(state, commit.model_copy(update={"number": number, "generation": 1}))
    with pytest.raises(NotFoundError, match="discarded"):
        apply(state, commit.model_copy(update={"number": 4}))
    with pytest.raises(InvalidArgumentError, match="each part once"):
        twice = commit.model_copy(update={"number": 4, "generation": 1, "parts": commit.parts[:1] * 2})
        apply(state, twice)
    with pytest.raises(NotFoundError, match="so long ago"):
        later = commit.model_copy(update={"key": "later", "parts": (), "expired_before": 0x655CB26B})
        apply(state, later, commit.model_copy(update={"number": 4, "generation": 1}))


CODEC = StateCodec(StreamState, STREAM_UPDATES)
#: Updates that follow each other, from a stream without a life on.
HISTORIES: dict[str, list[Update[StreamState]]] = {
    "scales": ON_THE_WIRE,
    "copy": [*COPY_ON_THE_WIRE, DeleteStream()],
    "transactions": [
        *ON_THE_WIRE[:2],
        *TRANSACTIONS_ON_THE_WIRE,
        ForgetTransactions(keys=("other", "was never there")),
        DeleteStream(),
    ],
    "digests": [
        *ON_THE_WIRE[:2],
        CommitTransaction(
            key="monday",
            number=0,
            generation=0,
            parts=(CommittedPart(name="655cb26c0123456789abcdef", segments=(0,)),),
            size=99,
            at=1_700_565_630.0,
            unused_since=0.0,
            expired_before=0,
            digest="1-00112233445566778899aabbccddeeff",
        ),
        FinishTransaction(sequence=1),
        AbortTransaction(key="monday", at=1_700_565_640.0),
    ],
}
TAGGED: list[Update[StreamState]] = [
    CreateStream(incarnation="a1", config=StreamConfig(tags={"team": "payments", "tier": "1"})),
    ConfigureStream(config=StreamConfig(tags={"team": "orders"})),
    ConfigureStream(config=StreamConfig(tags={})),
]


def test_tags_are_written_and_read_as_in_their_first_release() -> None:
    last = check_history("stream-history-tags-v3.msgpack", CODEC, StreamState(name=NAME), TAGGED)
    assert last.config == StreamConfig()


#: Of many states at once, so that it has a value in every field.
FULL = StreamState(
    name=NAME,
    incarnation="a1",
    exists=True,
    config=StreamConfig(scaling=ScalingPolicy.fixed(2)),
    epoch=1,
    segments=Map(
        {
            1: StreamSegment(number=1, keys=KeyRange(low=0.0, high=0.5), successors=(2,), retired_at=1_700_000_000.5),
            2: StreamSegment(number=2, keys=KeyRange(low=0.0, high=0.5), epoch=1, predecessors=(1,)),
        }
    ),
    current=(2,),
    head=Map({2: 7}),
    next_number=4,
    scale=Scale(predecessors=(2,), successors=(StreamSegment(number=3, keys=KeyRange(low=0.0, high=0.5), epoch=2),)),
    sealing=True,
    sealed=True,
    transactions=StreamTransactions(
        sequence=3,
        committers=Map({"job": Committer(number=3, generation=2, at=1_700_000_000.5)}),
        open=CommittedTransaction(
            sequence=3,
            key="job",
            number=3,
            generation=1,
            parts=(CommittedPart(name="655cb26a0123456789abcdef", segments=(2, 2)),),
            size=99,
        ),
        expired_before=1_700_000_000,
    ),
    origin=Origin(stream="shop/source", incarnation="b2", by="events", start=Map({1: 0}), end=Map({2: 9})),
)


@pytest.mark.parametrize("kind", HISTORIES)
def test_updates_are_written_and_read_and_change_the_stream_as_in_the_first_release(kind: str) -> None:
    check_history(f"stream-history-{kind}-v1.msgpack", CODEC, StreamState(name=NAME), HISTORIES[kind])


def test_a_state_is_written_and_read_as_in_the_first_release() -> None:
    today = CODEC.encode_snapshot(FULL, 7)
    stored = golden("stream-snapshot-v1.msgpack", today)
    assert unpacked([stored]) == unpacked([today])
    assert CODEC.decode_snapshot(stored) == (FULL, 7)


#: Later fields than those of the first release.
RETENTION = RetentionPolicy(
    max_age=timedelta(days=7),
    max_bytes=2**30,
    min_age=timedelta(hours=1.5),
    min_bytes=2**20,
    consumed_by="subscribers",
)
RETENTION_ON_THE_WIRE: list[Update[StreamState]] = [
    CreateStream(incarnation="a1", config=StreamConfig(retention=RetentionPolicy(max_age=timedelta(days=7)))),
    PublishScale(epoch=0),
    ConfigureStream(config=StreamConfig(retention=RETENTION)),
    ConfigureStream(config=StreamConfig()),
]


def test_a_retention_policy_is_written_and_read_as_in_its_first_release() -> None:
    check_history("stream-history-retention-v2.msgpack", CODEC, StreamState(name=NAME), RETENTION_ON_THE_WIRE)


SCALING_ON_THE_WIRE: list[Update[StreamState]] = [
    CreateStream(
        incarnation="a1", config=StreamConfig(scaling=ScalingPolicy.by_event_rate(1000, min_segments=2, max_segments=8))
    ),
    PublishScale(epoch=0),
    ConfigureStream(config=StreamConfig(scaling=ScalingPolicy.by_data_rate(1e6, scale_factor=4, window_seconds=60.5))),
    ConfigureStream(config=StreamConfig()),
]


def test_a_policy_that_scales_by_itself_is_written_and_read_as_in_its_first_release() -> None:
    check_history("stream-history-scaling-v2.msgpack", CODEC, StreamState(name=NAME), SCALING_ON_THE_WIRE)


def test_a_copy_has_the_segments_of_its_source() -> None:
    begun, whole = COPY_ON_THE_WIRE
    state = apply(StreamState(name=NAME), begun)
    assert state.is_being_copied and not state.exists
    state = apply(state, whole)
    assert state.exists and state.sealed and not state.is_pending and not state.is_being_copied
    assert (state.epoch, state.current, dict(state.head), state.next_number) == (2, (3, 4, 1), {1: 0, 2: 9}, 5)


def test_keys_of_transactions_are_forgotten() -> None:
    state = apply(created(2), *TRANSACTIONS_ON_THE_WIRE)
    assert set(state.transactions.committers) == {"other", "single"}
    assert apply(state, DeleteStream()).transactions == StreamTransactions()
    commits = TRANSACTIONS_ON_THE_WIRE[:3]
    state = apply(created(2), *commits, ForgetTransactions(keys=("job", "was never there")))
    assert set(state.transactions.committers) == {"other"}
