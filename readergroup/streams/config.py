"""Names of streams and segments, the config of a stream, and cuts."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timedelta
from itertools import pairwise
from numbers import Real
from typing import Annotated, Final, Literal, NamedTuple, NewType, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    field_validator,
    model_validator,
)

from synchronizer import InvalidArgumentError, Map
from synchronizer.arguments import check_count, check_duration, check_type
from synchronizer.configuration import Configuration

from ..html import html_table

#: ``scope/stream/number``, for example ``shop/orders/0``.
SegmentId = NewType("SegmentId", str)

V = TypeVar("V")

MAX_NAME_LENGTH: Final = 250
MAX_SEGMENTS: Final = 10_000

_NAME: Final = re.compile(r"[A-Za-z0-9._-]+")


def check_name(name: str, what: str) -> str:
    """Return ``name`` if it may name a ``what``; else raise `InvalidArgumentError`."""
    if not isinstance(name, str) or not _NAME.fullmatch(name) or len(name) > MAX_NAME_LENGTH:
        raise InvalidArgumentError(
            f"the name of a {what} must have at most {MAX_NAME_LENGTH} letters, digits, '.', '-' and '_'", name=name
        )
    return name


def check_stream_name(stream: str, argument: str = "stream") -> str:
    """Return ``stream`` if it reads ``scope/name``; else raise `InvalidArgumentError`, which calls it ``argument``."""
    parts = stream.split("/") if isinstance(stream, str) else []
    if len(parts) != 2:
        raise InvalidArgumentError(
            "the name of a stream must have the form 'scope/name', for example 'shop/orders'", **{argument: stream}
        )
    check_name(parts[0], "scope")
    check_name(parts[1], "stream")
    return stream


def segment_id(stream: str, number: int) -> SegmentId:
    return SegmentId(f"{stream}/{number}")


def data_prefix(stream: str, incarnation: str) -> str:
    """Return the prefix, in the store, of all segment names of this incarnation of the stream, and of no others."""
    return f"data/{stream}/{incarnation}/"


def data_segment(segment: SegmentId, incarnation: str) -> str:
    """Return the name, in the store, of the segment that holds the events."""
    stream, _, number = segment.rpartition("/")
    return f"{data_prefix(stream, incarnation)}{number}"


def staging_prefix(stream: str, incarnation: str, key: str | None = None, generation: int | None = None) -> str:
    """Return the name prefix of staged segments: of all, or of this key and generation. No data segment has it."""
    named = (each for each in (key, generation) if each is not None)
    return "".join((data_prefix(stream, incarnation), "staging/", *(f"{each}/" for each in named)))


def staged_segments(prefix: str, part: str, numbers: Iterable[int]) -> Iterator[str]:
    """Iterate over the names, in the store, of a part's staged segments, in order. A number may repeat."""
    seen: Counter[int] = Counter()
    for number in numbers:
        yield f"{prefix}{part}/{number}.{seen[number]}"
        seen[number] += 1


class StagedName(NamedTuple):
    """The parts of a staged segment's name after the prefix of its stream."""

    key: str
    generation: int
    part: str

    @classmethod
    def of(cls, segment: str) -> StagedName:
        key, generation, part, _ = segment.split("/")[-4:]
        return cls(key, int(generation), part)


def stream_of(segment: SegmentId) -> str:
    """Return the stream ``scope/name`` that the segment belongs to."""
    return parts_of(segment)[0]


def number_of(segment: SegmentId) -> int:
    """Return the segment's number in its stream."""
    return parts_of(segment)[1]


def parts_of(segment: str) -> tuple[str, int]:
    """Return the stream and the number of the segment. Segments are sorted by them."""
    stream, _, number = str(segment).rpartition("/")
    if not (number.isascii() and number.isdigit()) or str(int(number)) != number:
        raise InvalidArgumentError("the name of a segment must have the form 'scope/name/number'", segment=segment)
    return check_stream_name(stream), int(number)


class FrozenModel(BaseModel):
    """An immutable model that refuses unknown fields: a value in the state or the description of a stream."""

    model_config = ConfigDict(frozen=True, extra="forbid")


#: The most segments of a policy that scales by itself. Their history is rewritten with every measurement.
MAX_SCALED_SEGMENTS: Final = 1_000
_MAX_WINDOW_SECONDS: Final = 86_400.0
#: The windows of a rate, and the cooldown, as multiples of the shortest window.
WINDOWS: Final = (1.0, 2.5, 5.0, 10.0)
COOLDOWN: Final = 5.0

_Positive = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]


class LoadTarget(NamedTuple):
    """What a `ScalingPolicy` that scales by itself aims at."""

    unit: Literal["events", "bytes"]
    #: Per second and segment.
    target: float
    min_segments: int
    max_segments: int
    scale_factor: int
    window_seconds: float

    @property
    def windows(self) -> tuple[float, ...]:
        """The four windows of a rate, in seconds, the shortest first."""
        return tuple(each * self.window_seconds for each in WINDOWS)

    @property
    def cooldown_seconds(self) -> float:
        return COOLDOWN * self.window_seconds


class ScalingPolicy(Configuration):
    """How many segments a stream has.

    - `fixed`: as many as you say, until you scale the stream.
    - `by_event_rate`, `by_data_rate`: as many as the load needs, between two bounds.

    The last two measure the rate of each segment over 2, 5, 10 and 20 minutes. A segment is split when it takes more
    than five times the target over 2 minutes, twice the target over 5, or the target over 10. Two neighbours are merged
    when each takes less than the target over 2, 5 and 10 minutes and less than half of it over 20. The successors of a
    scale are left alone for 10 minutes.
    """

    kind: Literal["fixed", "event_rate", "data_rate"] = "fixed"
    #: How many segments the stream is created with. A policy that scales by itself keeps at least these.
    segments: int = Field(strict=True, ge=1, le=MAX_SEGMENTS)
    target: _Positive | None = None
    max_segments: Annotated[int, Field(strict=True, ge=1, le=MAX_SCALED_SEGMENTS)] | None = None
    scale_factor: Annotated[int, Field(strict=True, ge=2, le=MAX_SCALED_SEGMENTS)] | None = None
    window_seconds: Annotated[float, Field(strict=True, ge=1, le=_MAX_WINDOW_SECONDS)] | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        given = (self.target, self.max_segments, self.scale_factor, self.window_seconds)
        if self.kind == "fixed":
            if given != (None, None, None, None):
                raise ValueError("a fixed number of segments has no other values; use by_event_rate or by_data_rate")
        elif self.max_segments is None or None in given:
            raise ValueError("use ScalingPolicy.by_event_rate or by_data_rate, which set all values")
        elif self.segments > self.max_segments:
            raise ValueError(
                f"min_segments must not exceed max_segments: min_segments={self.segments} "
                f"max_segments={self.max_segments}"
            )
        return self

    @classmethod
    def fixed(cls, segments: int) -> Self:
        """Return the policy of a stream that has ``segments`` segments until you scale it."""
        check_count(segments, "segments", at_most=MAX_SEGMENTS)
        return cls(segments=segments)

    @classmethod
    def by_event_rate(
        cls,
        target: float,
        *,
        min_segments: int = 1,
        max_segments: int = 16,
        scale_factor: int = 2,
        window_seconds: float = 120.0,
    ) -> Self:
        """Return the policy of a stream whose segments take about ``target`` events per second each.

        Args:
            target: Events per second and segment, above 0.
            min_segments: The lower bound, and the segments of a new stream. Default: 1.
            max_segments: The upper bound, at most 1,000. Default: 16.
            scale_factor: Into how many parts one scale may split a segment, 2 or more. Default: 2.
            window_seconds: The shortest window, from 1 to 86,400. The other windows are 2.5, 5 and 10 times as long,
                and the cooldown is 5 times as long. Default: 120.

        Raises:
            InvalidArgumentError: A value is out of range.
        """
        return cls._automatic("event_rate", target, min_segments, max_segments, scale_factor, window_seconds)

    @classmethod
    def by_data_rate(
        cls,
        target: float,
        *,
        min_segments: int = 1,
        max_segments: int = 16,
        scale_factor: int = 2,
        window_seconds: float = 120.0,
    ) -> Self:
        """Return the policy of a stream whose segments take about ``target`` stored bytes per second each.

        Args:
            target: Bytes per second and segment, above 0.
            min_segments: As for `by_event_rate`, and so are all others.
            max_segments: The upper bound.
            scale_factor: Into how many parts one scale may split a segment.
            window_seconds: The shortest window.

        Raises:
            InvalidArgumentError: A value is out of range.
        """
        return cls._automatic("data_rate", target, min_segments, max_segments, scale_factor, window_seconds)

    @classmethod
    def _automatic(
        cls,
        kind: Literal["event_rate", "data_rate"],
        target: float,
        min_segments: int,
        max_segments: int,
        scale_factor: int,
        window_seconds: float,
    ) -> Self:
        check_count(min_segments, "min_segments", at_most=MAX_SCALED_SEGMENTS)
        check_count(max_segments, "max_segments", at_most=MAX_SCALED_SEGMENTS)
        check_count(scale_factor, "scale_factor", at_least=2, at_most=MAX_SCALED_SEGMENTS)
        check_duration(window_seconds, "window_seconds", above_zero=True, finite=True)
        check_type(target, Real, "target")
        return cls(
            kind=kind,
            segments=min_segments,
            target=target,
            max_segments=max_segments,
            scale_factor=scale_factor,
            window_seconds=window_seconds,
        )

    @property
    def load(self) -> LoadTarget | None:
        """The values of a policy that scales by itself; None for a fixed number of segments."""
        target, most, factor, window = self.target, self.max_segments, self.scale_factor, self.window_seconds
        if target is None or most is None or factor is None or window is None:
            return None
        unit: Literal["events", "bytes"] = "events" if self.kind == "event_rate" else "bytes"
        return LoadTarget(unit, target, self.segments, most, factor, window)


#: The longest age of a `RetentionPolicy`: a century. No limit is None.
_MAX_AGE: Final = timedelta(days=36_525)


def _age(value: object) -> timedelta:
    """Return an age that is given as a `timedelta`, or in seconds, as it is stored."""
    if isinstance(value, float) and math.isfinite(value):
        value = timedelta(seconds=min(value, 2 * _MAX_AGE.total_seconds()))
    if not isinstance(value, timedelta):
        raise ValueError("must be a timedelta")
    if not timedelta() < value <= _MAX_AGE:
        raise ValueError(f"must be above 0 and at most {_MAX_AGE.days} days")
    return value


_Age = Annotated[timedelta, BeforeValidator(_age), PlainSerializer(timedelta.total_seconds)]
_Bytes = Annotated[int, Field(strict=True, ge=1, le=2**62)]


class RetentionPolicy(Configuration):
    """How long a stream keeps its events. Without a policy it keeps them until you truncate it.

    - ``max_age`` and ``max_bytes`` are limits. Events beyond one of them are deleted, read or not.
    - With ``consumed_by="subscribers"``, events are deleted as soon as all subscribed groups have consumed them, except
      those that ``min_age`` or ``min_bytes`` keep.

    A group subscribes by its `ReaderGroupConfig.retention`. Without ``max_age`` and ``max_bytes``, no event is deleted
    that a subscribed group has not consumed.

    Args:
        max_age: Delete events that are older. Default: no limit.
        max_bytes: Delete the oldest events while the stream has more bytes. Default: no limit.
        min_age: Keep consumed events that are younger. Default: none.
        min_bytes: Keep this many bytes of consumed events, the newest. Default: none.
        consumed_by: "subscribers": delete what all subscribed groups have consumed. Default: keep it.

    Raises:
        InvalidArgumentError: A value is out of range, nothing is ever deleted, or values contradict each other.
    """

    max_age: _Age | None = None
    max_bytes: _Bytes | None = None
    min_age: _Age | None = None
    min_bytes: _Bytes | None = None
    consumed_by: Literal["subscribers"] | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.consumed_by is None:
            if self.min_age is not None or self.min_bytes is not None:
                raise ValueError('min_age and min_bytes keep consumed events: they need consumed_by="subscribers"')
            if self.max_age is None and self.max_bytes is None:
                raise ValueError("the policy deletes nothing: set max_age, max_bytes or consumed_by")
        if self.min_age is not None and self.max_age is not None and self.min_age > self.max_age:
            raise ValueError(f"min_age must not exceed max_age: min_age={self.min_age} max_age={self.max_age}")
        if self.min_bytes is not None and self.max_bytes is not None and self.min_bytes > self.max_bytes:
            raise ValueError(
                f"min_bytes must not exceed max_bytes: min_bytes={self.min_bytes} max_bytes={self.max_bytes}"
            )
        return self


MAX_TAGS: Final = 128
MAX_TAG_LENGTH: Final = 250


def _tags(tags: Mapping[str, str]) -> Mapping[str, str] | None:
    if len(tags) > MAX_TAGS:
        raise ValueError(f"at most {MAX_TAGS} tags are allowed")
    for text in (*tags, *tags.values()):
        if not 0 < len(text) <= MAX_TAG_LENGTH:
            raise ValueError(f"names and values of tags must have 1 to {MAX_TAG_LENGTH} characters")
    return Map(tags) if tags else None


class StreamConfig(Configuration):
    """The config that a stream was created with, or got by ``streams.configure``."""

    scaling: ScalingPolicy = ScalingPolicy(segments=1)
    retention: RetentionPolicy | None = None
    #: Names and values of your choice, by which ``streams.list`` finds the stream.
    tags: Annotated[Mapping[str, str], AfterValidator(_tags), PlainSerializer(dict)] | None = None

    @field_validator("scaling", mode="before")
    @classmethod
    def _refuse_number(cls, scaling: object) -> object:
        if isinstance(scaling, int):
            raise ValueError("must be a policy, such as ScalingPolicy.fixed(4)")
        return scaling


#: The name of a tag, which a stream has with any value, or tags that it has with these values.
Tag = str | Mapping[str, str]


def has_tag(config: StreamConfig, tag: Tag | None) -> bool:
    """Return whether a stream of this config has the tag; None: any stream."""
    if tag is None:
        return True
    tags = config.tags or {}
    return tag in tags if isinstance(tag, str) else all(tags.get(name) == value for name, value in tag.items())


class KeyRange(FrozenModel):
    """The part of the key range [0, 1) from ``low`` up to but without ``high``."""

    low: float
    high: float

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not 0.0 <= self.low < self.high <= 1.0:
            raise ValueError(f"a key range must satisfy 0 <= low < high <= 1: low={self.low} high={self.high}")
        return self

    def split(self, into: int = 2) -> tuple[KeyRange, ...]:
        """Return equal parts of it. Raise `InvalidArgumentError` if it is too narrow to split."""
        return self.split_at(*((self.low * (into - part) + self.high * part) / into for part in range(1, into)))

    def split_at(self, *places: float) -> tuple[KeyRange, ...]:
        """Return its parts between these places, which ascend. Raise `InvalidArgumentError` if a part is empty."""
        bounds = (self.low, *places, self.high)
        if any(low >= high for low, high in pairwise(bounds)):
            raise InvalidArgumentError("the key range is too narrow to be split", low=self.low, high=self.high)
        return tuple(KeyRange(low=low, high=high) for low, high in pairwise(bounds))

    def overlaps(self, other: KeyRange) -> bool:
        return self.low < other.high and other.low < self.high

    def __str__(self) -> str:
        return f"[{self.low:g}, {self.high:g})"


def even_ranges(count: int) -> tuple[KeyRange, ...]:
    """Return the key range, cut into ``count`` parts of equal size."""
    bounds = [index / count for index in range(count)] + [1.0]
    return tuple(KeyRange(low=low, high=high) for low, high in pairwise(bounds))


def by_number(found: Mapping[SegmentId, V]) -> list[tuple[SegmentId, V]]:
    """Return what was found for each segment, in the order of their streams and numbers: 96, 97, 960."""
    return sorted(found.items(), key=lambda item: parts_of(item[0]))


class StreamCut(Configuration):
    """A place in a stream: for each part of its key range one segment, and the offset of the next event there.

    A segment that is read to its end has its length as offset. Text form: ``model_dump_json()``. To compare two cuts,
    ask the stream (`StreamState.precedes`): only its metadata knows the successors of a segment.
    """

    stream: str
    offsets: Annotated[
        Mapping[SegmentId, Annotated[int, Field(ge=0)]],
        AfterValidator(Map),
        PlainSerializer(lambda offsets: dict(by_number(offsets))),
    ]
    #: Names this incarnation of the stream. A stream created again under the name has another one.
    incarnation: str | None = None

    @field_validator("stream")
    @classmethod
    def _check_stream(cls, stream: str) -> str:
        return check_stream_name(stream)

    @model_validator(mode="after")
    def _check_segments(self) -> Self:
        if not self.offsets:
            raise ValueError("a stream cut must name at least one segment, because it covers the whole key range")
        for segment in self.offsets:
            if stream_of(segment) != self.stream:
                raise ValueError(f"a cut of {self.stream} cannot contain a segment of another stream: {segment}")
        return self

    def __hash__(self) -> int:
        return hash((self.stream, self.incarnation, frozenset(self.offsets.items())))

    def __str__(self) -> str:
        inside = ", ".join(f"{number_of(segment)}:{offset}" for segment, offset in by_number(self.offsets))
        return f"{self.stream}[{inside}]"


class ScalingReport(FrozenModel):
    """The load of a stream that scales by itself, as it was measured last, and what that leads to."""

    #: What the rates count, per second.
    unit: Literal["events", "bytes"]
    windows_seconds: tuple[float, ...]
    #: The rates of each segment over these windows; None where the segment is not measured for long enough.
    rates: Mapping[SegmentId, tuple[float | None, ...]]
    #: When the rates were measured, in seconds since 1970; None before that.
    measured_at: float | None = None
    #: What is done next with ``segments``; None: nothing.
    action: Literal["split", "merge"] | None = None
    segments: tuple[SegmentId, ...] = ()
    #: Why, in words.
    reason: str


class StreamInfo(FrozenModel):
    """A description of a stream at one moment."""

    name: str
    incarnation: str
    config: StreamConfig
    #: Counts the scalings since the stream was created.
    epoch: int
    #: The segments that take events now (of a sealed stream: the last ones), in order of their key ranges.
    segments: Mapping[SegmentId, KeyRange]
    #: Where the remaining data starts, and where it ends.
    head: StreamCut
    tail: StreamCut
    sealed: bool
    #: The answer of ``streams.info`` has it, if the stream's policy scales by itself.
    scaling: ScalingReport | None = None
    #: The answer of ``streams.info`` has it, if writers have noted times: all events before it are stored, of the
    #: writers that counted.
    watermark: datetime | None = None

    def _repr_html_(self) -> str:
        return html_table(
            ("segment", "keys", "starts at", "ends at"),
            [
                (segment, keys, self.head.offsets.get(segment, 0), self.tail.offsets[segment])
                for segment, keys in self.segments.items()
            ],
        )
