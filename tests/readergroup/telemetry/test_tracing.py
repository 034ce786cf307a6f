"""A trace goes on where an event is handled, whatever lies between, and telemetry that fails stops no event."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode, format_trace_id

import readergroup as rg
from readergroup import aio
from readergroup.streams.transactions.staging import Staging
from readergroup.telemetry import instrument, uninstrument
from readergroup.telemetry.hooks import hooks
from tests.waiting import until

STREAM = "shop/orders"
ORIGINALS = (rg.EventWriter.write, rg.EventWriter.write_many, Staging.write, rg.Outbox.write)


class Traced:
    """An instrumented process."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.reader = InMemoryMetricReader()
        self.tracer = provider.get_tracer("application")
        instrument(tracer_provider=provider, meter_provider=MeterProvider([self.reader], shutdown_on_exit=False))

    def spans(self, name: str, count: int) -> list[ReadableSpan]:
        def found() -> list[ReadableSpan]:
            return [span for span in self.exporter.get_finished_spans() if span.name == name]

        until(lambda: len(found()) >= count, f"{count} spans {name!r}")
        assert len(found()) == count
        return found()

    def metric(self, name: str) -> list[Any]:
        data = self.reader.get_metrics_data()
        assert data is not None
        return [
            point
            for resource in data.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
            if metric.name == name
            for point in metric.data.data_points
        ]


@pytest.fixture
def traced() -> Iterator[Traced]:
    yield Traced()
    uninstrument()


@pytest.fixture
def client(store_url: str) -> Iterator[rg.Client]:
    with rg.connect(store_url) as client:
        client.streams.create(STREAM)
        yield client


def ended(client: rg.Client) -> rg.ReaderGroup:
    client.streams.seal(STREAM)
    return client.groups.create("billing", streams=[STREAM])


def write_in_spans(traced: Traced, client: rg.Client, count: int) -> list[str]:
    """Write each event in a trace of its own; return their ids."""
    ids = []
    with client.writer(STREAM) as writer:
        for number in range(count):
            with traced.tracer.start_as_current_span("request") as span:
                ids.append(format_trace_id(span.get_span_context().trace_id))
                writer.write(ids[-1].encode(), routing_key=f"key-{number}")
    return ids


def current_trace() -> str:
    return format_trace_id(trace.get_current_span().get_span_context().trace_id)


def test_a_handler_runs_in_a_span_that_continues_the_trace_of_the_writer(traced: Traced, client: rg.Client) -> None:
    with traced.tracer.start_as_current_span("request") as request, client.writer(STREAM) as writer:
        writer.write(b"x", routing_key="ann", headers={"own": b"1"})
    handled: list[tuple[str, Any]] = []
    ended(client).pool(lambda event: handled.append((current_trace(), event.headers))).run()
    (create,), (process,) = traced.spans(f"create {STREAM}", 1), traced.spans(f"process {STREAM}", 1)
    ((trace_id, headers),) = handled
    assert trace_id == format_trace_id(request.get_span_context().trace_id)
    assert headers["own"] == b"1" and trace_id.encode() in headers["traceparent"]
    assert create.kind is SpanKind.PRODUCER and process.kind is SpanKind.CONSUMER
    assert create.parent is not None and create.parent.span_id == request.get_span_context().span_id
    assert process.parent is not None and process.parent.span_id == create.context.span_id
    assert [link.context.span_id for link in process.links] == [create.context.span_id]
    assert create.start_time <= create.end_time and process.start_time <= process.end_time  # type: ignore[operator]
    assert dict(create.attributes or {}) == {
        "messaging.system": "readergroup",
        "messaging.operation.name": "create",
        "messaging.operation.type": "create",
        "messaging.destination.name": STREAM,
    }
    attributes = dict(process.attributes or {})
    assert str(attributes.pop("messaging.message.id")).startswith(f"{STREAM}/0:")
    assert attributes.pop("messaging.client.id")
    assert attributes == {
        "messaging.system": "readergroup",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": STREAM,
        "messaging.destination.partition.id": "0",
        "messaging.consumer.group.name": "billing",
    }


def test_without_a_span_of_the_application_events_get_no_headers(traced: Traced, client: rg.Client) -> None:
    with client.writer(STREAM) as writer:
        writer.write(b"x")
        writer.write(b"y", headers={"traceparent": b"its own"})
        with traced.tracer.start_as_current_span("request"):
            writer.write(b"z", headers={"traceparent": b"its own"})
    found: list[Any] = []
    ended(client).pool(lambda event: found.append(dict(event.headers))).run()
    assert found == [{}, {"traceparent": b"its own"}, {"traceparent": b"its own"}]
    assert [span.parent for span in traced.spans(f"process {STREAM}", 3)] == [None] * 3
    assert traced.spans(f"create {STREAM}", 0) == []


def _plain(seen: list[bool]) -> Callable[[Any], Any]:
    return lambda event: seen.append(current_trace().encode() == event.data)


def _awaiting(seen: list[bool]) -> Callable[[Any], Any]:
    async def handle(event: rg.Event[bytes]) -> None:
        before = current_trace()
        await asyncio.sleep(0)
        seen.append(before.encode() == current_trace().encode() == event.data)

    return handle


@pytest.mark.parametrize("kind", [_plain, _awaiting])
@pytest.mark.parametrize("concurrency", [1, 8])
def test_each_of_many_events_has_its_own_context(
    traced: Traced, client: rg.Client, concurrency: int, kind: Callable[[list[bool]], Callable[[Any], Any]]
) -> None:
    write_in_spans(traced, client, 50)
    seen: list[bool] = []
    ended(client).pool(kind(seen), concurrency=concurrency).run()
    assert seen == [True] * 50
    assert len({span.context.trace_id for span in traced.spans(f"process {STREAM}", 50)}) == 50


def test_a_handler_on_the_loop_of_the_application(traced: Traced, store_url: str) -> None:
    seen: list[bool] = []

    async def work() -> None:
        async with aio.connect(store_url) as client:
            await client.streams.create(STREAM)
            async with client.writer(STREAM) as writer:
                for _ in range(5):
                    with traced.tracer.start_as_current_span("request"):
                        await writer.write(current_trace().encode())
            await client.streams.seal(STREAM)
            group = await client.groups.create("billing", streams=[STREAM])
            pool = await group.pool(_awaiting(seen), concurrency=4)
            await pool.run()

    asyncio.run(work())
    assert seen == [True] * 5


def test_a_batch_has_links_to_its_events(traced: Traced, client: rg.Client) -> None:
    ids = write_in_spans(traced, client, 5)
    sizes: list[int] = []
    ended(client).pool(handle_batch=lambda batch: sizes.append(len(batch))).run()
    spans = traced.spans(f"process {STREAM}", len(sizes))
    assert sorted(format_trace_id(link.context.trace_id) for span in spans for link in span.links) == sorted(ids)
    assert sum(sizes) == 5
    assert sorted((span.attributes or {})["messaging.batch.message_count"] for span in spans) == sorted(sizes)  # type: ignore[type-var]


def test_a_failed_attempt_is_an_error_and_a_dead_letter_keeps_the_trace(traced: Traced, client: rg.Client) -> None:
    client.streams.create("shop/dead")
    (trace_id,) = write_in_spans(traced, client, 1)

    def fail(event: rg.Event[bytes]) -> None:
        raise ValueError("no")

    retry = rg.RetryPolicy(attempts=2, first_delay_seconds=0.01, dead_letters="shop/dead")
    ended(client).pool(fail, retry=retry).run()
    spans = traced.spans(f"process {STREAM}", 2)
    assert all(span.status.status_code is StatusCode.ERROR for span in spans)
    assert [(span.attributes or {})["error.type"] for span in spans] == ["ValueError"] * 2
    assert [event.name for span in spans for event in span.events] == ["exception"] * 2
    client.streams.seal("shop/dead")
    seen: list[str] = []
    client.groups.create("dead", streams=["shop/dead"]).pool(lambda event: seen.append(current_trace())).run()
    assert seen == [trace_id]


def test_transactions_and_an_outbox_carry_the_trace(traced: Traced, client: rg.Client, tmp_path: Path) -> None:
    database = sqlite3.connect(tmp_path / "app.db")
    outbox = rg.Outbox(client, lambda: sqlite3.connect(tmp_path / "app.db", check_same_thread=False))
    outbox.create_table()
    with traced.tracer.start_as_current_span("request"):
        expected = current_trace()
        outbox.write(database, STREAM, b"x")
        with client.writer(STREAM) as writer, writer.transaction() as transaction:
            transaction.write(b"y")
            writer.write_many([b"z"])
    database.commit()
    with outbox.relay():
        until(lambda: outbox.lag().events == 0)
    seen: list[str] = []
    ended(client).pool(lambda event: seen.append(current_trace())).run()
    assert seen == [expected] * 3


def test_a_write_that_raises_is_an_error(traced: Traced, client: rg.Client) -> None:
    with client.writer(STREAM) as writer, traced.tracer.start_as_current_span("request"):
        with pytest.raises(rg.EventTooLargeError):
            writer.write(bytes(9_000_000))
        with pytest.raises(rg.InvalidArgumentError, match="headers"):
            writer.write(b"x", headers=5)  # type: ignore[arg-type]
    (span,) = traced.spans(f"create {STREAM}", 1)
    assert (span.attributes or {})["error.type"] == "readergroup.errors.EventTooLargeError"


def test_metrics_by_the_conventions(traced: Traced, client: rg.Client) -> None:
    write_in_spans(traced, client, 7)
    group = ended(client)
    group.pool(lambda event: None).run()

    def mine(name: str, attribute: str, value: str) -> Any:
        (point,) = [point for point in traced.metric(name) if point.attributes[attribute] == value]
        return point

    assert mine("messaging.client.sent.messages", "messaging.destination.name", STREAM).value >= 7
    consumed = mine("messaging.client.consumed.messages", "messaging.consumer.group.name", "billing")
    assert consumed.value >= 7 and consumed.attributes["messaging.system"] == "readergroup"
    duration = mine("messaging.process.duration", "messaging.consumer.group.name", "billing")
    assert duration.count == 7 and duration.explicit_bounds[0] == 0.005
    client.close()
    del client, group
    again = mine("messaging.client.sent.messages", "messaging.destination.name", STREAM)
    assert again.value >= 7, "what a closed client has counted is not lost"


class Raising(SpanExporter):
    def export(self, spans: Any) -> SpanExportResult:
        raise ValueError("no")

    def shutdown(self) -> None: ...


class Cancelled(SpanExporter):
    """Its first span ends with what is no `Exception`."""

    def __init__(self) -> None:
        self.exported = 0

    def export(self, spans: Any) -> SpanExportResult:
        self.exported += 1
        if self.exported == 1:
            raise asyncio.CancelledError
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None: ...


@pytest.mark.unexpected_errors
def test_spans_are_exported_whatever_the_first_one_raises(client: rg.Client) -> None:
    exporter = Cancelled()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    instrument(tracer_provider=provider)
    try:
        with client.writer(STREAM) as writer:
            writer.write_many([b"%d" % number for number in range(20)])
        handled: list[bytes] = []
        ended(client).pool(lambda event: handled.append(event.data)).run()
        until(lambda: exporter.exported >= len(handled) > 0)
    finally:
        uninstrument()


class Hanging(Raising):
    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.hangs = threading.Event()

    def export(self, spans: Any) -> SpanExportResult:
        self.hangs.set()
        self.go_on.wait(300)
        return SpanExportResult.SUCCESS


class RaisingProcessor(SpanProcessor):
    def on_start(self, span: Any, parent_context: Any = None) -> None:
        raise ValueError("no")


@pytest.mark.unexpected_errors
@pytest.mark.parametrize("kind", ["raising exporter", "hanging exporter", "raising processor"])
def test_telemetry_that_fails_stops_no_event(client: rg.Client, kind: str) -> None:
    hanging = Hanging()
    processors = {
        "raising exporter": SimpleSpanProcessor(Raising()),
        "hanging exporter": SimpleSpanProcessor(hanging),
        "raising processor": RaisingProcessor(),
    }
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(processors[kind])
    instrument(tracer_provider=provider)
    try:
        application = TracerProvider(shutdown_on_exit=False).get_tracer("application")
        with client.writer(STREAM) as writer, application.start_as_current_span("request"):
            for number in range(5000):
                writer.write(b"%d" % number)
        handled: list[bytes] = []
        ended(client).pool(lambda event: handled.append(event.data), concurrency=4).run()
        assert len(handled) == 5000
        assert hanging.hangs.is_set() == (kind == "hanging exporter")
    finally:
        hanging.go_on.set()
        uninstrument()


def test_switched_off_nothing_is_left(client: rg.Client) -> None:
    traced = Traced()
    started, go_on = threading.Event(), threading.Event()

    def handle(event: rg.Event[bytes]) -> None:
        started.set()
        go_on.wait(60)

    write_in_spans(traced, client, 3)
    pool = ended(client).pool(handle)
    thread = threading.Thread(target=pool.run)
    thread.start()
    try:
        assert started.wait(60)
        uninstrument()
        uninstrument()
    finally:
        go_on.set()
        thread.join()
    assert (rg.EventWriter.write, rg.EventWriter.write_many, Staging.write, rg.Outbox.write) == ORIGINALS
    assert hooks.around is None
    traced.spans(f"process {STREAM}", 1)  # the one that had begun
    assert traced.metric("messaging.client.sent.messages") == []


@pytest.mark.parametrize("name", ["tracer_provider", "meter_provider"])
def test_wrong_arguments_change_nothing(traced: Traced, name: str) -> None:
    around = hooks.around
    with pytest.raises(rg.InvalidArgumentError, match=name):
        instrument(**{name: "otlp"})  # type: ignore[arg-type]
    assert hooks.around is around


def test_a_forked_child_traces_for_itself(traced: Traced, shared_store_url: str, tmp_path: Path) -> None:
    with traced.tracer.start_as_current_span("request"), rg.connect(shared_store_url) as client:
        client.streams.create(STREAM)
        with client.writer(STREAM) as writer:
            writer.write(b"x")
    traced.spans(f"create {STREAM}", 1)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with traced.tracer.start_as_current_span("request"), rg.connect(f"sqlite:///{tmp_path}/y.db") as client:
                client.streams.create(STREAM)
                with client.writer(STREAM) as writer:
                    writer.write(b"x")
            traced.spans(f"create {STREAM}", 2)
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0


def test_instrumenting_twice_makes_one_span_per_event(client: rg.Client) -> None:
    Traced()
    traced = Traced()
    try:
        write_in_spans(traced, client, 2)
        ended(client).pool(lambda event: None).run()
        traced.spans(f"create {STREAM}", 2)
        traced.spans(f"process {STREAM}", 2)
    finally:
        uninstrument()
