"""`instrument`: traces and metrics by the messaging conventions of OpenTelemetry.

A span is created where the application writes an event, and its context goes into the headers of the event. A worker
of a pool calls the handler in a span that is a child of it; a batch has links instead. Nothing of this runs until
`instrument` replaces the methods that write, and sets the hook of the workers.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import wraps
from itertools import islice
from types import TracebackType
from typing import Any, Final, TypeVar
from weakref import WeakKeyDictionary

from synchronizer import UnsupportedError
from synchronizer.arguments import check_type
from synchronizer.callables import is_async
from synchronizer.clock import SystemClock, stopwatch
from synchronizer.extras import install_hint
from synchronizer.recipes.queue.retries import text_of
from synchronizer.threads.background import survive

from ..outbox.outbox import Outbox
from ..streams.config import number_of, stream_of
from ..streams.data.block import Headers
from ..streams.event import Event, EventBatch
from ..streams.transactions.staging import Staging
from ..streams.writing.writer import EventWriter
from .counters import Counters, all_counters
from .ending import SpanEnder
from .hooks import Handle, hooks
from .snapshot import snapshot

try:
    from opentelemetry import context, metrics, propagate, trace
    from opentelemetry.context import Context
    from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation
    from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode, TracerProvider
except ImportError as error:
    raise UnsupportedError(f"this needs OpenTelemetry; {install_hint('otel')}") from error

R = TypeVar("R")

_SYSTEM: Final = "readergroup"
#: The bounds that the conventions name for durations, in seconds.
_BOUNDS: Final = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
#: How many events of a batch its span links to, at most.
_MOST_LINKS: Final = 128
#: How long the end of a process, and `uninstrument`, wait for an exporter.
_FLUSH_SECONDS: Final = 1.0
_clock: Final = SystemClock()
_ender: Final = SpanEnder()

Write = Callable[..., None]
What = Event[Any] | EventBatch[Any]


def instrument(*, tracer_provider: TracerProvider | None = None, meter_provider: MeterProvider | None = None) -> None:
    """Switch traces and metrics on, in this process, for writers that exist, too, and for pools that start from now on.

    Writing an event while a span of the application is active creates a span, whose context the event carries in its
    headers, as the propagators of OpenTelemetry say. Pools call their handlers in spans that continue it. An error of
    OpenTelemetry is counted by `background_errors`, and stops no event. Calling it again replaces the providers.

    Args:
        tracer_provider: Gives the tracer. Default: the one of the process.
        meter_provider: Gives the meter. Default: the one of the process.

    Raises:
        InvalidArgumentError: An argument has the wrong type.
        UnsupportedError: OpenTelemetry is not installed.
    """
    check_type(tracer_provider, TracerProvider, "tracer_provider", or_none=True)
    check_type(meter_provider, MeterProvider, "meter_provider", or_none=True)
    uninstrument()
    tracing = _Tracing(trace.get_tracer(__name__, tracer_provider=tracer_provider))
    _Metrics.current = _Metrics(tracing, metrics.get_meter(__name__, meter_provider=meter_provider))
    for owner, name, wrapped in _ORIGINALS:
        setattr(owner, name, _of_outbox(tracing, wrapped) if owner is Outbox else _of_writer(tracing, wrapped))
    hooks.around = tracing.around
    atexit.register(_ender.flush, _FLUSH_SECONDS)


def uninstrument() -> None:
    """Switch traces and metrics off. Pools that run go on without them."""
    if hooks.around is None:
        return
    for owner, name, original in _ORIGINALS:
        setattr(owner, name, original)
    hooks.around = None
    if _Metrics.current is not None:
        _Metrics.current.tracing.is_on = False
        _Metrics.current = None
    atexit.unregister(_ender.flush)
    _ender.flush(_FLUSH_SECONDS)


#: The methods that write events with headers. `Transaction.write` stages them.
_ORIGINALS: Final[Sequence[tuple[type[Any], str, Write]]] = (
    (EventWriter, "write", EventWriter.write),
    (EventWriter, "write_many", EventWriter.write_many),
    (Staging, "write", Staging.write),
    (Outbox, "write", Outbox.write),
)


def _of_writer(tracing: _Tracing, write: Write) -> Write:
    @wraps(write)
    def traced(self: Any, event: Any, routing_key: Any = None, headers: Any = None, **options: Any) -> None:
        with _Creating(tracing, self.stream, headers) as creating:
            write(self, event, routing_key, creating.headers, **options)

    return traced


def _of_outbox(tracing: _Tracing, write: Write) -> Write:
    @wraps(write)
    def traced(
        self: Any, connection: Any, stream: Any, event: Any, routing_key: Any = None, headers: Any = None
    ) -> None:
        with _Creating(tracing, stream, headers) as creating:
            write(self, connection, stream, event, routing_key, creating.headers)

    return traced


def _now() -> int:
    return int(_clock.time() * 1e9)


def _fields() -> Iterable[str]:
    """The names of the headers that the propagators use."""
    return propagate.get_global_textmap().fields


class _Tracing:
    """What is switched on."""

    def __init__(self, tracer: trace.Tracer) -> None:
        self.tracer = tracer
        self.is_on = True
        self.metrics: _Metrics | None = None

    def around(self, handle: Handle, group: str, reader: str) -> Handle:
        if is_async(handle):

            async def traced_async(what: What) -> Any:
                if not self.is_on:
                    return await handle(what)
                with _Processing(self, what, group, reader):
                    return await handle(what)

            return traced_async

        def traced(what: What) -> Any:
            if not self.is_on:
                return handle(what)
            with _Processing(self, what, group, reader):
                return handle(what)

        return traced


class _InSpan:
    """A block with a span, if there is one. Raises nothing but what the block raises."""

    span: Span | None = None

    def fail(self, span: Span, error: BaseException) -> None:
        span.set_attribute("error.type", _name_of(error))
        span.set_status(Status(StatusCode.ERROR, text_of(error)))

    def end(self, error: BaseException | None) -> None:
        span, self.span = self.span, None
        if span is None:
            return
        try:
            if error is not None:
                self.fail(span, error)
            _ender.end(span, _now())
        except Exception as failed:
            survive(failed, "tracing")


class _Creating(_InSpan):
    """The block in which the application's event, with ``headers``, is written."""

    def __init__(self, tracing: _Tracing, stream: str, headers: Any) -> None:
        self.headers = headers
        try:
            if trace.get_current_span().get_span_context().is_valid:
                self._create(tracing.tracer, stream, headers)
        except Exception as error:
            survive(error, "tracing")

    def _create(self, tracer: trace.Tracer, stream: str, headers: Headers | None) -> None:
        if headers is not None and (not isinstance(headers, Mapping) or any(name in headers for name in _fields())):
            return  # wrong, or a context that the application has chosen
        span = tracer.start_span(
            f"create {stream}",
            kind=SpanKind.PRODUCER,
            attributes={
                "messaging.system": _SYSTEM,
                "messaging.operation.name": "create",
                "messaging.operation.type": "create",
                "messaging.destination.name": stream,
            },
            start_time=_now(),
        )
        self.span = span
        carrier: dict[str, str] = {}
        propagate.inject(carrier, trace.set_span_in_context(span))
        self.headers = {**(headers or {}), **{name: value.encode() for name, value in carrier.items()}}

    def __enter__(self) -> _Creating:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end(error)


class _Processing(_InSpan):
    """The block in which a handler handles an event or a batch. Its span is the current one there."""

    def __init__(self, tracing: _Tracing, what: What, group: str, reader: str) -> None:
        self._tracing = tracing
        self._token: Any = None
        self._begin = stopwatch()
        self._attributes: dict[str, Any] = {}
        try:
            self._start(what, group, reader)
        except Exception as error:
            survive(error, "tracing")

    def _start(self, what: What, group: str, reader: str) -> None:
        stream = stream_of(what.segment)
        self._attributes = {
            "messaging.system": _SYSTEM,
            "messaging.operation.name": "process",
            "messaging.operation.type": "process",
            "messaging.destination.name": stream,
            "messaging.destination.partition.id": str(number_of(what.segment)),
            "messaging.consumer.group.name": group,
        }
        attributes = {**self._attributes, "messaging.client.id": reader}
        parent = Context()
        if isinstance(what, Event):
            attributes["messaging.message.id"] = str(what.pointer)
            parent = _context_in(what.headers)
            links = list(_links([parent]))
        else:
            attributes["messaging.batch.message_count"] = len(what)
            links = list(islice(_links(map(_context_in, what.headers)), _MOST_LINKS))
        span = self._tracing.tracer.start_span(
            f"process {stream}",
            parent,
            kind=SpanKind.CONSUMER,
            attributes=attributes,
            links=links,
            start_time=_now(),
        )
        self.span = span
        self._token = context.attach(trace.set_span_in_context(span, parent))

    def __enter__(self) -> None:
        return

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if self._token is not None:
                context.detach(self._token)
            if self._tracing.metrics is not None and self._attributes:
                if error is not None:
                    self._attributes["error.type"] = _name_of(error)
                self._tracing.metrics.processed.record(stopwatch() - self._begin, self._attributes)
        except Exception as failed:
            survive(failed, "tracing")
        self.end(error)

    def fail(self, span: Span, error: BaseException) -> None:
        span.record_exception(error)
        super().fail(span, error)


def _context_in(headers: Headers) -> Context:
    """Return the context that an event carries, or an empty one: that of another event may be the current one."""
    names = [name for name in _fields() if name in headers]
    if not names:
        return Context()
    return propagate.extract({name: headers[name].decode("utf-8", "replace") for name in names}, Context())


def _links(contexts: Iterable[Context]) -> Iterator[Link]:
    for each in contexts:
        found = trace.get_current_span(each).get_span_context()
        if found.is_valid:
            yield Link(found)


def _name_of(error: BaseException) -> str:
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


# ---------------------------------------------------------------------- metrics

#: A metric and its attributes.
_Key = tuple[str, tuple[tuple[str, str], ...]]


class _Metrics:
    """The numbers of all clients of this process, as the conventions name them, and the time that handlers take."""

    current: _Metrics | None = None

    def __init__(self, tracing: _Tracing, meter: metrics.Meter) -> None:
        self.tracing = tracing
        self._sums: dict[_Key, float] = {}
        self._seen: WeakKeyDictionary[Counters, dict[_Key, float]] = WeakKeyDictionary()
        self._lock = threading.Lock()
        self.processed = meter.create_histogram(
            "messaging.process.duration",
            "s",
            "Duration of handlers.",
            explicit_bucket_boundaries_advisory=_BOUNDS,
        )
        tracing.metrics = self
        for name, (unit, description) in _COUNTERS.items():
            meter.create_observable_counter(name, [self._callback(name)], unit, description)

    def _callback(self, name: str) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def observe(options: CallbackOptions) -> Iterable[Observation]:
            return self._observe(name) if self.tracing.is_on else ()

        return observe

    def _observe(self, name: str) -> list[Observation]:
        with self._lock:  # only threads that collect metrics are here
            for counters in all_counters():
                seen = self._seen.setdefault(counters, {})
                for key, value in _numbers(counters):
                    self._sums[key] = self._sums.get(key, 0) + value - seen.get(key, 0)
                    seen[key] = value
            return [
                Observation(value, dict(attributes)) for (of, attributes), value in self._sums.items() if of == name
            ]


_COUNTERS: Final[Mapping[str, tuple[str, str]]] = {
    "messaging.client.sent.messages": ("{message}", "Events stored in streams."),
    "messaging.client.consumed.messages": ("{message}", "Events handed out to the application."),
    "readergroup.retries": ("{attempt}", "Failed attempts of handlers that were followed by another."),
    "readergroup.dead_letters": ("{message}", "Events moved to the stream of dead letters."),
    "readergroup.leases_lost": ("{lease}", "Readers that lost their lease and joined again."),
    "readergroup.store.errors": ("{error}", "Calls that the store did not answer, or failed."),
}


def _numbers(counters: Counters) -> Iterator[tuple[_Key, float]]:
    found = snapshot(counters)
    system = ("messaging.system", _SYSTEM)
    for name, stream in found.streams.items():
        of = (("messaging.operation.name", "send"), system, ("messaging.destination.name", name))
        yield ("messaging.client.sent.messages", of), stream.events_written
    for name, group in found.groups.items():
        of_group = ("messaging.consumer.group.name", name)
        of = (("messaging.operation.name", "read"), system, of_group)
        yield ("messaging.client.consumed.messages", of), group.events_read
        yield ("readergroup.retries", (of_group,)), group.retries
        yield ("readergroup.dead_letters", (of_group,)), group.dead_letters
        yield ("readergroup.leases_lost", (of_group,)), group.leases_lost
    for kind, number in found.store.errors.items():
        yield ("readergroup.store.errors", (("error.type", kind),)), number
