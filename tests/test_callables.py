"""Whatever takes a callable refuses one that it would call and never run: every entry, found by its signature."""
# ruff: noqa: F811

from __future__ import annotations

import importlib
import inspect
import re
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from functools import cache, partial, wraps
from typing import Any, Final, TypeVar, cast
from unittest.mock import AsyncMock, MagicMock, Mock, create_autospec

import pytest

import notifications
import readergroup.testing
import synchronizer.testing
from notifications import Change, Notification, NotificationSystem, PollingNotifier
from notifications.background import BackgroundPolling
from readergroup import (
    DeadLetter,
    InvalidArgumentError,
    Outbox,
    PydanticSerializer,
    ReaderScalingPolicy,
    RetryPolicy,
    Revision,
    State,
    Transactions,
    Update,
    connect,
)
from readergroup.client import Client
from readergroup.streams.config import staging_prefix
from readergroup.testing import (  # noqa: F401
    InstantClock,
    drain,
    failing_store,
    make_batch,
    make_event,
    manual_clock,
    reader_group_client,
)
from synchronizer import SystemClock
from synchronizer.callables import check_callable, check_returned, check_takes
from tests.places import PACKAGES
from tests.waiting import until

Call = Callable[..., Any]

# ---------------------------------------------------------------------- what takes a callable

#: Arguments that only this distribution gives, or that are not called.
INSIDE: Final = {
    "EventBatch.__init__(serializer)",
    "EventWriter.__init__(event_time_of)",
    "LeaderElection.on_news(listener)",
    "DeadLetters.__init__(open_statuses)",
    "OutboxRelay.__init__(connect)",
    "PollingNotifier.unregister_listener(listener)",
    "Reader.__init__(on_close)",
    "Reader.__init__(on_open)",
    "ReaderGroupManager.__init__(on_open)",
    "Subscription.__init__(listener)",
    "Subscription.__init__(on_failure)",
    "Transaction.__init__(before_commit)",
    "Transaction.__init__(event_time_of)",
    "Transaction.__init__(serializer)",
    "TransitionFeed.__init__(close)",
    "Worker.run(on_ready)",
    "checked_dumps(serializer)",
}


def _is_called(annotation: str, module: object) -> bool:
    """Whether what is annotated so is called; the annotation may be an alias, or a variable, of the module."""
    if "Callable" in annotation or "Serializer[" in annotation:
        return True
    named = [vars(module).get(name) for name in re.findall(r"[A-Za-z_]\w*", annotation)]
    meant = [each.__bound__ if isinstance(each, TypeVar) else each for each in named]
    return any("collections.abc.Callable" in str(each) and not inspect.isclass(each) for each in meant)


def _functions(name: str, member: Any) -> Iterator[tuple[str, Any]]:
    if inspect.isfunction(member):
        yield name, member
    elif inspect.isclass(member):
        for method, function in vars(member).items():
            function = inspect.unwrap(getattr(function, "__func__", function)) if callable(function) else None
            if inspect.isfunction(function) and (method == "__init__" or not method.startswith("_")):
                yield f"{name}.{method}", function


def _public(ground: Ground) -> Iterator[Any]:
    """What applications import, and what is to be had from a client."""
    for module in (synchronizer, notifications, readergroup, synchronizer.testing, readergroup.testing):
        yield from (getattr(module, name) for name in module.__all__)
    for owner in (ground.client, ground.group):
        yield from (type(getattr(owner, name)) for name in dir(owner) if not name.startswith("_"))
    yield from vars(pytest.importorskip("readergroup.spark")).values()


def _entries(ground: Ground) -> Iterator[str]:
    for member in _public(ground):
        if not hasattr(member, "__name__") or not getattr(member, "__module__", "").startswith(PACKAGES):
            continue
        module = importlib.import_module(member.__module__)
        for name, function in _functions(member.__name__, member):
            for parameter in inspect.signature(function).parameters.values():
                if _is_called(str(parameter.annotation), module):
                    yield f"{name}({parameter.name})"


# ---------------------------------------------------------------------- how each of them is used


class Total(State):
    value: int = 0


class Add(Update[Total], tag="add"):
    amount: int = 1

    def apply_to(self, state: Total, revision: Revision) -> Total:
        return state.replace(value=state.value + self.amount)


class Heard(Notification):
    pass


class Ground:
    """A client whose time stands still, with a stream of one event and a group that reads it."""

    def __init__(self, client: Client) -> None:
        self.client = client
        client.streams.create("test/stream")
        with client.writer("test/stream") as writer:
            writer.write(b"event")
        self.group = client.groups.create("group", streams=["test/stream"])
        self.total = client.synchronizer("total", initial=Total(), updates=[Add])

    def move(self, seconds: float = 1.0) -> None:
        cast(InstantClock, self.client.clock).advance(seconds)


def _serializer_of(name: str, call: Call) -> Any:
    class Serializer:
        def dumps(self, value: Any, /) -> bytes:
            return b"{}"

        def loads(self, data: bytes, /) -> Any:
            return {}

    serializer = Serializer()
    setattr(serializer, name, call)
    return serializer


def _reader(name: str) -> Use:
    def use(ground: Ground, call: Call) -> None:
        callbacks: dict[str, Any] = {name: call}
        with ground.group.reader("r", **callbacks) as reader:
            if name == "on_checkpoint":
                ground.group._updater.begin_checkpoint("c")
            reader.read(timeout=0)
            if name == "on_release":
                ground.client.streams.seal("test/stream")
                reader.read(timeout=0)

    return use


def _pool(name: str, **options: Any) -> Use:
    def use(ground: Ground, call: Call) -> None:
        handlers: dict[str, Any] = {name: call}
        pool: Any = ground.group.pool(**handlers, **options)
        try:
            drain(pool)
        finally:
            (cut,) = ground.group.stream_cuts().values()
            assert set(cut.offsets.values()) == {0}, "the event counts as processed"

    return use


def _with_dead_letters(use: Use) -> Use:
    def with_dead_letters(ground: Ground, call: Call) -> None:
        ground.client.streams.create("test/dead")
        try:
            use(ground, call)
        finally:
            assert ground.client.streams.info("test/dead").tail == ground.client.streams.info("test/dead").head

    return with_dead_letters


def _processor(name: str) -> Use:
    def use(ground: Ground, call: Call) -> None:
        handlers: dict[str, Any] = {name: call}
        with ground.client.event_queue("queue") as queue:
            queue.add(b"event")
            processor = ground.client.event_processor("queue", **handlers, set_aside=True)
            try:
                processor.step()
            finally:
                processor.close()
                assert queue._look().handled == 0, "the event counts as handled"
                assert not list(queue.dead_letters())

    return use


def _autoscale(ground: Ground, call: Call) -> None:
    with connect("memory://") as client:
        client.streams.create("test/stream")
        group = client.groups.create("group", streams=["test/stream"])
        autoscaling = group.autoscale(ReaderScalingPolicy(max_readers=2))(call)
        until(lambda: autoscaling._failures)


def _notifier(method: str) -> Use:
    def use(ground: Ground, call: Call) -> None:
        class Notifier(PollingNotifier[Total, Heard]):
            def detect(self, before: Total | None, after: Total, change: Change) -> Iterable[Heard]:
                return ()

        setattr(Notifier, method, staticmethod(call))
        with Notifier(ground.total) as notifier:
            notifier.register_listener(lambda notification: None)
            ground.total.update_state_unconditionally(Add())
            notifier.poll()
            notifier._known()  # asked for by its threads

    return use


def _election(name: str) -> Use:
    def use(ground: Ground, call: Call) -> None:
        election = ground.client.leader_election("leader", "me")
        getattr(election, name)(call)
        election.campaign()
        ground.move()
        election.resign()
        ground.move()

    return use


def _membership(name: str) -> Use:
    def use(ground: Ground, call: Call) -> None:
        membership, other = (ground.client.membership("members", each) for each in ("me", "other"))
        getattr(membership, name)(call)
        membership.join()
        other.join()
        ground.move()
        if name == "on_dead":
            ground.client._opened.pop(id(other))  # it is renewed no more
            ground.move(60)
        else:
            other.leave()
        ground.move()

    return use


def _shared(opened: Callable[[Client], Any], change: Callable[[Any], object]) -> Use:
    def use(ground: Ground, call: Call) -> None:
        shared = opened(ground.client)
        shared.register_listener(call)
        change(shared)
        ground.move()

    return use


def _on_update(ground: Ground, call: Call) -> None:
    ground.total.on_update(call)
    ground.total.update_state_unconditionally(Add())
    ground.move()


def _notified(**options: Any) -> Use:
    def use(ground: Ground, call: Call) -> None:
        ground.group.segment_notifier.register_listener(call, **options)
        ground.move()

    return use


def _system(ground: Ground, call: Call) -> None:
    system = NotificationSystem(threads=False)
    system.register_listener(call, source="group")
    system.publish(Heard(change=ground.group.segment_notifier._make_change(Revision(0, 0), "test", gap=False)))
    system.deliver()


def _polling(name: str) -> Use:
    def use(ground: Ground, call: Call) -> None:
        calls: dict[str, Any] = {"poll": lambda: None, "known": dict, name: call}
        store, clock = ground.client.store, SystemClock()
        BackgroundPolling(**calls, name="n", store=store, clock=clock, interval_seconds=1.0, scheduler=None)
        check_returned(call(), "nobody but notifiers makes one")

    return use


def _write_to_outbox(ground: Ground, call: Call) -> None:
    outbox = Outbox(ground.client, lambda: sqlite3.connect(":memory:"), serializer=_serializer_of("dumps", call))
    outbox.write(sqlite3.connect(":memory:"), "test/stream", {})


def _write(ground: Ground, call: Call) -> None:
    serializer = _serializer_of("dumps", call)
    with ground.client.writer("test/stream", serializer=serializer) as writer:
        writer.write({})


def _write_at_the_time_of(ground: Ground, call: Call) -> None:
    with ground.client.writer("test/stream", event_time=call) as writer:
        with pytest.raises(InvalidArgumentError), writer.transaction() as transaction:
            transaction.write(b"event")
        writer.write(b"event")


def _stage(ground: Ground, call: Call) -> None:
    Transactions(ground.client.streams).stage("test/stream", "key", serializer=_serializer_of("dumps", call)).write({})


def _delete_staged(ground: Ground, call: Call) -> None:
    streams = ground.client.streams
    staging = Transactions(streams).stage("test/stream", "key")
    staging.write(b"event")
    staging.finish()
    streams.delete_staged(staging_prefix("test/stream", streams.fetch_state("test/stream").incarnation), call)


def _loads(use: Callable[[Ground, Any], object]) -> Use:
    """Of a serializer that reads, what ``loads`` returns is the application's."""

    def checked_alone(ground: Ground, call: Call) -> None:
        use(ground, _serializer_of("loads", call))
        check_returned(call(), "whoever asks for the event gets it")

    return checked_alone


def _apply_to(ground: Ground, call: Call) -> None:
    class Later(Update[Total], tag="later"):
        apply_to = cast(Any, staticmethod(call))

    later = ground.client.synchronizer("later", initial=Total(), updates=[Later])
    later.update_state_unconditionally(Later())


def _listened(clock: InstantClock, call: Call) -> None:
    clock.run_when_due(call)
    clock.advance(1)


def _progress_on_spark(ground: Ground, call: Call) -> None:
    copying = pytest.importorskip("readergroup.spark.copying")
    check_returned(call(), "calls of Spark are tested with Spark")
    copying.copy(None, "sqlite:///never", "test/stream", "test/copy", on_progress=call)


def _finish_letters(what: str) -> Use:
    def use(ground: Ground, call: Call) -> None:
        (event,) = ground.client.batch.read(*ground.client.batch.segment_ranges("test/stream"))
        ground.client.streams.create("test/dead")
        with ground.client.writer("test/dead", serializer=PydanticSerializer(DeadLetter)) as writer:
            writer.write(DeadLetter(data=event.raw, pointer=event.pointer, error="no", attempts=1))
        getattr(ground.client.dead_letters("test/dead"), what)(on_progress=call)

    return use


def _progress_of_queries(ground: Ground, call: Call) -> None:
    listener = pytest.importorskip("readergroup.spark.listener").ProgressListener(call)
    listener._callback(None)


Use = Callable[[Ground, Call], object]

USES: Final[Mapping[str, Use]] = {
    "Autoscaling.__init__(callback)": _autoscale,
    "BackgroundPolling.__init__(known)": _polling("known"),
    "BackgroundPolling.__init__(poll)": _polling("poll"),
    "BatchClient.batches(serializer)": _loads(
        lambda ground, serializer: ground.client.batch.batches(
            *ground.client.batch.segment_ranges("test/stream"), serializer=serializer
        )
    ),
    "BatchClient.read(serializer)": _loads(
        lambda ground, serializer: ground.client.batch.read(
            *ground.client.batch.segment_ranges("test/stream"), serializer=serializer
        )
    ),
    "Client.event_processor(handler)": _processor("handler"),
    "Client.writer(event_time)": _write_at_the_time_of,
    "Client.writer(serializer)": _write,
    "DeadLetters.discard(on_progress)": _finish_letters("discard"),
    "DeadLetters.replay(on_progress)": _finish_letters("replay"),
    "Outbox.__init__(serializer)": _write_to_outbox,
    "EventProcessor.__init__(batch_handler)": _processor("batch_handler"),
    "InstantClock.run_when_due(run)": lambda ground, call: _listened(InstantClock(), call),
    "LeaderElection.on_elected(listener)": _election("on_elected"),
    "LeaderElection.on_lost(listener)": _election("on_lost"),
    "Membership.on_dead(listener)": _membership("on_dead"),
    "Membership.on_joined(listener)": _membership("on_joined"),
    "Membership.on_left(listener)": _membership("on_left"),
    "NotificationSystem.register_listener(listener)": _system,
    "PollingNotifier.before_poll": _notifier("before_poll"),
    "PollingNotifier.detect": _notifier("detect"),
    "PollingNotifier.listen(listener)": lambda ground, call: (
        ground.group.reader_notifier.listen(call),
        ground.group.reader("r"),
        ground.move(),
    ),
    "PollingNotifier.register_listener(listener)": _notified(),
    "PollingNotifier.register_listener(listener, durable)": _notified(durable="d"),
    "PollingNotifier.watched": _notifier("watched"),
    "ProgressListener.__init__(callback)": _progress_of_queries,
    "ReaderGroup.pool(handle)": _pool("handle"),
    "ReaderGroup.pool(handle), retried": _with_dead_letters(
        _pool("handle", retry=RetryPolicy(attempts=3, dead_letters="test/dead"))
    ),
    "ReaderGroup.pool(handle_arrow)": _pool("handle_arrow"),
    "ReaderGroup.pool(handle_batch)": _pool("handle_batch"),
    "ReaderGroup.pool(handle_batch), retried": _with_dead_letters(
        _pool("handle_batch", retry=RetryPolicy(attempts=3, dead_letters="test/dead"))
    ),
    "ReaderGroup.pool(serializer)": _loads(
        lambda ground, serializer: ground.group.pool(lambda event: None, serializer=serializer)
    ),
    "ReaderGroup.reader(on_assign)": _reader("on_assign"),
    "ReaderGroup.reader(on_checkpoint)": _reader("on_checkpoint"),
    "ReaderGroup.reader(on_release)": _reader("on_release"),
    "ReaderGroup.reader(serializer)": _loads(
        lambda ground, serializer: ground.group.reader("r", serializer=serializer).close()
    ),
    "SharedConfig.register_listener(listener)": _shared(
        lambda client: client.shared_config("c", RetryPolicy), lambda shared: shared.put("attempts", 7)
    ),
    "SharedCounter.register_listener(listener)": _shared(
        lambda client: client.counter("c"), lambda shared: shared.add(1)
    ),
    "SharedMap.register_listener(listener)": _shared(
        lambda client: client.shared_map("m", int), lambda shared: shared.put("a", 1)
    ),
    "SharedSet.register_listener(listener)": _shared(
        lambda client: client.shared_set("s", int), lambda shared: shared.add(1)
    ),
    "StateSynchronizer.delete(attributes)": lambda ground, call: ground.total.delete(attributes=call),
    "StateSynchronizer.on_update(listener)": _on_update,
    "StateSynchronizer.update_state(generator)": lambda ground, call: ground.total.update_state(call),
    "StateSynchronizer.update_state_returning(generator)": lambda ground, call: ground.total.update_state_returning(
        call
    ),
    "StateSynchronizer.update_state_with_attributes(generator)": (
        lambda ground, call: ground.total.update_state_with_attributes(call)
    ),
    "StateSynchronizer.wait_for(predicate)": lambda ground, call: ground.total.wait_for(call, timeout=0),
    "StreamManager.copy(on_progress)": lambda ground, call: ground.client.streams.copy(
        "test/stream", "test/copy", by="events", on_progress=call
    ),
    "StreamManager.delete_staged(is_given_up)": _delete_staged,
    "Transactions.stage(serializer)": _stage,
    "Update.apply_to": _apply_to,
    "copy(on_progress)": _progress_on_spark,
    "make_batch(serializer)": lambda ground, call: make_batch([{}], serializer=_serializer_of("dumps", call)),
    "make_event(serializer)": lambda ground, call: make_event({}, serializer=_serializer_of("dumps", call)),
}

#: The same entries, by the names of what makes these objects.
THE_SAME: Final = {
    "Batches.__init__(serializer)": "BatchClient.batches(serializer)",
    "EventProcessor.__init__(handler)": "Client.event_processor(handler)",
    "EventWriter.__init__(serializer)": "Client.writer(serializer)",
    "Reader.__init__(on_assign)": "ReaderGroup.reader(on_assign)",
    "Reader.__init__(on_checkpoint)": "ReaderGroup.reader(on_checkpoint)",
    "Reader.__init__(on_release)": "ReaderGroup.reader(on_release)",
    "Reader.__init__(serializer)": "ReaderGroup.reader(serializer)",
    "ReaderGroup.open_reader(on_assign)": "ReaderGroup.reader(on_assign)",
    "ReaderGroup.open_reader(on_checkpoint)": "ReaderGroup.reader(on_checkpoint)",
    "ReaderGroup.open_reader(on_release)": "ReaderGroup.reader(on_release)",
    "ReaderGroup.open_reader(serializer)": "ReaderGroup.reader(serializer)",
    "ReaderPool.__init__(handle)": "ReaderGroup.pool(handle)",
    "ReaderPool.__init__(handle_arrow)": "ReaderGroup.pool(handle_arrow)",
    "ReaderPool.__init__(handle_batch)": "ReaderGroup.pool(handle_batch)",
    "ReaderPool.__init__(serializer)": "ReaderGroup.pool(serializer)",
    "Staging.__init__(serializer)": "Transactions.stage(serializer)",
}

#: The entries that await what an ``async def`` returns.
AWAITED: Final = {entry for entry in USES if entry.startswith("ReaderGroup.pool(handle")}

# ---------------------------------------------------------------------- callables of which nothing would run


async def plainly(*arguments: Any) -> None:
    pass


async def yielding(*arguments: Any) -> AsyncIterator[int]:
    yield 1


class Asynchronous:
    async def __call__(self, *arguments: Any) -> None:
        pass

    async def method(self, *arguments: Any) -> None:
        pass


ASYNC: Final[Mapping[str, Call]] = {
    "function": plainly,
    "generator": yielding,
    "partial": partial(plainly, 1),
    "object": Asynchronous(),
    "partial of an object": partial(partial(Asynchronous(), 1), 2),
    "bound method": Asynchronous().method,
}


def decorated(call: Call) -> Call:
    @wraps(call)
    def decorate(*arguments: Any) -> Any:
        return call(*arguments)

    return decorate


RETURNING: Final[Mapping[str, Call]] = {
    "lambda": lambda *arguments: plainly(),
    "decorated": lambda *arguments: decorated(plainly)(*arguments),
    "async generator": lambda *arguments: yielding(),
}


@pytest.fixture
def ground(reader_group_client: Client) -> Ground:
    return Ground(reader_group_client)


def test_every_entry_that_takes_a_callable_is_among_these(ground: Ground) -> None:
    entries = set(_entries(ground))
    unknown = entries - set(USES) - set(THE_SAME) - INSIDE
    assert not sorted(unknown), "new entries: check_callable, check_returned, and a use here"


@pytest.mark.filterwarnings("error:coroutine .* was never awaited:RuntimeWarning")
@pytest.mark.parametrize(
    ("entry", "kind"),
    [(entry, kind) for entry in USES for kind in ASYNC if entry not in AWAITED or kind == "generator"],
)
def test_an_async_callable_is_refused(ground: Ground, entry: str, kind: str) -> None:
    with pytest.raises(InvalidArgumentError, match="async|await|yield|generator"):
        USES[entry](ground, ASYNC[kind])


@pytest.mark.filterwarnings("error:coroutine .* was never awaited:RuntimeWarning")
@pytest.mark.parametrize("kind", RETURNING)
@pytest.mark.parametrize("entry", USES)
def test_a_callable_that_returns_an_awaitable_has_failed(
    ground: Ground, entry: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    try:
        USES[entry](ground, RETURNING[kind])
    except InvalidArgumentError as error:
        assert re.search("await|generator", str(error))
    else:
        errors = [record.exc_info[1] for record in caplog.records if record.exc_info is not None]
        assert any(isinstance(error, InvalidArgumentError) for error in errors), "neither raised nor logged"


def test_a_plain_function_may_run_an_async_one() -> None:
    @wraps(plainly)
    def run(*arguments: Any) -> int:
        return 1

    check_callable(run, "a handler")
    check_callable(partial(run, 1), "a handler")
    check_callable([].append, "a handler")
    check_callable(print, "a handler")
    check_callable(Asynchronous, "a factory")
    check_returned(run(), "a handler")


class Handling:
    def event(self, event: object, *, db: object = None) -> None: ...

    def event_and_connection(self, event: object, connection: object) -> None: ...

    __call__ = event


class Unreadable(Handling):
    @property
    def __signature__(self) -> object:
        raise NameError("an annotation names what is imported for type checkers only")


@wraps(Handling.event_and_connection)
def injected(event: object) -> None:
    """A decorator gave it the second argument."""


@pytest.mark.parametrize(
    "taking",
    [
        lambda event: None, lambda event, connection=None: None, lambda *args: None, print, [].append, {}.update, max,
        Handling().event, Handling(), partial(Handling().event_and_connection, 1), Mock(), MagicMock(), AsyncMock(),
        create_autospec(Handling().event), injected, cache(lambda event: None), Exception, dict,
        Unreadable(),
    ],
)  # fmt: skip
def test_what_can_take_an_event_is_accepted(taking: Call) -> None:
    check_takes(taking, "handle", "event")


@pytest.mark.parametrize(
    "taking",
    [
        lambda: None, lambda event, connection: None, lambda event, *, connection: None, lambda **event: None, Handling,
        Handling().event_and_connection, Handling.event_and_connection, partial(Handling().event, 1),
        create_autospec(Handling().event_and_connection),
    ],
)  # fmt: skip
def test_what_cannot_take_an_event_is_refused(taking: Call) -> None:
    with pytest.raises(InvalidArgumentError, match=r"^handle is called as handle\(event\): .* found=.* group="):
        check_takes(taking, "handle", "event", group="billing")


#: The entries whose callables get arguments that users know by their names.
CALLED_WITH: Final = [
    entry
    for entry in USES
    if re.search(
        r"\.\w+\((listener|predicate|callback|handler?|handle_.*|batch_handler|on_.*|event_time|is_given_up)\)$", entry
    )
]


@pytest.mark.parametrize("entry", CALLED_WITH)
def test_a_callable_that_does_not_take_its_arguments_is_refused_at_once(entry: str, ground: Ground) -> None:
    with pytest.raises(InvalidArgumentError, match=r"is called as \w+\(.*; change its parameters"):
        USES[entry](ground, lambda these, cannot, be, given: None)


def test_a_function_that_yields_handles_nothing(ground: Ground) -> None:
    def handle(event: object) -> Iterator[None]:
        yield

    with pytest.raises(InvalidArgumentError, match="generator function"):
        _pool("handle")(ground, handle)
    with pytest.raises(InvalidArgumentError, match="generator"):
        _pool("handle")(ground, lambda event: handle(event))


@pytest.mark.parametrize("entry", USES)
def test_what_cannot_be_called_is_refused(ground: Ground, entry: str) -> None:
    with pytest.raises((InvalidArgumentError, TypeError)):
        USES[entry](ground, cast(Any, "no function"))
