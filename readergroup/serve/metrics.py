"""The metrics, in the format of Prometheus."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ..streams.config import SegmentId
from ..telemetry.prometheus import buckets
from ..telemetry.snapshot import latency
from .flow import ZERO, Amount
from .sample import GroupSample, Sample
from .sampler import LINGER_SECONDS, Sampler
from .watching import Watches

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST
#: If a store has more segments, only the totals of groups are exported.
MAX_SEGMENTS: Final = 10_000

_KIND: Final = ("kind",)
_GROUP: Final = ("group",)
_EVENTS: Final = "Events {} while this process looked, estimated where there are many at once."
_BYTES: Final = "Bytes of the events {} while this process looked."

#: The values of labels, and what is counted for them.
_Row = tuple[tuple[str, ...], Amount]


class StoreMetrics(Collector):
    """The metrics of one sample, without those of segments. A stale one says nothing of groups."""

    def __init__(self, sampler: Sampler, watches: Watches, sample: Sample, *, is_stale: bool = False) -> None:
        self._sampler = sampler
        self._watches = watches
        self._sample = sample
        self._is_stale = is_stale
        self._groups = [each for each in sample.groups.values() if each.error is None and not is_stale]
        self._with_series, self._left_out = _with_series(self._groups)

    def text(self) -> bytes:
        return generate_latest(self) + _text_of_segments(self._with_series, self._sample.written.segments)

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        sample = self._sample
        yield from self._of_store(sample)
        yield from self._of_groups(self._groups)
        streams = [] if self._is_stale else [((name,), each) for name, each in sorted(sample.written.streams.items())]
        yield from _amounts("stream", "written", "written to the stream", ("stream",), streams)
        yield _gauge("readergroup_segments_left_out", "Segments without series of their own.", self._left_out)
        if sample.outbox is not None:
            events, seconds = sample.outbox
            yield _gauge("readergroup_outbox_waiting_events", "Committed events that wait in the outbox.", events)
            yield _gauge("readergroup_outbox_oldest_seconds", "Age of the oldest event in the outbox.", seconds)

    def _of_store(self, sample: Sample) -> Iterator[Metric]:
        up = sample.error is None and not self._is_stale
        yield _gauge("readergroup_store_up", "Whether the last sample could read the store.", float(up))
        yield _gauge("readergroup_sample_timestamp_seconds", "When the exported sample was taken.", sample.at)
        yield _gauge("readergroup_sample_duration_seconds", "How long it took to read all groups.", sample.seconds)
        samples = CounterMetricFamily("readergroup_samples", "Samples taken by this process.")
        samples.add_metric((), self._sampler.samples)
        yield samples
        yield _gauge("readergroup_unreadable_groups", "Groups that cannot be read.", len(sample.unreadable))
        errors = CounterMetricFamily(
            "readergroup_sample_errors", "Failed reads of the store, by error.", labels=("kind",)
        )
        for kind, count in sorted(self._sampler.errors_by_kind().items()):
            errors.add_metric((kind,), count)
        yield errors
        fetches = latency(self._sampler.fetches)
        histogram = HistogramMetricFamily(
            "readergroup_sample_fetch_duration_seconds",
            "Reads of the logs of groups by this process, one for each group and sample. Commits and appends are timed "
            "where they are made: PrometheusCollector has readergroup_commit_duration_seconds and "
            "readergroup_append_duration_seconds.",
        )
        histogram.add_metric((), buckets(fetches), sum_value=fetches.seconds)
        yield histogram
        yield _gauge("readergroup_viewers", "Open pages with a live view.", self._watches.viewers)

    def _of_groups(self, groups: list[GroupSample]) -> Iterator[Metric]:
        columns = (
            ("segments", "Segments to read. More readers than this are idle.", lambda g: g.state.number_of_segments),
            ("unassigned_segments", "Segments that can be read and have no owner.", lambda g: len(g.state.unassigned)),
            ("owned_segments", "Segments that have an owner.", _owned),
            ("readers", "Readers in the group.", lambda g: g.state.number_of_readers),
            (
                "live_readers",
                "Readers whose leases have not expired, as this process sees them.",
                lambda g: g.state.number_of_readers - len(g.expired),
            ),
            ("lag_events", "Events behind, estimated where many remain.", lambda g: g.lag.events),
            ("lag_bytes", "Bytes behind.", lambda g: g.lag.bytes),
            ("lag_seconds", "Age of the next event of the segment that is most behind.", lambda g: g.lag.seconds),
            (
                "end_of_data",
                "Whether the group has read its streams to their end.",
                lambda g: float(g.state.end_of_data),
            ),
            (
                "pending_dead_letters",
                "Dead letters of its streams that are neither replayed nor discarded.",
                self._pending,
            ),
            ("waiting_retries", "Events that wait for their next attempt.", lambda g: g.retries.events),
            (
                "kept_checkpoints",
                "Completed checkpoints in the state of the group.",
                lambda g: len(g.state.completed_checkpoints),
            ),
            (
                "outstanding_checkpoints",
                "Checkpoints that not all readers have passed.",
                lambda g: len(g.state.outstanding_checkpoints),
            ),
        )
        for name, documentation, value in columns:
            family = GaugeMetricFamily(f"readergroup_group_{name}", documentation, labels=_GROUP)
            for group in groups:
                family.add_metric((group.name,), value(group))
            yield family
        changes = CounterMetricFamily(
            "readergroup_group_owner_changes", "Assignments of segments seen by this process.", labels=_GROUP
        )
        checkpoints = CounterMetricFamily(
            "readergroup_group_checkpoints", "Checkpoints that were completed while this process looked.", labels=_GROUP
        )
        last = GaugeMetricFamily(
            "readergroup_group_last_checkpoint_timestamp_seconds",
            "When this process saw the last checkpoint completed. Missing before the first.",
            labels=_GROUP,
        )
        for group in groups:
            history = self._sampler.history(group.name)
            changes.add_metric((group.name,), history.owner_changes)
            checkpoints.add_metric((group.name,), history.checkpoints)
            if history.last_checkpoint_at is not None:
                last.add_metric((group.name,), history.last_checkpoint_at)
        yield from (changes, checkpoints, last)
        takeovers = CounterMetricFamily(
            "readergroup_group_takeovers",
            "Segments that got another reader while this process looked, because theirs was declared dead, removed, or "
            "replaced by another of its name.",
            labels=(*_GROUP, "cause"),
        )
        for group in groups:
            for cause, count in group.flow.takeovers.items():
                takeovers.add_metric((group.name, cause), count)
        yield takeovers
        read = [((group.name,), group.flow.read) for group in groups]
        yield from _amounts("group", "read", "that the group has read, by its committed positions", _GROUP, read)

    def _pending(self, group: GroupSample) -> int:
        found = self._sample.letters.values()
        return sum(each.by_source.get(stream, 0) for each in found for stream in group.state.config.streams)


def _owned(group: GroupSample) -> int:
    return sum(len(segments) for segments in group.state.owned.values())


def _with_series(groups: list[GroupSample]) -> tuple[list[GroupSample], int]:
    """Return the groups whose segments have series of their own, and the number of segments without."""
    shown, left_out = [], 0
    room = MAX_SEGMENTS
    for group in sorted(groups, key=lambda each: (len(each.lag.segments), each.name)):  # the large ones go first
        if len(group.lag.segments) <= room:
            room -= len(group.lag.segments)
            shown.append(group)
        else:
            left_out += len(group.lag.segments)
    return shown, left_out


#: The series of segments: their names, types and meanings.
_OF_SEGMENTS: Final = (
    ("lag_events", "gauge", "Events behind in the segment, estimated where many remain."),
    ("lag_bytes", "gauge", "Bytes behind in the segment."),
    ("lag_seconds", "gauge", "Age of the next event of the segment."),
    ("read_events_total", "counter", _EVENTS.format("that the group has read in the segment")),
    ("read_bytes_total", "counter", _BYTES.format("that the group has read in the segment")),
    ("written_events_total", "counter", _EVENTS.format("written to the segment")),
    ("written_bytes_total", "counter", _BYTES.format("written to the segment")),
)


def _text_of_segments(groups: list[GroupSample], written: Mapping[SegmentId, Amount]) -> bytes:
    """Return the series of segments. Families of `prometheus_client` take five times as long for thousands of them."""
    families = [
        [f"# HELP readergroup_segment_{name} {meaning}\n# TYPE readergroup_segment_{name} {kind}\n"]
        for name, kind, meaning in _OF_SEGMENTS
    ]
    lag_events, lag_bytes, lag_seconds, read_events, read_bytes, written_events, written_bytes = families
    shown: set[SegmentId] = set()
    for group in groups:
        name, flow = _escaped(group.name), group.flow.segments
        for segment, lag in group.lag.segments.items():
            label = f'segment="{_escaped(segment)}"}} '
            labels = f'group="{name}",{label}'
            read = flow.get(segment, ZERO)
            lag_events.append(f"readergroup_segment_lag_events{{{labels}{lag.events}\n")
            lag_bytes.append(f"readergroup_segment_lag_bytes{{{labels}{lag.bytes}\n")
            lag_seconds.append(f"readergroup_segment_lag_seconds{{{labels}{lag.seconds}\n")
            read_events.append(f"readergroup_segment_read_events_total{{{labels}{round(read.events)}\n")
            read_bytes.append(f"readergroup_segment_read_bytes_total{{{labels}{read.bytes}\n")
            if segment not in shown:  # by another group
                shown.add(segment)
                amount = written.get(segment, ZERO)
                written_events.append(f"readergroup_segment_written_events_total{{{label}{round(amount.events)}\n")
                written_bytes.append(f"readergroup_segment_written_bytes_total{{{label}{amount.bytes}\n")
    return "".join(line for lines in families for line in lines).encode()


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _amounts(of: str, verb: str, which: str, labels: tuple[str, ...], rows: Sequence[_Row]) -> Iterator[Metric]:
    """Yield a counter of events and one of bytes."""
    events = CounterMetricFamily(f"readergroup_{of}_{verb}_events", _EVENTS.format(which), labels=labels)
    sizes = CounterMetricFamily(f"readergroup_{of}_{verb}_bytes", _BYTES.format(which), labels=labels)
    for key, amount in rows:
        events.add_metric(key, round(amount.events))
        sizes.add_metric(key, amount.bytes)
    yield from (events, sizes)


def _gauge(name: str, documentation: str, value: float) -> Metric:
    return GaugeMetricFamily(name, documentation, value=value)


class Exposition:
    """The metrics as text. That of thousands of segments takes a while, so the sampler's thread makes it."""

    def __init__(self, sampler: Sampler, watches: Watches, registry: CollectorRegistry | None) -> None:
        self._sampler = sampler
        self._watches = watches
        self._registry = registry
        self._clock = sampler.client.clock
        self._asked_at = float("-inf")
        self._made: tuple[Sample, bytes] | None = None

    def prepare(self, sample: Sample) -> None:
        """Make the text of a new sample before it is published, if someone scrapes."""
        if self._clock.monotonic() - self._asked_at <= LINGER_SECONDS:
            self._made = sample, self._text_of(sample)

    def text(self) -> bytes:
        """Return the metrics of the newest sample, and those of the joined registry as they are now."""
        self._asked_at = self._clock.monotonic()
        sample, made = self._sampler.sample, self._made
        if self._sampler.is_stale(sample):
            text = self._text_of(sample, is_stale=True)
        elif made is not None and made[0].at_monotonic >= sample.at_monotonic:
            text = made[1]
        else:
            text = self._text_of(sample)
            self._made = sample, text
        return text if self._registry is None else text + generate_latest(self._registry)

    def _text_of(self, sample: Sample, *, is_stale: bool = False) -> bytes:
        return StoreMetrics(self._sampler, self._watches, sample, is_stale=is_stale).text()
