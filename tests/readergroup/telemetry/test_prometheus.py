"""A registry of prometheus_client shows what a client counts, in the text form that Prometheus reads."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import readergroup as rg
from readergroup import aio
from readergroup.telemetry import GroupTelemetry, OutboxTelemetry, PrometheusCollector, StreamTelemetry
from readergroup.telemetry.prometheus import _GROUPS, _OUTBOXES, _STREAMS
from synchronizer.counting import LATENCY_BOUNDS
from synchronizer.testing import FailingStore
from tests.places import DOCS

STREAM = "shop/orders"


def samples(registry: CollectorRegistry) -> Mapping[str, float]:
    """The samples, as ``name{label=value}``, after a way through the text form."""
    found = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        assert family.documentation.endswith(".")
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sample.labels.items())
            found[f"{sample.name}{{{labels}}}"] = sample.value
    return found


def test_a_registry_shows_the_numbers_under_the_names_that_prometheus_expects() -> None:
    registry = CollectorRegistry(auto_describe=True)
    with rg.connect("memory://") as client:
        registry.register(PrometheusCollector(client))
        assert samples(registry)["readergroup_append_duration_seconds_count{}"] == 0
        client.streams.create(STREAM)
        with client.writer(STREAM) as writer:
            for _ in range(10):
                writer.write(b"x")
        client.streams.seal(STREAM)
        client.groups.create("billing", streams=[STREAM]).pool(lambda _: None).run()
        found, telemetry = samples(registry), client.telemetry()
    assert found["readergroup_events_written_total{stream=shop/orders}"] == 10
    assert found["readergroup_events_read_total{group=billing}"] == 10
    assert found["readergroup_read_bytes_total{group=billing}"] == telemetry.streams[STREAM].bytes_written
    assert found["readergroup_events_in_flight{group=billing}"] == 0
    appends = telemetry.store.appends
    assert found["readergroup_append_duration_seconds_count{}"] == appends.count > 0
    assert found["readergroup_append_duration_seconds_sum{}"] == pytest.approx(appends.seconds)
    for bound in LATENCY_BOUNDS:
        assert found[f"readergroup_append_duration_seconds_bucket{{le={bound}}}"] == appends.buckets[bound]
    assert found["readergroup_append_duration_seconds_bucket{le=+Inf}"] == appends.count


def test_errors_have_their_kind() -> None:
    registry = CollectorRegistry()
    with rg.Client(FailingStore(rg.connect("memory://").store)) as client:
        client.streams.create(STREAM)
        registry.register(PrometheusCollector(client))
        with client.writer(STREAM) as writer:
            client.store.fail_appends(1)  # type: ignore[attr-defined]
            writer.write(b"x")
        assert samples(registry)["readergroup_store_errors_total{kind=StoreUnavailableError}"] == 1


def test_two_clients_of_one_registry_have_two_prefixes() -> None:
    registry = CollectorRegistry(auto_describe=True)
    with rg.connect("memory://") as one, rg.connect("memory://") as other:
        registry.register(PrometheusCollector(one))
        with pytest.raises(ValueError, match="Duplicated"):
            registry.register(PrometheusCollector(other))
        registry.register(PrometheusCollector(other, prefix="archive"))
        assert "archive_append_duration_seconds_count{}" in samples(registry)


def test_a_client_of_asyncio() -> None:
    async def work() -> None:
        async with aio.connect("memory://") as client:
            registry = CollectorRegistry()
            registry.register(PrometheusCollector(client))
            await client.streams.create(STREAM)
            assert samples(registry)["readergroup_append_duration_seconds_sum{}"] >= 0

    asyncio.run(work())


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(rg.InvalidArgumentError, match="client"):
        PrometheusCollector("memory://")  # type: ignore[arg-type]
    with pytest.raises(rg.InvalidArgumentError, match="client='the class Client'"):
        PrometheusCollector(rg.Client)  # type: ignore[arg-type]
    with rg.connect("memory://") as client:
        for prefix in (5, "", "a b", "1a", None, True):
            with pytest.raises(rg.InvalidArgumentError, match="prefix"):
                PrometheusCollector(client, prefix=prefix)  # type: ignore[arg-type]


def test_each_number_is_collected_and_on_the_page() -> None:
    page = (DOCS / "howto" / "measure-and-trace.md").read_text()
    shown = {"errors", "appends", *_STREAMS, *_GROUPS, *_OUTBOXES}
    models = (StreamTelemetry, GroupTelemetry, OutboxTelemetry)
    assert {field for model in models for field in model.model_fields} == shown - {"errors", "appends"}
    assert all(f"`{field}`" in page for field in shown)
    with rg.connect("memory://") as client:
        names = {each.name for each in PrometheusCollector(client).collect()}
    listed = set(re.findall(r"readergroup_([a-z_]+?)(?:_total)?`", page))
    assert {f"readergroup_{name}" for name in listed} == names
