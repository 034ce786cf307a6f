"""The options of the source and the sink. Their names follow those of Spark's own sources."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict

from synchronizer import InvalidArgumentError, Revision

from ..streams.config import SegmentId, check_name, check_stream_name, segment_id
from ..streams.data.columns import COLUMNS
from .address import StoreAddress
from .given import named_options
from .offsets import Cuts, cuts_of

#: Where reading begins or ends.
ReadBound = Literal["earliest", "latest"] | Cuts | datetime

#: What becomes of events that do not fit the schema.
_MODES: Final = ("PERMISSIVE", "DROPMALFORMED", "FAILFAST")
_SECONDS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_MAX_LONG: Final = 2**63 - 1  # of Java, to which Spark passes limits
_UNITS: Final = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}


class ReadOptions(BaseModel):
    """The options of one read. Its text form hides the address, which may hold a password."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: StoreAddress
    #: The streams to read; empty if ``pattern`` selects them.
    streams: tuple[str, ...] = ()
    pattern: str | None = None
    starting: ReadBound | None = None
    ending: ReadBound | None = None
    max_bytes_per_partition: int = 128 * 1024 * 1024
    min_partitions: int | None = None
    max_bytes_per_trigger: int | None = None
    max_events_per_trigger: int | None = None
    min_bytes_per_trigger: int | None = None
    #: In seconds.
    max_trigger_delay: float = 15 * 60.0
    segments: frozenset[SegmentId] | None = None
    columns: tuple[str, ...] | None = None
    serializer: Literal["json", "msgpack"] | None = None
    mode: Literal["PERMISSIVE", "DROPMALFORMED", "FAILFAST"] | None = None
    corrupt_column: str | None = None
    fail_on_data_loss: bool = True
    reader_group: str | None = None

    @property
    def reads_several(self) -> bool:
        """Whether the read is of several streams, or of those that a pattern matches."""
        return len(self.streams) != 1

    def reads(self, stream: str) -> bool:
        """Whether the read is of this stream, among others. With a pattern, only streams with an end cut are read."""
        if self.pattern is None:
            return stream in self.streams
        is_ending = not isinstance(self.ending, Mapping) or stream in self.ending
        return is_ending and re.fullmatch(self.pattern, stream) is not None


class WriteOptions(BaseModel):
    """The options of one write. Its text form hides the address, which may hold a password."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: StoreAddress
    #: The stream of rows that name none.
    stream: str | None = None
    txn_id: str | None = None


class NotificationOptions(BaseModel):
    """The options of one read of a group's notifications. Its text form hides the address."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    url: StoreAddress
    group: str
    starting: Literal["earliest", "latest"] | Revision = "latest"
    fail_on_data_loss: bool = True


def read_options(given: Mapping[str, str], *, streaming: bool | None = None) -> ReadOptions:
    """Return the options ``given`` to a read, whose names may be in any case.

    ``streaming`` is None while the kind of read is unknown. Raise `InvalidArgumentError` for an option that is unknown,
    missing, invalid, or one of the other kind of read.
    """
    options = ReadOptions(**_fields(given, _READING, "reads", streaming=streaming))
    _check_streams(options)
    _check_together(options, streaming=streaming)
    if options.segments is not None:
        numbered = frozenset(segment_id(options.streams[0], int(number)) for number in options.segments)
        options = options.model_copy(update={"segments": numbered})
    return options


def write_options(given: Mapping[str, str], *, streaming: bool) -> WriteOptions:
    """Return the options ``given`` to a write; otherwise as `read_options`."""
    if streaming:
        given = {name: text for name, text in given.items() if name.lower() not in _OF_EVERY_QUERY}
    return WriteOptions(**_fields(given, _WRITING, "writes", streaming=streaming))


def notification_options(given: Mapping[str, str], *, streaming: bool | None = None) -> NotificationOptions:
    """Return the options ``given`` to a read of notifications; otherwise as `read_options`."""
    return NotificationOptions(**_fields(given, _NOTIFICATIONS, "reads", streaming=streaming))


def _fields(
    given: Mapping[str, str], known: Mapping[str, _Option], what: str, *, streaming: bool | None
) -> Mapping[str, Any]:
    fields: dict[str, Any] = {}
    for name, text in named_options(given, path="group" if "group" in known else "stream").items():
        option = known.get(name.lower())
        if option is None:
            raise _unknown(name, known)
        if streaming is not None and option.streaming is not None and option.streaming != streaming:
            kind = "streaming" if option.streaming else "batch"
            raise InvalidArgumentError(f"this option applies only to {kind} {what}; remove it", option=option.name)
        fields[option.field] = option.parse(option.name, text)
    for needed in known:
        if needed in _EXAMPLES and needed not in fields:
            raise InvalidArgumentError(f"the option '{needed}' is missing", example=_EXAMPLES[needed])
    return fields


def _check_streams(options: ReadOptions) -> None:
    if not options.streams and options.pattern is None:
        raise InvalidArgumentError("the option 'stream' is missing; 'streamPattern' is another", example="shop/orders")
    if options.streams and options.pattern is not None:
        raise InvalidArgumentError("give either stream or streamPattern")
    if options.reads_several:
        for name, value in (("segments", options.segments), ("readerGroup", options.reader_group)):
            if value is not None:
                raise InvalidArgumentError("this option is for one stream; remove it, or name one stream", option=name)


def _check_together(options: ReadOptions, *, streaming: bool | None) -> None:
    if streaming and options.ending == "latest":
        raise InvalidArgumentError(
            "a streaming query follows the stream; to stop at the present end, use Trigger.AvailableNow",
            option="endingOffsets",
        )
    for place in (options.starting, options.ending):
        for cut in place.values() if isinstance(place, Mapping) else ():
            if not options.reads(cut.stream):
                raise InvalidArgumentError(
                    "the cut belongs to another stream; use cuts of the streams that are read",
                    cut=str(cut),
                    stream=options.pattern or ",".join(options.streams),
                )
    if isinstance(options.ending, Mapping) and (missing := {*options.streams} - options.ending.keys()):
        raise InvalidArgumentError(
            "endingOffsets must have a cut of each stream that is read; add the missing ones", missing=sorted(missing)
        )
    if options.serializer is None and (options.mode is not None or options.corrupt_column is not None):
        raise InvalidArgumentError(
            "'mode' and 'columnNameOfCorruptRecord' apply to decoded events; add the option 'serializer' or remove them"
        )
    if options.max_bytes_per_trigger is not None and options.max_events_per_trigger is not None:
        raise InvalidArgumentError("give either maxBytesPerTrigger or maxEventsPerTrigger")
    if (least := options.min_bytes_per_trigger) is None:
        if "max_trigger_delay" in options.model_fields_set:
            raise InvalidArgumentError("'maxTriggerDelay' needs 'minBytesPerTrigger'; add it, or remove the delay")
    elif options.max_bytes_per_trigger is not None and least > options.max_bytes_per_trigger:
        raise InvalidArgumentError(
            "minBytesPerTrigger must not be above maxBytesPerTrigger",
            minBytesPerTrigger=least,
            maxBytesPerTrigger=options.max_bytes_per_trigger,
        )


def _unknown(name: str, known: Mapping[str, _Option]) -> InvalidArgumentError:
    facts: dict[str, object] = {"option": name}
    if near := difflib.get_close_matches(name.lower(), known, 1):
        facts["did_you_mean"] = known[near[0]].name
    return InvalidArgumentError(
        "the option is unknown; remove it or correct its name", **facts, known=[each.name for each in known.values()]
    )


# ---------------------------------------------------------------------- single options


def _url(name: str, text: str) -> StoreAddress:
    return StoreAddress.of(text)


def _stream(name: str, text: str) -> str:
    return check_stream_name(text)


def _streams(name: str, text: str) -> tuple[str, ...]:
    streams = tuple(check_stream_name(part.strip()) for part in text.split(","))
    if len({*streams}) != len(streams):
        raise InvalidArgumentError("name each stream once", option=name, value=text)
    return streams


def _pattern(name: str, text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise InvalidArgumentError(
            "the value must be a regular expression of Python, such as 'shop/orders-.*'", option=name, value=text
        ) from error
    return text


def _group(name: str, text: str) -> str:
    return check_name(text, "reader group")


def _starting_notification(name: str, text: str) -> str | Revision:
    if text.lower() in ("earliest", "latest"):
        return text.lower()
    try:
        return Revision.parse(text)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(
            "the value must be 'earliest', 'latest', or a revision of the group such as '120:0'",
            option=name,
            value=text,
        ) from error


def _ending(name: str, text: str) -> ReadBound:
    if text.lower() == "earliest":
        raise InvalidArgumentError("no events are before 'earliest'; name a later end", option=name)
    return _read_bound(name, text)


def _read_bound(name: str, text: str) -> ReadBound:
    match text.lower():
        case "earliest":
            return "earliest"
        case "latest":
            return "latest"
    if text.startswith("@"):
        return _time(name, text)
    try:
        return cuts_of(text)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(
            "the value must be 'earliest', 'latest', a cut as written by StreamCut.model_dump_json(), the offset of a "
            "query (the endOffset of its progress, and no latestOffset), or a time such as '@2026-01-01T00:00:00Z'",
            option=name,
            value=text,
        ) from error


def _time(name: str, text: str) -> datetime:
    try:
        time = datetime.fromisoformat(text[1:])
    except ValueError as error:
        raise InvalidArgumentError(
            "a time must have the form '@2026-01-01T00:00:00Z' or '@2026-01-01T09:30:00+02:00'", option=name, value=text
        ) from error
    if time.tzinfo is None:
        raise InvalidArgumentError("the time needs a timezone; end it with 'Z' or an offset", option=name, value=text)
    return time


def _bytes(name: str, text: str) -> int:
    found = re.fullmatch(r"([0-9]{1,18})\s*([kmgt]?)i?b?", text.strip().lower())
    size = int(found.group(1)) << _UNITS[found.group(2)] if found else 0
    if not 0 < size <= _MAX_LONG:
        raise InvalidArgumentError(
            "the value must be a number of bytes, such as '67108864' or '64m'", option=name, value=text
        )
    return size


def _duration(name: str, text: str) -> float:
    found = re.fullmatch(r"([0-9]{1,18})\s*(ms|s|m|h|d)", text.strip().lower())
    if found is None:
        raise InvalidArgumentError("the value must be a time, such as '500ms', '30s' or '15m'", option=name, value=text)
    return int(found.group(1)) * _SECONDS[found.group(2)]


def _count(name: str, text: str) -> int:
    if not (re.fullmatch("[0-9]{1,18}", text) and int(text)):
        raise InvalidArgumentError("the value must be an integer >= 1", option=name, value=text)
    return int(text)


def _list(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _segments(name: str, text: str) -> frozenset[str]:
    numbers = _list(text)
    if not numbers or not all(re.fullmatch("[0-9]{1,18}", number) for number in numbers):
        raise InvalidArgumentError("the value must be segment numbers, separated by commas", option=name, value=text)
    return frozenset(numbers)


def _columns(name: str, text: str) -> tuple[str, ...]:
    columns = [column.lower() for column in _list(text)]
    if not columns or len({*columns}) != len(columns) or not {*columns} <= {*COLUMNS}:
        raise InvalidArgumentError(
            "the value must be column names, each once, separated by commas",
            option=name,
            value=text,
            known=list(COLUMNS),
        )
    return tuple(columns)


def _serializer(name: str, text: str) -> str:
    if text.lower() not in ("json", "msgpack"):
        raise InvalidArgumentError("write 'json' or 'msgpack'", option=name, value=text)
    return text.lower()


def _mode(name: str, text: str) -> str:
    if text.upper() not in _MODES:
        raise InvalidArgumentError("the mode is unknown", option=name, value=text, known=list(_MODES))
    return text.upper()


def _name(name: str, text: str) -> str:
    if not text:
        raise InvalidArgumentError("the value must be the name of a column", option=name)
    return text


def _txn_id(name: str, text: str) -> str:
    return check_name(text, name)


def _flag(name: str, text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise InvalidArgumentError("write 'true' or 'false'", option=name, value=text)
    return text.lower() == "true"


class _Option:
    """One option: its name, its field, and whether only streaming queries have it, only batches, or (None) both."""

    def __init__(
        self, name: str, field: str, parse: Callable[[str, str], object], streaming: bool | None = None
    ) -> None:
        self.name = name
        self.field = field
        self.parse = parse
        self.streaming = streaming


def _by_name(*options: _Option) -> Mapping[str, _Option]:
    return {option.name.lower(): option for option in options}


_READING: Final = _by_name(
    _Option("url", "url", _url),
    _Option("stream", "streams", _streams),
    _Option("streamPattern", "pattern", _pattern),
    _Option("startingOffsets", "starting", _read_bound),
    _Option("endingOffsets", "ending", _ending),
    _Option("maxBytesPerPartition", "max_bytes_per_partition", _bytes),
    _Option("minPartitions", "min_partitions", _count),
    _Option("maxBytesPerTrigger", "max_bytes_per_trigger", _bytes, streaming=True),
    _Option("maxEventsPerTrigger", "max_events_per_trigger", _count, streaming=True),
    _Option("minBytesPerTrigger", "min_bytes_per_trigger", _bytes, streaming=True),
    _Option("maxTriggerDelay", "max_trigger_delay", _duration, streaming=True),
    _Option("segments", "segments", _segments, streaming=False),
    _Option("columns", "columns", _columns),
    _Option("serializer", "serializer", _serializer),
    _Option("mode", "mode", _mode),
    _Option("columnNameOfCorruptRecord", "corrupt_column", _name),
    _Option("failOnDataLoss", "fail_on_data_loss", _flag),
    _Option("readerGroup", "reader_group", _group, streaming=True),
)
_WRITING: Final = _by_name(
    _Option("url", "url", _url),
    _Option("stream", "stream", _stream),
    _Option("txnId", "txn_id", _txn_id, streaming=False),
)
_NOTIFICATIONS: Final = _by_name(
    _Option("url", "url", _url),
    _Option("group", "group", _group),
    _Option("startingOffsets", "starting", _starting_notification, streaming=True),
    _Option("failOnDataLoss", "fail_on_data_loss", _flag),
)
#: Spark's own options of a streaming query, which it passes to the sink too.
_OF_EVERY_QUERY: Final = frozenset({"checkpointlocation", "queryname"})
#: Examples of the required options.
_EXAMPLES: Final = {"url": "postgresql://spark@db/shop", "group": "billing"}
