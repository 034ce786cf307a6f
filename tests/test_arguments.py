"""Every public callable refuses what it cannot use, at once and with an error of ours that names the parameter:
a duration or count that cannot be one, and a value of a wrong type.

The callables are found by the annotations of their parameters: one that is new is tried as well, and fails here until
it checks what it is given.
"""

from __future__ import annotations

import ast
import collections.abc
import inspect
import math
import re
import sqlite3
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, MutableSet
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from fractions import Fraction
from functools import cache, partial
from types import ModuleType, UnionType
from typing import (
    Annotated,
    Any,
    ForwardRef,
    Literal,
    NamedTuple,
    NewType,
    TypeVar,
    Union,
    Unpack,
    get_args,
    get_origin,
    get_type_hints,
)

import numpy
import pyarrow
import pytest
from pydantic import BaseModel, BeforeValidator, ValidationError

import notifications
import readergroup as rg
import synchronizer
from readergroup.group.manager import ReaderGroupManager
from readergroup.sinks import SqlSink
from readergroup.streams.config import staging_prefix
from readergroup.streams.manager import StreamManager
from readergroup.testing import make_batch
from synchronizer import ANY, InvalidArgumentError
from synchronizer.arguments import check_class, check_count, check_duration, check_items, check_type
from synchronizer.configuration import Configuration
from synchronizer.recipes.queue import event_processor
from tests.waiting import CallInThread

STREAM = "shop/orders"
#: For a count and for a duration; those that only some refuse are left out.
BAD = (math.nan, "5", True, -1, -0.5, [], object())
#: How long to look whether a call with a long duration raises. One that waits is then left waiting.
_LOOK_SECONDS = 0.3
NUMBER = re.compile(r"\b(float|int)\b")
COLLECTION = re.compile(r"(Callable|Mapping|Sequence|Iterable|dict|frozenset|list|tuple|type)\[.*\]")
#: Data and its places, which the product makes; and what is a plain calculation.
NOT_ARGUMENTS = {
    "amount", "at_most", "attempt", "count", "counter", "end", "epoch", "expected", "expected_offset", "failures",
    "fencing_token", "first", "generation", "handled", "indent", "index", "length", "most", "new", "offset", "place",
    "previous", "start", "start_offset", "value", "_parent_namespace_depth",
}  # fmt: skip
#: For a parameter of another type. Some are falsy, so that no default takes their place.
WRONG = (5, 0, object(), b"\xff", "a b\n", "", [5], [], {5: 5}, None, BaseModel)
#: What holds several values: no text, bytes or mapping, of which Python takes the letters, numbers or keys.
SEVERAL = (collections.abc.Collection, collections.abc.Iterable, collections.abc.Sequence)
#: Results, and what only a test moves.
NOT_CALLED_BY_APPLICATIONS = (
    synchronizer.DeadEvent, synchronizer.HandlingLatency, synchronizer.Guarantees, synchronizer.ManualClock,
    synchronizer.SystemClock, synchronizer.SegmentStore,
    rg.StagedPart, rg.LagSample, rg.Notification, rg.StoredDeadLetter,
)  # fmt: skip
#: Applications get them from others.
NOT_MADE = (rg.Reader, rg.NotificationRecord, rg.Transaction)
#: What is not tried with wrong types, and why not.
NOT_TYPED: Mapping[str, frozenset[str]] = {
    "our own code makes it, and hands it to applications": frozenset({
        "Autoscaling", "BatchClient", "Deadline", "Event", "EventBatch", "EventWriter", "HeldLock",
        "DeadLetters", "NotificationRecording", "OutboxRelay", "ReaderGroup", "ReaderPool", "Staging", "Subscription",
        "TransitionFeed",
    }),
    "our own code calls it": frozenset({
        "BatchClient.ranges_between", "Deadline.remaining", "EventBatch.offset_after",
        "EventBatch.only", "EventBatch.slices_after", "EventBatch.without", "LeaderElection.on_news",
        "PollingNotifier.detect", "PollingNotifier.look",
        "ReaderGroup.open_reader", "ReaderGroupManager.note_skipped", "ReaderGroupManager.subscribers",
        "Staging.encode", "Staging.segments_of", "Staging.write_encoded",
        "StreamManager.delete_staged", "StreamManager.finish_pending", "StreamManager.note_deleted_group",
        "StreamManager.resolve",
        "StreamManager.segment_lengths", "StreamManager.tail_cut", "Subscription.put", "Subscription.receive",
        "TransitionFeed.put",
    }),
    "what is stored is read, and raises what its format raises": frozenset({
        "BytesSerializer.loads", "JsonSerializer.loads", "MsgpackSerializer.loads", "PydanticSerializer.loads",
    }),
}  # fmt: skip


class Counter(synchronizer.State):
    value: int = 0


class Settings(BaseModel):
    size: int = 0


#: Arguments with a default that a call cannot do without.
ALSO: Mapping[str, Mapping[str, object]] = {
    "ReaderGroup.pool": {"handle": print},
    "StreamManager.scale": {"split": [0]},
    "connect": {"url": "memory://"},
    "SharedConfig.replace": {"expected": 0},
    "EventProcessor": {"handler": print},
    "Client.event_processor": {"handler": print},
    "StateSynchronizer": {"initial": Counter()},
    "StreamManager.copy": {"source": STREAM},
    "StreamManager.configure": {"retention": "none"},
    "DelayedRetry": {"dead_letters": "shop/dead"},
    "RetentionPolicy": {"consumed_by": "subscribers"},
    "ScalingPolicy.by_event_rate": {"target": 100.0},
    "ScalingPolicy.by_data_rate": {"target": 100.0},
    "ReaderGroup.update_retention_cuts": {"cuts": {}},
    "ReaderGroupManager.create": {"streams": (STREAM,)},
}


class Case(NamedTuple):
    call: Callable[..., object]
    parameter: str
    others: Mapping[str, object]

    def with_(self, bad: object) -> object:
        named = {**self.others, self.parameter: bad}
        unnamed = [
            named.pop(name)
            for name, parameter in inspect.signature(self.call).parameters.items()
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL) and name in named
        ]
        found = self.call(*unnamed, **named)
        if inspect.isgenerator(found):
            return next(found, None)
        if isinstance(found, AbstractContextManager) and not hasattr(found, "close"):
            return found.__enter__()
        return found

    def refuses(self, bad: object) -> str:
        """What it does instead; nothing if it does."""
        try:
            answer = self.with_(bad)
        except InvalidArgumentError as error:
            what = self.parameter.removeprefix("min_").removeprefix("max_").split("_")[0].removesuffix("s")
            says = what in str(error)
            return "" if says else f"{self.parameter}={bad!r} is not what is refused: {error}"
        except Exception as error:
            return f"{self.parameter}={bad!r} raises {error!r}"
        return f"{self.parameter}={bad!r} returns {answer!r}"

    def takes_or_refuses(self, seconds: float) -> str:
        """What it raises instead of an error of ours; nothing if it does not."""
        try:
            found = self.with_(seconds)
            if hasattr(found, "close"):
                found.close()
        except rg.ReaderGroupError:
            pass
        except Exception as error:
            return f"{self.parameter}={seconds!r} raises {error!r}"
        return ""


class NothingInFlight:
    def is_settled(self, segment: str) -> bool:
        return True

    def busy_since(self) -> float | None:
        return None


class World:
    """One of each object, on a memory store."""

    def __init__(self) -> None:
        self.client = client = rg.connect("memory://")
        client.streams.create(STREAM)
        self.store = client.store
        self.counter = client.synchronizer("counter", initial=Counter(), updates=[])
        self.group = client.groups.create("billing", streams=[STREAM])
        self.writer = client.writer(STREAM)
        with self.writer:
            self.writer.write(b"event")
        (self.range,) = client.batch.segment_ranges(STREAM)
        self.pool = self.group.pool(lambda event: None)
        self.writer_in_transaction = client.writer(STREAM)
        self.system = system = notifications.NotificationSystem()
        self.objects: Mapping[type, object] = {
            type(each): each
            for each in (
                client,
                client.streams,
                client.groups,
                client.batch,
                client.dead_letters(STREAM),
                client.writer(STREAM),
                client.barrier("barrier", 2),
                client.counter("counter"),
                client.event_queue("queue"),
                client.event_processor("processed", lambda event: None),
                client.leader_election("election", "me"),
                client.membership("members", "me"),
                client.shared_config("config", Settings),
                client.shared_map("map", int),
                client.shared_set("set", int),
                synchronizer.Lock(client.store, "lock"),
                synchronizer.Semaphore(client.store, "semaphore", 2),
                self.counter,
                self.group,
                system.register_listener(print, source="source"),
                self.group.reader("reader"),
                self.pool,
                self.group.segment_notifier,
                self.group.record_notifications(),
                rg.Transactions(client.streams),
                system,
                self.group.notification_record,
                rg.Transactions(client.streams).stage(STREAM, "job"),
                self.writer_in_transaction.transaction(),
                rg.BytesSerializer(),
                rg.PydanticSerializer(Settings),
                next(client.batch.batches(self.range)),
                rg.Outbox(client, lambda: sqlite3.connect(":memory:")),
            )
        }
        self.arguments: dict[str, object] = {
            "names": [STREAM],
            "attribute": "role", "candidate_id": "me", "clock": client.clock, "cut": client.streams.info(STREAM).head,
            "end": client.streams.info(STREAM).tail, "entry": "entry", "event": b"event", "events": [b"event"],
            "generator": lambda state: [], "group": self.group, "handle": lambda event: None,
            "handler": lambda event: None, "handle_batch": None, "initial": Counter(), "item": 1, "items": [1],
            "item_type": int, "key": "key", "listener": lambda each: None, "manager": client.streams,
            "member_id": "me", "model": Settings, "name": "new", "new": 1, "number": 1, "parties": 2, "parts": [],
            "permits": 2, "predicate": lambda state: False, "routing_key": None, "segment": "state/counter",
            "segment_range": self.range, "serializer": rg.BytesSerializer(), "state": Counter(), "store": client.store,
            "stream": STREAM, "synchronizer": self.counter, "to": "head", "updates": [], "value": 1,
            "value_type": int, "poll": lambda: None, "known": dict, "interval_seconds": 1.0, "scheduler": None,
            "workers": "thread", "retry": None, "client": client, "readers": 1, "reader_id": "other", "amount": 1,
            "expected": ANY, "offset": 0, "after": synchronizer.Revision(0, 0), "source": "source", "max_readers": 4,
            "streams": (STREAM,), "segments": 1, "first": client.streams.info(STREAM).head, "time": datetime.now(UTC),
            "key_type": str, "max_bytes": 10, "about_bytes": 10, "timeout_seconds": 1.0,
            "update": None, "field": "size", "starts": [client.streams.info(STREAM).head], "ends": None,
            "url": "memory://", "queue_size": 10, "reader": "reader", "config": None, "cuts": {}, "source_name": "x",
            "target": "shop/copy", "cause": None, "log": "record", "lag_interval_seconds": 5.0,
            "retention_seconds": 5.0, "retention_bytes": 5, "threads": True, "limit_bytes": 10, "fields": {},
            "scaling": rg.ScalingPolicy.fixed(1), "prefix": staging_prefix(STREAM, "0"), "place": "tail",
            "is_given_up": lambda name: False, "numbers": [0], "offsets": {f"{STREAM}/0": 0},
            "updater": self.group._updater, "in_flight": NothingInFlight(),
            "table": pyarrow.table({"event": [b"event"]}), "data": "event", "handle_arrow": None,
            "connection": sqlite3.connect(":memory:"), "engine_or_connect": lambda: sqlite3.connect(":memory:"),
            "dialect": "sqlite", "thread": False, "on_failure": print, "start": client.streams.info(STREAM).head,
            "delays": [10], "retry_stream": "shop/retry",
        }  # fmt: skip

    def close(self) -> None:
        self.system.close()
        self.client.close()


def exported(module: ModuleType) -> dict[str, object]:
    return {name: getattr(module, name) for name in sorted(module.__all__)}


def public_classes(*modules: ModuleType) -> Iterator[type]:
    seen = set()
    for module in modules:
        for each in exported(module).values():
            if inspect.isclass(each) and each not in seen:
                seen.add(each)
                yield each


def parameters_of(call: Callable[..., object]) -> Iterator[tuple[str, inspect.Parameter]]:
    """Those with a name, also those that a `TypedDict` has."""
    try:
        parameters = inspect.signature(call).parameters
    except (TypeError, ValueError):
        return
    for name, parameter in parameters.items():
        if parameter.kind is not parameter.VAR_KEYWORD:
            yield name, parameter
        elif get_origin(options := hint_of(call, parameter)) is Unpack:
            for option, hint in get_type_hints(get_args(options)[0]).items():
                # None: as if it was not given.
                yield option, inspect.Parameter(option, parameter.KEYWORD_ONLY, default=None, annotation=hint | None)


def numbers_of(call: Callable[..., object]) -> list[str]:
    """The parameters that are durations or counts."""
    return [
        name
        for name, parameter in parameters_of(call)
        if name not in NOT_ARGUMENTS and NUMBER.search(COLLECTION.sub("", str(parameter.annotation)))
    ]


def typed_of(call: Callable[..., object]) -> list[str]:
    """The parameters that cannot be everything."""
    return [
        name
        for name, parameter in parameters_of(call)
        if not all(fits(each, hint_of(call, parameter)) for each in WRONG)
    ]


def hint_of(call: Any, parameter: inspect.Parameter) -> Any:
    """The annotation, as it is meant where it stands."""
    if not isinstance(parameter.annotation, str):
        return parameter.annotation
    function = inspect.unwrap(call.__init__ if inspect.isclass(call) else call)
    return eval(parameter.annotation, names_in(function.__module__))


@cache
def names_in(module: str) -> dict[str, Any]:
    """The names of the module, with those that it imports for type checkers only."""
    found = vars(sys.modules[module]).copy()
    for node in ast.parse(inspect.getsource(sys.modules[module])).body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            exec("\n".join(map(ast.unparse, node.body)), found)
    return found


def bound_of(variable: TypeVar) -> Any:
    bound = variable.__bound__
    return eval(bound.__forward_arg__, names_in(variable.__module__)) if isinstance(bound, ForwardRef) else bound


def fits(value: object, hint: Any) -> bool:
    """Whether the annotation allows the value. What is asked for a bool takes everything, as Python does."""
    arguments = get_args(hint)
    kind = get_origin(hint) or hint
    if kind in (inspect.Parameter.empty, Any, object, bool):
        return True
    if isinstance(kind, TypeVar):
        return kind.__bound__ is None or fits(value, bound_of(kind))
    if isinstance(kind, NewType):
        return fits(value, kind.__supertype__)
    if kind is Union or (kind is UnionType and arguments):
        return any(fits(value, each) for each in arguments)
    if kind is Annotated:
        if value is None and any(isinstance(each, BeforeValidator) for each in arguments):
            return True  # that one makes something of it
        return fits(value, arguments[0])
    if kind is Literal:
        return any(value is each for each in arguments)
    if kind is type:
        bound = bound_of(arguments[0]) if arguments and isinstance(arguments[0], TypeVar) else get_origin(arguments[0])
        return isinstance(value, type) and issubclass(value, bound or object)
    if kind is collections.abc.Callable:
        return callable(value)
    if kind is None or getattr(kind, "_is_protocol", False):
        return value is kind
    if kind is float:
        return isinstance(value, int | float)
    if not isinstance(value, kind) or (kind in SEVERAL and isinstance(value, str | bytes | Mapping)):
        return False
    if arguments and isinstance(value, Mapping) and issubclass(kind, Mapping):
        return all(fits(key, arguments[0]) and fits(each, arguments[1]) for key, each in value.items())
    if arguments and isinstance(value, Iterable):
        return all(fits(each, arguments[0]) for each in value)
    return True


def public_callables(
    wanted_of: Callable[[Callable[..., object]], list[str]], *more: type
) -> Iterator[tuple[str, type | None, str]]:
    """Those that have such parameters: their names, with the class they are of."""
    for kind in (*public_classes(synchronizer, notifications, rg), *more):
        if getattr(kind, "_is_protocol", False) or {BaseException, *NOT_CALLED_BY_APPLICATIONS} & {*kind.__mro__}:
            continue
        if hasattr(kind, "__total__"):  # a TypedDict, which its callables are tried with
            continue
        is_data = issubclass(kind, BaseModel) or issubclass(kind, tuple) or hasattr(kind, "__dataclass_fields__")
        is_made = (not is_data or issubclass(kind, Configuration)) and kind not in (*NOT_MADE, *more)
        if is_made and not inspect.isabstract(kind) and wanted_of(kind):
            yield kind.__name__, kind, ""
        for name, member in inspect.getmembers(kind, callable):
            # Of data, what makes it of something else; not what is asked of it.
            is_ours = not is_data or (inspect.ismethod(member) and not hasattr(BaseModel, name))
            if is_ours and not name.startswith("_") and wanted_of(member):
                yield f"{kind.__name__}.{name}", kind, name
    for module in (synchronizer, notifications, rg):
        for name, call in exported(module).items():
            if inspect.isfunction(call) and wanted_of(call):
                yield name, None, name


def is_typed(name: str, kind: type | None, method: str) -> bool:
    """Whether it is tried with wrong types. What makes a class a mapping or a set raises what those of Python raise."""
    is_standard = (
        kind is not None
        and issubclass(kind, Mapping | AbstractSet)
        and (hasattr(MutableMapping, method) or hasattr(MutableSet, method) or kind is synchronizer.Map)
    )
    return not is_standard and all(name not in names for names in NOT_TYPED.values())


MANAGERS = (StreamManager, ReaderGroupManager)
CALLABLES = {name: (kind, method) for name, kind, method in public_callables(numbers_of, *MANAGERS)}
CALLABLES["SqlSink"] = (SqlSink, "")
TYPED = {each[0]: each[1:] for each in public_callables(typed_of, *MANAGERS) if is_typed(*each)}


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """One for all: nothing that is refused changes it."""
    world = World()
    yield world
    world.close()


def cases(
    world: World, full_name: str, wanted_of: Callable[[Callable[..., object]], list[str]]
) -> Iterator[tuple[Case, inspect.Parameter]]:
    kind, method = {**TYPED, **CALLABLES}[full_name]
    arguments = dict(world.arguments)
    if kind is rg.BatchClient or kind is StreamManager:
        arguments |= {"name": STREAM, "state": world.client.streams.fetch_state(STREAM)}
    if kind is None:
        call = getattr(rg, method, None) or getattr(synchronizer, method)
    elif inspect.ismethod(getattr(kind, method, None)):
        call = getattr(kind, method)
    elif method:
        found = next((each for each in world.objects.values() if isinstance(each, kind)), None)
        assert found is not None, f"give the World of this test a {kind.__name__}"
        call = getattr(found, method)
    else:
        call = kind
    parameters = dict(parameters_of(call))
    needed = [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty and parameter.kind is not parameter.VAR_POSITIONAL
    ]
    for name in wanted_of(call):
        unknown = [each for each in needed if each != name and each not in arguments]
        assert not unknown, f"give the World of this test an argument {', '.join(unknown)}"
        others = {each: arguments[each] for each in needed if each != name}
        others |= {k: v for k, v in ALSO.get(full_name, {}).items() if k != name}
        yield Case(call, name, others), parameters[name]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", CALLABLES)
def test_a_duration_or_count_that_cannot_be_one_is_refused(world: World, name: str) -> None:
    tried = [case.refuses(bad) for case, _ in cases(world, name, numbers_of) for bad in BAD]
    assert tried
    assert not list(filter(None, tried))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", CALLABLES)
def test_a_duration_that_is_too_long_for_the_system_is_taken_or_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_processor, "_WAIT_SECONDS", 0.01)  # so long its close takes
    world = World()
    calls = []
    try:
        for case, _ in cases(world, name, numbers_of):
            for seconds in (math.inf, 1e12, 10**400):
                calls.append(CallInThread(partial(case.takes_or_refuses, seconds)))
                # It waits for what does not come, until the world is closed.
                calls[-1].join(_LOOK_SECONDS)
    finally:
        world.close()
    assert not list(filter(None, [call.ended() for call in calls]))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", TYPED)
def test_a_value_of_a_wrong_type_is_refused(world: World, name: str) -> None:
    tried = [
        case.refuses(bad)
        for case, parameter in cases(world, name, typed_of)
        for bad in WRONG
        if not fits(bad, hint_of(case.call, parameter))
    ]
    assert tried
    assert not list(filter(None, tried))


def test_there_are_as_many_of_them_as_one_knows() -> None:
    """So that the search does not come to find nothing."""
    assert len(CALLABLES) > 90
    assert {"Reader.read", "Client", "EventWriter.flush", "RetryPolicy", "connect", "Barrier"} <= set(CALLABLES)
    assert len(TYPED) > 150
    assert {"Client.lock", "Revision.parse", "connect", "EventWriter.write", "StreamManager.truncate"} <= set(TYPED)


def test_what_is_left_out_exists() -> None:
    found = {name for name, *_ in public_callables(typed_of, *MANAGERS)}
    assert set().union(*NOT_TYPED.values()) <= found


@pytest.mark.parametrize("bad", [*BAD, None, math.inf, 1.5])
def test_a_count_is_a_whole_number(bad: object) -> None:
    with pytest.raises(InvalidArgumentError, match="readers must be an integer >= 1"):
        check_count(bad, "readers")
    with pytest.raises(InvalidArgumentError, match=f"readers must be an integer from 1 to {2**63 - 1}"):
        check_count(2**63, "readers")
    check_count(1, "readers")
    check_count(None, "readers", or_none=True)


@pytest.mark.parametrize("bad", [*BAD, None])
def test_a_duration_is_a_number_from_0_on(bad: object) -> None:
    with pytest.raises(InvalidArgumentError, match="timeout must be a number of seconds"):
        check_duration(bad, "timeout")
    for good in (0, 0.0, 1, 2.5, math.inf):
        check_duration(good, "timeout")
    check_duration(None, "timeout", or_none=True)
    for bad in (0, math.inf, None):
        with pytest.raises(InvalidArgumentError, match="finite number of seconds > 0"):
            check_duration(bad, "timeout", above_zero=True, finite=True)
    for bad in (10**400, Fraction(10**400), 10**5000):
        with pytest.raises(InvalidArgumentError, match=r"must be a number of seconds >= 0 and <= 1\.8e\+308: timeout="):
            check_duration(bad, "timeout")


def test_the_error_for_a_wrong_type_tells_types_and_no_values() -> None:
    with pytest.raises(InvalidArgumentError, match=r"^url must be a str: found='bytes'$"):
        rg.connect(b"postgresql://user:secret@host/db")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match=r"^event must be an Event or None: found='the class Event'$"):
        check_type(rg.Event, rg.Event, "event", or_none=True)
    check_type(None, str, "url", or_none=True)


@pytest.mark.parametrize("one", ["text", b"bytes", bytearray(b"bytes"), memoryview(b"bytes"), {b"event": 1}])
def test_one_value_is_not_taken_for_several(world: World, one: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="events must be a list .* put a single value into a list"):
        world.client.event_queue("queue").add_many(one)
    with pytest.raises(InvalidArgumentError, match="data must be a list .* put a single value into a list"):
        make_batch(one)
    for several in (["a"], ("a",), {"a"}, (each for each in "a"), {"a": 1}.keys(), range(1)):
        check_items(several, Iterable, "names")
    check_items(None, Iterable, "names", or_none=True)


def test_an_array_is_no_place(world: World) -> None:
    client, place = world.client, numpy.array([1, 2])
    client.streams.create("shop/places")
    group = client.groups.create("places", streams=["shop/places"])
    calls: list[Callable[..., object]] = [
        *(partial(group.reset, to) for to in (place, {"shop/places": place})),
        *(partial(client.batch.segment_ranges, "shop/places", **{name: place}) for name in ("start", "end")),
        *(partial(client.streams.copy, "shop/places", "shop/copy", **{name: place}) for name in ("start", "end", "by")),
        partial(client.groups.create, "other", streams=["shop/places"], start={"shop/places": place}),
    ]
    for call in calls:
        with pytest.raises(InvalidArgumentError, match=r"must be .*'(tail|events)'"):
            call()


def test_a_class_is_not_taken_for_its_instance_nor_an_instance_for_its_class() -> None:
    for clock in (synchronizer.SystemClock, synchronizer.ManualClock):
        with pytest.raises(InvalidArgumentError, match="clock must be a Clock, not the class"):
            rg.connect("memory://", clock=clock)  # type: ignore[arg-type]
    for bad in (Settings(), "Settings", int, None):
        with pytest.raises(InvalidArgumentError, match="model must be a class derived from BaseModel"):
            check_class(bad, BaseModel, "model")
    check_class(Settings, BaseModel, "model")


def test_a_configuration_that_is_wrong_is_one_of_our_errors_and_what_is_stored_is_read_as_ever() -> None:
    with pytest.raises(
        InvalidArgumentError, match=r"RetryPolicy .*attempts: .* not 'five'.*second: there is no field"
    ) as caught:
        rg.RetryPolicy(attempts="five", second=1)  # type: ignore[arg-type, call-arg]
    assert isinstance(caught.value.__cause__, ValidationError)
    with pytest.raises(ValidationError):
        rg.RetryPolicy.model_validate({"attempts": "five"})
    with pytest.raises(ValidationError):
        rg.ReaderGroupConfig.model_validate({"streams": [STREAM], "reader_timeout_seconds": math.nan})
