"""What a client does in its process: numbers, a collector for Prometheus, and traces by OpenTelemetry."""

from typing import TYPE_CHECKING

from synchronizer.lazy_exports import lazy_exports

# The counters are loaded with a client, which must not load what shows them.
if TYPE_CHECKING:
    from .prometheus import PrometheusCollector
    from .snapshot import GroupTelemetry, Latency, OutboxTelemetry, StoreTelemetry, StreamTelemetry, Telemetry
    from .tracing import instrument, uninstrument

__all__ = [
    "GroupTelemetry",
    "Latency",
    "OutboxTelemetry",
    "PrometheusCollector",
    "StoreTelemetry",
    "StreamTelemetry",
    "Telemetry",
    "instrument",
    "uninstrument",
]

_MODULES = {
    ".prometheus": "PrometheusCollector",
    ".snapshot": "GroupTelemetry Latency OutboxTelemetry StoreTelemetry StreamTelemetry Telemetry",
    ".tracing": "instrument uninstrument",
}

if not TYPE_CHECKING:
    __getattr__ = lazy_exports(__name__, _MODULES)


def __dir__() -> list[str]:
    return __all__
