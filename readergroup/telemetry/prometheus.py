"""`PrometheusCollector`: the numbers of a client, for a registry of prometheus_client."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, Final, Protocol, runtime_checkable

from synchronizer import InvalidArgumentError, UnsupportedError
from synchronizer.arguments import check_type, type_name
from synchronizer.extras import install_hint

from .snapshot import Latency, Telemetry

try:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
    from prometheus_client.registry import Collector
except ImportError as error:
    raise UnsupportedError(f"this needs prometheus_client; {install_hint('prometheus')}") from error


@runtime_checkable
class Client(Protocol):
    """A client, of `readergroup` or of `readergroup.aio`."""

    def telemetry(self) -> Telemetry: ...


#: The metrics of each kind, by their field: the name without the prefix, and the help text.
_STREAMS: Final = {
    "events_written": ("events_written", "Events stored in the stream."),
    "bytes_written": ("written_bytes", "Bytes of these events in the store."),
}
_GROUPS: Final = {
    "events_read": ("events_read", "Events handed out to the application, repeats included."),
    "bytes_read": ("read_bytes", "Bytes of these events in the store."),
    "commits": ("commit_duration_seconds", "Renewals of readers' leases, which commit their positions."),
    "segments_acquired": ("segments_acquired", "Segments that readers have taken over."),
    "leases_lost": ("leases_lost", "Readers that were declared dead, or lost their lease, and joined again."),
    "readers_declared_dead": ("readers_declared_dead", "Dead readers that this process removed."),
    "retries": ("retries", "Failed attempts of handlers that were followed by another."),
    "dead_letters": ("dead_letters", "Events moved to the stream of dead letters."),
    "events_in_flight": ("events_in_flight", "Events that concurrent pools handle now."),
    "sink_transactions": ("sink_transactions", "Transactions committed by a SqlSink."),
}
_OUTBOXES: Final = {
    "events_relayed": ("outbox_events_relayed", "Events moved from the outbox to their streams."),
    "delays": ("outbox_delay_seconds", "How long the oldest event of each round of the relay had waited."),
}
_PREFIX: Final = re.compile("[a-zA-Z][a-zA-Z0-9_]*")
_GAUGES: Final = frozenset({"events_in_flight"})


class PrometheusCollector(Collector):
    """Collects the numbers of `Client.telemetry` when it is asked. Register it in your registry.

    The labels are ``stream``, ``group``, ``outbox`` and ``kind``, of errors of the store.

    Args:
        client: The client, also of `readergroup.aio`. It is borrowed.
        prefix: The names of all metrics begin with it and "_". Two clients of one registry need two. Default:
            ``readergroup``.

    Raises:
        InvalidArgumentError: An argument has the wrong type, or the prefix cannot be that of a metric.
        UnsupportedError: prometheus_client is not installed.
    """

    def __init__(self, client: Client, *, prefix: str = "readergroup") -> None:
        if isinstance(client, type) or not isinstance(client, Client):
            raise InvalidArgumentError("client must be a client of readergroup", client=type_name(client))
        check_type(prefix, str, "prefix")
        if not _PREFIX.fullmatch(prefix):
            raise InvalidArgumentError("prefix must be letters, digits and '_', and begin with a letter", prefix=prefix)
        self._client = client
        self._prefix = prefix

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics as they are now. Never waits."""
        found = self._client.telemetry()
        for label, metrics, of in (
            ("stream", _STREAMS, found.streams),
            ("group", _GROUPS, found.groups),
            ("outbox", _OUTBOXES, found.outboxes),
        ):
            for field, (name, help) in metrics.items():
                values = [([key], getattr(each, field)) for key, each in of.items()]
                yield self._metric(field, name, help, [label], values)
        help = "Appends to the store, of all kinds."
        yield self._metric("appends", "append_duration_seconds", help, [], [([], found.store.appends)])
        errors = [([kind], number) for kind, number in found.store.errors.items()]
        yield self._metric(
            "errors", "store_errors", "Calls that the store did not answer, or failed.", ["kind"], errors
        )

    def _metric(
        self, field: str, name: str, help: str, labels: list[str], values: Iterable[tuple[list[str], Any]]
    ) -> Metric:
        name = f"{self._prefix}_{name}"
        if name.endswith("_seconds"):
            histogram = HistogramMetricFamily(name, help, labels=labels)
            for key, latency in values:
                histogram.add_metric(key, buckets(latency), sum_value=latency.seconds)
            return histogram
        kind = GaugeMetricFamily if field in _GAUGES else CounterMetricFamily
        metric = kind(name, help, labels=labels)
        for key, value in values:
            metric.add_metric(key, value)
        return metric


def buckets(latency: Latency) -> list[tuple[str, float]]:
    """Return the buckets as a `HistogramMetricFamily` takes them."""
    counts = ((str(bound), float(count)) for bound, count in latency.buckets.items())
    return [*counts, ("+Inf", float(latency.count))]
