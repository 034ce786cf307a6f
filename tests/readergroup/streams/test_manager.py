"""Managing streams on a store: each step, whoever began it; and what is refused before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from readergroup.errors import StreamExistsError
from readergroup.streams.config import KeyRange, ScalingPolicy, SegmentId, StreamCut
from readergroup.streams.data.block import encode_block
from readergroup.streams.data.segment_reader import SegmentReader
from readergroup.streams.manager import StreamManager
from readergroup.streams.writing.event_numbers import WRITER_RETENTION_SECONDS
from synchronizer import (
    ClosedError,
    DeadlineExceededError,
    InvalidArgumentError,
    ManualClock,
    NotFoundError,
    SealedError,
    SegmentStore,
    StoreUnavailableError,
    TruncatedError,
)
from synchronizer.store import MAX_CREATED
from synchronizer.testing import FailingStore, InstantClock, Operation
from tests.dying import Died

pytestmark = pytest.mark.stores(round_robin=True)
NAME = "shop/orders"


@pytest.fixture
def streams(store: SegmentStore) -> StreamManager:
    return StreamManager(store)


@dataclass
class Intruder:
    """Acts once before the given operation: another process that comes at this very point, or a death."""

    verb: str
    prefix: str
    action: Callable[[], object]
    acted: list[Operation] = field(default_factory=list)

    def __call__(self, operation: Operation) -> None:
        if not self.acted and operation.verb == self.verb and operation.segment.startswith(self.prefix):
            self.acted.append(operation)
            self.action()


def die() -> None:
    raise Died


def client_that_meets(store: SegmentStore, intruder: Intruder) -> StreamManager:
    """An intruder at ``create`` meets a client whose store creates one segment at a time."""
    failing = FailingStore(store)
    if intruder.verb == "create":
        failing.guarantees = replace(store.guarantees, atomic_multi_create=False)
    failing.before = intruder
    return StreamManager(failing)


def contents(store: SegmentStore) -> dict[str, int]:
    return {name: store.info(name).length for name in store.list()}


def append(streams: StreamManager, number: int, *events: bytes) -> None:
    state = streams.fetch_state(NAME)
    data = encode_block(events, written_at=0, writer_id=bytes(16), first_number=1)
    streams.store.append(state.data_segment(number), data)


def fixed(segments: int) -> ScalingPolicy:
    return ScalingPolicy.fixed(segments)


# ---------------------------------------------------------------------- create, configure, list


def test_a_created_stream_has_its_segments_and_they_exist_in_the_store(streams: StreamManager) -> None:
    info = streams.create(NAME, scaling=fixed(2))
    assert dict(info.segments) == {
        SegmentId("shop/orders/0"): KeyRange(low=0.0, high=0.5),
        SegmentId("shop/orders/1"): KeyRange(low=0.5, high=1.0),
    }
    assert (info.epoch, info.sealed) == (0, False)
    assert dict(info.head.offsets) == dict(info.tail.offsets) == dict.fromkeys(info.segments, 0)
    assert list(streams.store.list("data/")) == [f"data/shop/orders/{info.incarnation}/{n}" for n in (0, 1)]


def test_creating_what_exists_with_the_same_config_returns_it(streams: StreamManager) -> None:
    first = streams.create(NAME, scaling=fixed(2))
    assert StreamManager(streams.store).create(NAME, scaling=fixed(2)) == first


def test_creating_what_exists_with_another_config_shows_what_differs_and_names_configure(
    streams: StreamManager,
) -> None:
    streams.create(NAME, scaling=fixed(2))
    with pytest.raises(StreamExistsError, match=r"streams\.configure") as caught:
        streams.create(NAME, scaling=fixed(2), tags={"team": "x"})
    assert caught.value.facts == {"stream": NAME, "exists_with": {"tags": None}, "asked_for": {"tags": {"team": "x"}}}
    by_rate = ScalingPolicy.by_event_rate(1000, min_segments=2)
    streams.configure(NAME, scaling=by_rate)
    with pytest.raises(StreamExistsError, match=r"change it with streams\.configure") as caught:
        streams.create(NAME, scaling=ScalingPolicy.by_event_rate(1000, min_segments=4))
    assert caught.value.facts["asked_for"] == {"scaling": {"segments": 4}}


def test_creating_what_exists_with_other_segments_names_scale(streams: StreamManager) -> None:
    streams.create(NAME, scaling=fixed(2))
    with pytest.raises(StreamExistsError, match=r"the stream has 2 segments; .*streams\.scale") as caught:
        streams.create(NAME, scaling=fixed(4))
    assert caught.value.facts["exists_with"] == {"scaling": {"segments": 2}}
    assert caught.value.facts["asked_for"] == {"scaling": {"segments": 4}}
    streams.scale(NAME, split=[0, 1])
    with pytest.raises(StreamExistsError, match=r"change it with streams\.configure"):
        streams.create(NAME, scaling=fixed(4))  # it has four by now
    streams.configure(NAME, scaling=fixed(4))
    assert len(streams.create(NAME, scaling=fixed(4)).segments) == 4


def test_a_config_is_changed_by_configure(streams: StreamManager) -> None:
    streams.create(NAME, scaling=fixed(2))
    assert streams.configure(NAME, scaling=fixed(3)).config.scaling == fixed(3)
    assert streams.create(NAME, scaling=fixed(3)).epoch == 0


def test_streams_are_listed_by_scope_and_deleted_ones_are_not(streams: StreamManager) -> None:
    for name in ("shop/b", "shop/a", "shopping/c", "other/d"):
        streams.create(name)
    streams.delete("other/d")
    assert list(streams.list()) == ["shop/a", "shop/b", "shopping/c"]
    assert list(streams.list("shop")) == ["shop/a", "shop/b"]
    assert streams.exists("shop/a") and not streams.exists("other/d") and not streams.exists("no/such")


def test_streams_are_listed_by_tag(streams: StreamManager) -> None:
    streams.create("shop/a", tags={"team": "x", "tier": "1"})
    streams.create("shop/b", tags={"team": "x"})
    streams.create("bank/c", tags={"team": "y"})
    streams.create("bank/d")
    assert list(streams.list(tag="team")) == ["bank/c", "shop/a", "shop/b"]
    assert list(streams.list(tag={"team": "x"})) == ["shop/a", "shop/b"]
    assert list(streams.list("bank", tag={"team": "x"})) == []
    assert list(streams.list(tag={"team": "x", "tier": "1"})) == ["shop/a"]
    assert [info.name for info in streams.describe_all(tag="tier")] == ["shop/a"]
    assert streams.create("shop/b", tags={"team": "x"}).epoch == 0
    with pytest.raises(StreamExistsError):
        streams.create("shop/b")
    assert streams.configure("shop/b", tags={"tier": "2"}).config.tags == {"tier": "2"}
    assert streams.configure("shop/b", scaling=fixed(2)).config.tags == {"tier": "2"}
    assert streams.configure("shop/b", tags={}).config.tags is None
    assert list(streams.list(tag="tier")) == ["shop/a"]


@pytest.mark.parametrize("tags", ["team", ["team"], {"team": 1}, {"": "x"}, {"team": ""}, {"team": "x" * 251}])
def test_bad_tags_are_refused_before_anything_is_written(streams: StreamManager, tags: Any) -> None:
    streams.create(NAME)
    before = contents(streams.store)
    for call in (streams.create, streams.configure):
        with pytest.raises(InvalidArgumentError, match="tags"):
            call(NAME, tags=tags)
    with pytest.raises(InvalidArgumentError, match="tag must be"):
        streams.list(tag=5)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="tags"):
        streams.create(NAME, tags={str(number): "x" for number in range(129)})
    assert contents(streams.store) == before


# ---------------------------------------------------------------------- bad input


def test_an_unknown_stream_is_not_found_whatever_is_asked_of_it(store: SegmentStore, streams: StreamManager) -> None:
    cut = StreamCut(stream=NAME, offsets={SegmentId("shop/orders/0"): 0})
    calls: list[Callable[[], object]] = [
        lambda: streams.scale(NAME, split=[0]),
        lambda: streams.configure(NAME, scaling=fixed(1)),
        lambda: streams.seal(NAME),
        lambda: streams.truncate(NAME, cut),
        lambda: streams.info(NAME),
        lambda: streams.finish_pending(NAME),
        lambda: streams.fetch_state(NAME),
        lambda: streams.synchronizer(NAME),
    ]
    for call in calls:
        with pytest.raises(NotFoundError, match=r"create it with streams\.create"):
            call()
    with pytest.raises(NotFoundError, match="there is no stream of this name: "):
        streams.delete(NAME)
    assert contents(store) == {}


@pytest.mark.parametrize("name", ["orders", "shop/", "shop/or ders", "a/b/c", "shop/" + "x" * 251])
def test_a_bad_name_is_refused_before_anything_is_written(streams: StreamManager, name: str) -> None:
    for call in (streams.create, streams.seal, streams.delete, streams.info, streams.exists):
        with pytest.raises(InvalidArgumentError):
            call(name)
    with pytest.raises(InvalidArgumentError):
        streams.list("sc ope")
    assert contents(streams.store) == {}


def test_a_scale_that_cannot_be_is_refused_before_anything_is_written(streams: StreamManager) -> None:
    streams.create(NAME, scaling=fixed(3))
    before = contents(streams.store)
    bad: list[dict[str, Any]] = [
        {"at": []},
        {"at": [5]},
        {"at": "x" * 5000},
        {"at": "x", "split": [0]},
        {"ranges": []},
        {"ranges": "0-1"},
        {"ranges": [(0, 0.2), (0.5, 0.3)]},
        {"ranges": [(0, float("nan"))]},
        {"ranges": [0.5]},
        {"split": [0], "into": 1},
        {"split": [0], "into": 2.0},
        {"split": [0], "into": 10_001},
        {"split": [0, 1], "into": 9_000},
        {"merge": [0, 1], "into": 3},
        {},
        {"split": [0], "merge": [1, 2]},
        {"split": []},
        {"split": [7]},
        {"split": [0, 0]},
        {"merge": [0, 2]},
        {"merge": [1]},
        {"merge": []},
        {"merge": [1, 9]},
        {"split": [f"{NAME}/7"]},
        {"split": [0, f"{NAME}/0"]},
        {"split": ["0"]},
        {"split": f"{NAME}/0"},
    ]
    for arguments in bad:
        with pytest.raises(InvalidArgumentError):
            streams.scale(NAME, **arguments)
    for which in ("split", "merge"):
        with pytest.raises(InvalidArgumentError, match="of another stream.*segment='shop/other/1'"):
            streams.scale(NAME, **{which: [0, "shop/other/1"]})
    assert contents(streams.store) == before


def test_a_sealed_stream_is_not_scaled_and_stays_sealed(streams: StreamManager) -> None:
    streams.create(NAME, scaling=fixed(2))
    assert streams.seal(NAME).sealed
    before = contents(streams.store)
    assert streams.seal(NAME).sealed
    with pytest.raises(SealedError):
        streams.scale(NAME, split=[0])
    assert contents(streams.store) == before


def test_a_deleted_stream_is_not_found(streams: StreamManager) -> None:
    streams.create(NAME)
    streams.delete(NAME)
    for call in (streams.seal, streams.delete, streams.info):
        with pytest.raises(NotFoundError):
            call(NAME)
    with pytest.raises(NotFoundError):
        streams.scale(NAME, split=[0])


def test_a_truncation_at_a_cut_that_cannot_be_is_refused_before_anything_is_written(streams: StreamManager) -> None:
    streams.create(NAME, scaling=fixed(2))
    append(streams, 0, b"some", b"events")
    before = contents(streams.store)

    def cut(stream: str = NAME, incarnation: str | None = None, **offsets: int) -> StreamCut:
        held = {SegmentId(f"{stream}/{key[1:]}"): value for key, value in offsets.items()}
        return StreamCut(stream=stream, offsets=held, incarnation=incarnation)

    with pytest.raises(InvalidArgumentError, match="another stream"):
        streams.truncate(NAME, cut("shop/other", s0=0, s1=0))
    with pytest.raises(InvalidArgumentError, match="deleted stream of this name"):
        streams.truncate(NAME, cut(incarnation="older", s0=0, s1=0))
    with pytest.raises(InvalidArgumentError, match="exactly once"):
        streams.truncate(NAME, cut(s0=0))
    with pytest.raises(InvalidArgumentError, match="beyond the end"):
        streams.truncate(NAME, cut(s0=10_000, s1=0))
    with pytest.raises(InvalidArgumentError, match="no event starts"):
        streams.truncate(NAME, cut(s0=5, s1=0))
    with pytest.raises(NotFoundError, match="does not exist"):
        streams.truncate(NAME, cut(s0=0, s9=0))
    assert contents(streams.store) == before


def test_a_cut_with_a_segment_and_its_successor_is_no_place_to_truncate_or_to_start_at(streams: StreamManager) -> None:
    streams.create(NAME, scaling=fixed(2))
    streams.scale(NAME, merge=[0, 1])
    streams.scale(NAME, split=[2])
    before = contents(streams.store)
    for ours, others in ((0, 4), (1, 3)):  # a reader gets to 3 and 4 after 2, and there after 0 and 1
        cut = StreamCut(stream=NAME, offsets={SegmentId(f"{NAME}/{number}"): 0 for number in (ours, others)})
        with pytest.raises(InvalidArgumentError, match="together with one of its successors"):
            streams.truncate(NAME, cut)
        with pytest.raises(InvalidArgumentError, match="together with one of its successors"):
            streams.resolve(streams.fetch_state(NAME), cut)
    assert contents(streams.store) == before


def test_a_closed_manager_refuses(streams: StreamManager) -> None:
    streams.create(NAME)
    streams.close()
    streams.close()
    with pytest.raises(ClosedError):
        streams.info(NAME)
    with pytest.raises(ClosedError):
        streams.create("shop/other")


# ---------------------------------------------------------------------- scaling and sealing


def test_after_a_split_the_old_segment_is_sealed_and_the_new_ones_take_events(streams: StreamManager) -> None:
    streams.create(NAME, scaling=fixed(2))
    info = streams.scale(NAME, split=[0])
    assert [(str(segment), str(keys)) for segment, keys in info.segments.items()] == [
        ("shop/orders/2", "[0, 0.25)"),
        ("shop/orders/3", "[0.25, 0.5)"),
        ("shop/orders/1", "[0.5, 1)"),
    ]
    state = streams.fetch_state(NAME)
    assert [streams.store.info(state.data_segment(number)).sealed for number in range(4)] == [True, False, False, False]
    assert state.successors(SegmentId("shop/orders/0")) == ("shop/orders/2", "shop/orders/3")


def test_several_segments_can_be_split_and_merged_at_once(streams: StreamManager) -> None:
    streams.create(NAME, scaling=fixed(2))
    assert len(streams.scale(NAME, split=[0, 1]).segments) == 4
    info = streams.scale(NAME, merge=[2, 3, 4, 5])
    assert list(info.segments.values()) == [KeyRange(low=0.0, high=1.0)]
    assert info.epoch == 2


def test_segments_to_scale_can_be_given_by_their_names(streams: StreamManager) -> None:
    before = streams.create(NAME, scaling=fixed(2)).segments
    info = streams.scale(NAME, split=list(before), into=2)
    assert list(info.segments) == [f"{NAME}/{number}" for number in (2, 3, 4, 5)]
    assert list(streams.scale(NAME, merge=[f"{NAME}/3", 4]).segments) == [f"{NAME}/{number}" for number in (2, 6, 5)]


def test_a_sealed_stream_has_its_last_segments_sealed_in_the_store(streams: StreamManager) -> None:
    streams.create(NAME, scaling=fixed(2))
    streams.scale(NAME, split=[0])
    assert streams.seal(NAME).sealed
    assert all(streams.store.info(segment).sealed for segment in streams.store.list("data/"))


POINTS_OF_DEATH = [
    ("create", "data/"),
    ("create_together", ""),
    ("seal", "data/"),
]


@pytest.mark.parametrize(("verb", "prefix"), POINTS_OF_DEATH)
@pytest.mark.parametrize("through", ["finish_pending", "scale", "seal", "fetch"])
def test_a_scale_that_a_dead_client_began_is_completed_by_another(
    store: SegmentStore, streams: StreamManager, verb: str, prefix: str, through: str
) -> None:
    streams.create(NAME, scaling=fixed(2))
    with pytest.raises(Died):
        client_that_meets(store, Intruder(verb, prefix, die)).scale(NAME, split=[0])
    assert streams.fetch_state(NAME).scale is not None

    if through == "scale":
        streams.scale(NAME, merge=[3, 1])
    elif through == "seal":
        assert streams.seal(NAME).sealed
    else:
        streams.finish_pending(NAME)

    state = streams.fetch_state(NAME)
    assert not state.is_pending
    assert state.segments[0].successors == (2, 3)
    assert store.info(state.data_segment(0)).sealed


def test_a_scale_whose_publication_died_is_published_by_another(store: SegmentStore, streams: StreamManager) -> None:
    streams.create(NAME, scaling=fixed(2))
    sealed_first = Intruder("seal", "data/", lambda: None)

    def die_after_the_seal(operation: Operation) -> None:
        if sealed_first.acted and operation.verb == "append":
            raise Died
        sealed_first(operation)

    failing = FailingStore(store)
    failing.before = die_after_the_seal
    with pytest.raises(Died):
        StreamManager(failing).scale(NAME, split=[0])
    assert streams.finish_pending(NAME).current == (2, 3, 1)


def test_a_stream_is_created_in_one_step_of_the_store(store: SegmentStore) -> None:
    failing = FailingStore(store)
    info = StreamManager(failing).create(NAME, scaling=fixed(3))
    assert [operation.verb for operation in failing.operations] == ["create_together"]
    assert StreamManager(store).info(NAME) == info
    assert len(list(store.list("data/"))) == 3


def test_the_same_stream_is_created_where_the_store_creates_one_segment_at_a_time(store: SegmentStore) -> None:
    stepwise = FailingStore(store)
    stepwise.guarantees = replace(store.guarantees, atomic_multi_create=False)
    names = ("shop/together", "shop/stepwise")
    for name, with_store in zip(names, (store, stepwise), strict=True):
        StreamManager(with_store).create(name, scaling=fixed(3))
    states = [StreamManager(store).fetch_state(name) for name in names]
    assert states[0].replace(name="", incarnation="") == states[1].replace(name="", incarnation="")
    for name in names:
        assert StreamManager(store).scale(name, split=[0]).epoch == 1


def test_a_stream_of_more_segments_than_one_step_takes_is_created(store: SegmentStore, streams: StreamManager) -> None:
    failing = FailingStore(store)
    info = StreamManager(failing).create(NAME, scaling=fixed(MAX_CREATED + 50))
    assert len(info.segments) == len(list(store.list("data/"))) == MAX_CREATED + 50
    assert failing.count("create") == 0
    assert streams.info(NAME) == info


def test_a_creation_whose_answer_is_lost_is_made_once(store: SegmentStore, streams: StreamManager) -> None:
    failing = FailingStore(store)

    def lose_the_answer(operation: Operation) -> None:
        failing.after = None
        raise StoreUnavailableError("the answer is lost")

    failing.after = lose_the_answer
    info = StreamManager(failing).create(NAME, scaling=fixed(2))
    assert failing.count("create_together") == 2
    assert streams.info(NAME) == info
    assert len(list(store.list("data/"))) == 2


def test_of_many_that_create_a_stream_one_has_created_it(store: SegmentStore) -> None:
    with ThreadPoolExecutor(4) as threads:
        for attempt in range(5):
            name = f"shop/{attempt}"
            managers = [StreamManager(store) for _ in range(4)]
            infos = list(threads.map(lambda streams, name=name: streams.create(name, scaling=fixed(2)), managers))
            assert all(info == infos[0] for info in infos)
            assert len(list(store.list(f"data/{name}/"))) == 2


def test_many_streams_are_created_in_few_steps(store: SegmentStore) -> None:
    failing = FailingStore(store)
    streams = StreamManager(failing)
    names = [f"shop/{number:03}" for number in range(250)]
    infos = streams.create_many(reversed(names))
    assert [info.name for info in infos] == names[::-1]
    assert [operation.verb for operation in failing.operations] == ["read_starts", "create_together"] * 3
    assert list(StreamManager(store).list()) == names
    assert [StreamManager(store).info(info.name) for info in infos[:3]] == list(infos[:3])
    failing.operations.clear()
    assert streams.create_many(names) == infos[::-1]
    assert {operation.verb for operation in failing.operations} == {"read_starts", "infos"}


def test_many_streams_are_created_though_some_exist_or_were_deleted(streams: StreamManager) -> None:
    streams.create("shop/b", scaling=fixed(2))
    for name in ("shop/c", "shop/d"):
        streams.create(name)
        streams.delete(name)
    StreamManager(streams.store).scale("shop/b", split=[0])
    names = ["shop/a", "shop/b", "shop/c", "shop/a"]
    infos = StreamManager(streams.store).create_many(names, scaling=fixed(2))
    assert [info.name for info in infos] == names
    assert [info.epoch for info in infos] == [0, 1, 0, 0]
    assert list(streams.list()) == ["shop/a", "shop/b", "shop/c"]
    assert len(list(streams.store.list("data/shop/a/"))) == 2
    assert streams.create_many([]) == []


def test_of_many_streams_one_with_another_config_is_refused(streams: StreamManager) -> None:
    streams.create("shop/b", scaling=fixed(2))
    with pytest.raises(StreamExistsError, match="shop/b"):
        streams.create_many(["shop/a", "shop/b", "shop/c"])
    assert streams.create_many(["shop/a", "shop/c"])


def test_a_bad_name_among_many_is_refused_before_anything_is_written(streams: StreamManager) -> None:
    for names in (["shop/a", "orders"], "shop/a", ["shop/a", 5], 5):
        with pytest.raises(InvalidArgumentError):
            streams.create_many(names)  # type: ignore[arg-type]
    assert contents(streams.store) == {}


def test_many_streams_are_created_where_the_store_creates_one_segment_at_a_time(store: SegmentStore) -> None:
    failing = FailingStore(store)
    failing.guarantees = replace(store.guarantees, atomic_multi_create=False)
    assert len(StreamManager(failing).create_many([f"shop/{number}" for number in range(5)])) == 5
    assert failing.count("create_together") == 0
    assert len(list(StreamManager(store).list())) == 5


def test_of_many_that_create_the_same_streams_all_get_them(store: SegmentStore) -> None:
    names = [f"shop/{number}" for number in range(20)]
    with ThreadPoolExecutor(4) as threads:
        managers = [StreamManager(store) for _ in range(4)]
        infos = list(threads.map(lambda streams: streams.create_many(names), managers))
    assert all(each == infos[0] for each in infos)
    assert len(list(store.list("data/"))) == 20


@pytest.mark.parametrize("through", ["fetch", "configure"])
def test_a_creation_that_a_dead_client_began_is_completed_by_another(
    store: SegmentStore, streams: StreamManager, through: str
) -> None:
    with pytest.raises(Died):
        client_that_meets(store, Intruder("create", "data/", die)).create(NAME, scaling=fixed(2))
    assert streams.fetch_state(NAME).current == (0, 1)
    assert len(list(store.list("data/"))) == 2


def test_a_seal_that_a_dead_client_began_is_completed_by_another(store: SegmentStore, streams: StreamManager) -> None:
    streams.create(NAME, scaling=fixed(2))
    with pytest.raises(Died):
        client_that_meets(store, Intruder("seal", "data/", die)).seal(NAME)
    assert not streams.fetch_state(NAME).sealed
    assert streams.finish_pending(NAME).sealed


@pytest.mark.parametrize(("verb", "prefix"), [*POINTS_OF_DEATH, ("append", "stream/")])
def test_two_clients_that_complete_one_scale_publish_it_once(
    store: SegmentStore, streams: StreamManager, verb: str, prefix: str
) -> None:
    streams.create(NAME, scaling=fixed(2))
    with pytest.raises(Died):
        client_that_meets(store, Intruder("create", "data/", die)).scale(NAME, split=[0])
    intruder = Intruder(verb, prefix, lambda: streams.finish_pending(NAME))
    state = client_that_meets(store, intruder).finish_pending(NAME)
    assert intruder.acted
    assert (state.epoch, state.current) == (1, (2, 3, 1))
    assert streams.fetch_state(NAME) == state


def test_a_client_that_slept_does_not_publish_the_next_scale_before_its_time(
    store: SegmentStore, streams: StreamManager
) -> None:
    streams.create(NAME, scaling=fixed(2))

    def finish_and_announce_another() -> None:
        streams.finish_pending(NAME)
        streams.synchronizer(NAME).update_state(lambda state: [state.split([1])])

    with pytest.raises(Died):
        client_that_meets(store, Intruder("create", "data/", die)).scale(NAME, split=[0])
    sleeper = client_that_meets(store, Intruder("append", "stream/", finish_and_announce_another))
    state = sleeper.finish_pending(NAME)
    assert (state.epoch, state.current) == (1, (2, 3, 1))
    assert state.scale is not None
    assert not store.info(state.data_segment(1)).sealed


def test_a_store_that_is_away_for_a_moment_does_not_fail_a_scale(store: SegmentStore) -> None:
    failing = FailingStore(store)
    streams = StreamManager(failing)
    streams.create(NAME, scaling=fixed(2))
    attempts: list[Operation] = []

    def away_twice(operation: Operation) -> None:
        if operation.segment.startswith("data/"):
            attempts.append(operation)
            if len(attempts) in (1, 2, 4):
                raise StoreUnavailableError("away")

    failing.before = away_twice
    assert streams.scale(NAME, split=[0]).epoch == 1
    assert len(attempts) > 4


def test_a_store_that_stays_away_is_told_at_the_deadline(store: SegmentStore) -> None:
    failing = FailingStore(store)
    streams = StreamManager(failing, timeout=0.05)
    streams.create(NAME)
    failing.before = Intruder("seal", "data/", lambda: setattr(failing, "unavailable", True))
    with pytest.raises((StoreUnavailableError, TimeoutError)):
        streams.seal(NAME)


# ---------------------------------------------------------------------- delete and create again


@pytest.mark.parametrize(("verb", "prefix"), POINTS_OF_DEATH)
@pytest.mark.parametrize("again", [True, False])
def test_a_scaler_that_slept_through_delete_and_create_does_no_harm(
    store: SegmentStore, streams: StreamManager, verb: str, prefix: str, again: bool
) -> None:
    streams.create(NAME, scaling=fixed(2))

    def delete_and_create() -> None:
        streams.delete(NAME)
        if again:
            streams.create(NAME, scaling=fixed(2))

    sleeper = client_that_meets(store, Intruder(verb, prefix, delete_and_create))
    with pytest.raises(NotFoundError, match="was deleted" if again else "no stream of this name"):
        sleeper.scale(NAME, split=[0])

    left = list(store.list("data/"))
    if again:
        state = streams.fetch_state(NAME)
        assert (state.epoch, state.current, state.scale) == (0, (0, 1), None)
        assert left == [state.data_segment(0), state.data_segment(1)]
        assert not any(store.info(segment).sealed for segment in left)
    else:
        assert left == []


@pytest.mark.parametrize(("verb", "prefix"), POINTS_OF_DEATH)
def test_a_scaler_that_slept_until_the_stream_was_deleted_and_half_created_again_completes_the_creation(
    store: SegmentStore, streams: StreamManager, verb: str, prefix: str
) -> None:
    streams.create(NAME, scaling=fixed(2))
    with pytest.raises(Died):
        client_that_meets(store, Intruder("create", "data/", die)).scale(NAME, split=[0])

    def delete_and_half_create() -> None:
        streams.delete(NAME)
        with pytest.raises(Died):
            client_that_meets(store, Intruder("create", "data/", die)).create(NAME, scaling=fixed(3))

    sleeper = client_that_meets(store, Intruder(verb, prefix, delete_and_half_create))
    state = sleeper.finish_pending(NAME)
    assert (state.epoch, state.current, state.scale) == (0, (0, 1, 2), None)
    assert list(store.list("data/")) == [state.data_segment(number) for number in state.current]


@pytest.mark.parametrize(("verb", "prefix"), [("seal", "data/"), ("append", "stream/")])
def test_a_sealer_that_slept_through_delete_and_create_does_no_harm(
    store: SegmentStore, streams: StreamManager, verb: str, prefix: str
) -> None:
    streams.create(NAME, scaling=fixed(2))
    with pytest.raises(Died):
        client_that_meets(store, Intruder("seal", "data/", die)).seal(NAME)

    def delete_and_create() -> None:
        streams.delete(NAME)
        streams.create(NAME, scaling=fixed(2))

    client_that_meets(store, Intruder(verb, prefix, delete_and_create)).finish_pending(NAME)
    state = streams.fetch_state(NAME)
    assert not state.sealing
    assert not any(store.info(segment).sealed for segment in store.list("data/"))


def test_revisions_go_on_over_delete_and_create_and_names_of_data_do_not_come_back(streams: StreamManager) -> None:
    first = streams.create(NAME)
    before = streams.synchronizer(NAME).revision
    streams.delete(NAME)
    assert list(streams.store.list("data/")) == []
    second = streams.create(NAME)
    assert second.incarnation != first.incarnation
    assert streams.synchronizer(NAME).revision > before


def test_what_a_deletion_that_died_left_behind_is_deleted_by_the_next_creation(
    store: SegmentStore, streams: StreamManager
) -> None:
    streams.create(NAME, scaling=fixed(3))
    with pytest.raises(Died):
        client_that_meets(store, Intruder("delete", "data/", die)).delete(NAME)
    assert len(list(store.list("data/"))) == 3
    info = streams.create(NAME)
    assert list(store.list("data/")) == [f"data/{NAME}/{info.incarnation}/0"]


# ---------------------------------------------------------------------- truncating


def test_truncated_data_is_gone_up_to_the_block_that_holds_the_cut(streams: StreamManager) -> None:
    streams.create(NAME)
    append(streams, 0, b"one", b"two")
    append(streams, 0, b"three", b"four", b"five")
    segment = streams.fetch_state(NAME).data_segment(0)
    reader = SegmentReader(streams.store, segment)
    blocks = list(iter(reader.next_block, None))
    four = blocks[1].offsets[1]
    cut = StreamCut(stream=NAME, offsets={SegmentId("shop/orders/0"): four})

    streams.truncate(NAME, cut)

    assert dict(streams.info(NAME).head.offsets) == dict(cut.offsets)
    assert streams.store.info(segment).start_offset == blocks[1].offset
    with pytest.raises(TruncatedError):
        SegmentReader(streams.store, segment, 0).next_block()
    rest = SegmentReader(streams.store, segment, four).next_block()
    assert rest is not None and rest.data == [b"four", b"five"]


@pytest.mark.parametrize("call", ["info", "seal"])
def test_the_timeout_of_a_call_also_bounds_the_first_use_of_a_stream(store: SegmentStore, call: str) -> None:
    StreamManager(store).create(NAME)
    failing, clock = FailingStore(store), InstantClock()
    streams = StreamManager(failing, clock=clock)
    failing.unavailable = True
    begun = clock.monotonic()
    with pytest.raises((DeadlineExceededError, StoreUnavailableError)):
        getattr(streams, call)(NAME, timeout=2)
    assert clock.monotonic() - begun <= 2
    failing.unavailable = False
    assert streams.info(NAME).name == NAME


def test_truncating_again_or_further_back_changes_nothing(streams: StreamManager) -> None:
    streams.create(NAME)
    head = streams.info(NAME).tail
    append(streams, 0, b"one")
    tail = streams.info(NAME).tail
    streams.truncate(NAME, tail)
    before = contents(streams.store)
    streams.truncate(NAME, tail)
    streams.truncate(NAME, head)
    assert contents(streams.store) == before
    assert streams.info(NAME).head == tail


def test_segments_before_the_cut_lose_their_data_and_keep_their_length_for_late_writers(store: SegmentStore) -> None:
    clock = ManualClock()
    streams = StreamManager(store, clock=clock)
    streams.create(NAME)
    append(streams, 0, b"one")
    old = streams.fetch_state(NAME).data_segment(0)
    length = store.info(old).length
    streams.scale(NAME, split=[0])

    streams.truncate(NAME, streams.info(NAME).tail)

    info = store.info(old)
    assert (info.start_offset, info.length, info.sealed) == (length, length, True)
    assert streams.fetch_state(NAME).successors(SegmentId("shop/orders/0")) == ("shop/orders/1", "shop/orders/2")

    clock.advance(WRITER_RETENTION_SECONDS + 1)
    streams.truncate(NAME, streams.info(NAME).tail)

    assert old not in store.list("data/")
    state = streams.fetch_state(NAME)
    assert sorted(state.segments) == [1, 2]
    assert all(each.predecessors == () for each in state.segments.values())


def test_the_metadata_does_not_grow_with_the_number_of_scales(store: SegmentStore) -> None:
    clock = ManualClock()
    streams = StreamManager(store, clock=clock)
    streams.create(NAME)
    for _ in range(20):
        streams.scale(NAME, split=list(streams.fetch_state(NAME).current))
        streams.scale(NAME, merge=list(streams.fetch_state(NAME).current))
        streams.truncate(NAME, streams.info(NAME).tail)
        clock.advance(WRITER_RETENTION_SECONDS + 1)
    assert len(streams.fetch_state(NAME).segments) <= 4
    assert len(list(store.list("data/"))) <= 4


def test_the_tail_lies_where_the_newest_segments_end(streams: StreamManager) -> None:
    streams.create(NAME, scaling=fixed(2))
    append(streams, 1, b"one")
    length = streams.store.info(streams.fetch_state(NAME).data_segment(1)).length
    assert dict(streams.info(NAME).tail.offsets) == {
        SegmentId("shop/orders/0"): 0,
        SegmentId("shop/orders/1"): length,
    }
