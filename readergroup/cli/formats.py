"""The formats of exported events: JSON lines, msgpack, Parquet."""

from __future__ import annotations

import base64
import binascii
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from enum import StrEnum
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgpack

import readergroup as rg
from synchronizer.extras import install_hint

from ..streams.data.block import MAX_EVENT_BYTES, Headers
from ..streams.data.moments import microseconds_of, time_of
from .records import ImportedRecord, Records, Sink
from .screen import json_text
from .session import Failed, WrongUsage


class Format(StrEnum):
    JSONL = "jsonl"
    MSGPACK = "msgpack"
    PARQUET = "parquet"


def format_of(file: Path | None, named: Format | None) -> Format:
    """Return the named format, or that of the file's name, or JSON lines."""
    if named is not None:
        return named
    suffix = "" if file is None else file.suffix.removeprefix(".")
    if suffix in {"", *Format}:
        return Format(suffix or Format.JSONL)
    raise WrongUsage(f"the format of {file} is unknown; use --format {'|'.join(Format)}")


@contextmanager
def sink(file: BinaryIO, chosen: Format) -> Iterator[Sink]:
    """Provide a sink of events to ``file``, which is complete when the block ends."""
    if chosen is Format.JSONL:
        yield JsonLines(file)
    elif chosen is Format.MSGPACK:
        yield Msgpack(file)
    else:
        with _parquet().writing(file) as opened:
            yield opened


@contextmanager
def records(file: BinaryIO, chosen: Format, max_event_bytes: int = MAX_EVENT_BYTES) -> Iterator[Records]:
    """Provide the events of ``file``, none of them larger."""
    if chosen is Format.JSONL:
        yield JsonLineRecords(file, max_event_bytes)
    elif chosen is Format.MSGPACK:
        yield MsgpackRecords(file, max_event_bytes)
    elif file.seekable():
        yield _parquet().ParquetRecords(file)
    else:
        with tempfile.TemporaryFile() as whole:  # the end of a Parquet file says where its rows are
            shutil.copyfileobj(file, whole)
            yield _parquet().ParquetRecords(whole)


def _parquet() -> Any:
    try:
        from . import parquet
    except ImportError as error:
        raise Failed(f"Parquet needs pyarrow; {install_hint('arrow')}") from error
    return parquet


# ---------------------------------------------------------------------- JSON lines

#: How many bytes one of an event takes at most, as text or in base64.
_LONGEST_FORM: Final = 8
#: Events of JSON with more levels of lists and objects are exported as text: readers of JSON have limits.
_MOST_LEVELS: Final = 100
#: ``readergroup read --json`` prints the same fields, so its output can be imported.
_FIELDS: Final = frozenset({"data", "data_base64", "routing_key", "headers_base64", "event_time"})
_IGNORED: Final = frozenset({"written_at", "pointer", "segment", "offset", "fencing_token"})


class JsonLines:
    """A JSON object per event: ``data`` holds text, an object or an array; ``data_base64`` holds other bytes."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write(self, batch: rg.EventBatch[bytes]) -> None:
        columns = zip(batch.raw, batch.routing_keys, batch.headers, batch.written_at, batch.event_times, strict=True)
        self._file.writelines(_line(*each) for each in columns)


def _line(data: bytes, routing_key: str | None, headers: Headers, written_at: int, event_time: int | None) -> bytes:
    line = _data_field(data)
    if routing_key is not None:
        line["routing_key"] = routing_key
    if headers:
        line["headers_base64"] = {name: base64.b64encode(value).decode() for name, value in headers.items()}
    line["written_at"] = datetime.fromtimestamp(written_at / 1_000_000, UTC).isoformat()
    if event_time is not None:
        line["event_time"] = time_of(event_time).isoformat()
    # Half of a surrogate pair is not valid text, but has an escape.
    return json_text(line).encode(errors="backslashreplace") + b"\n"


def _data_field(data: bytes) -> dict[str, Any]:
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return {"data_base64": base64.b64encode(data).decode()}
    if text[:1] in ("{", "["):
        try:
            value = json.loads(text)
            # Otherwise the import would produce other bytes, or none.
            if not _is_deep(text, value) and _compact(value) == data:
                return {"data": value}
        except (ValueError, RecursionError):
            pass
    return {"data": text}


def _is_deep(text: str, value: object) -> bool:
    """Return whether the value is nested so deeply that another program may not read it."""
    if text.count("[") + text.count("{") <= _MOST_LEVELS:
        return False
    level = [value]
    for _ in range(_MOST_LEVELS):
        containers = (
            each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list)
        )
        level = [*chain.from_iterable(containers)]
    return bool(level)


def _compact(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


class JsonLineRecords:
    unit = "line"

    def __init__(self, file: BinaryIO, max_event_bytes: int) -> None:
        self.position = 0
        self._file = file
        self._most_bytes = _LONGEST_FORM * max_event_bytes

    def __iter__(self) -> Iterator[ImportedRecord]:
        while line := self._file.readline(self._most_bytes):
            self.position += len(line)
            yield _of_line(line)


def _of_line(line: bytes) -> ImportedRecord:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError("this is not JSON") from error
    if not isinstance(found, dict):
        raise ValueError("a line must be a JSON object with the field data or data_base64")
    if unknown := found.keys() - _FIELDS - _IGNORED:
        raise ValueError(f"the field {min(unknown)!r} is unknown")
    if ("data" in found) == ("data_base64" in found):
        raise ValueError("a line must have either data or data_base64")
    headers = _json_headers(found.get("headers_base64"))
    return ImportedRecord(_json_data(found), _routing_key(found), headers, _json_time(found.get("event_time")))


def _json_data(found: Mapping[str, Any]) -> bytes:
    if "data_base64" in found:
        return _from_base64(found["data_base64"], "data_base64")
    data = found["data"]
    if data is None:
        raise ValueError("data is null; write an empty event as an empty string")
    try:
        return data.encode() if isinstance(data, str) else _compact(data)
    except RecursionError as error:
        raise ValueError("data is nested too deeply; write it as a string") from error


def _json_headers(found: object) -> Headers | None:
    if found is None:
        return None
    if not isinstance(found, dict):
        raise ValueError("headers_base64 must map names to base64 strings")
    return {name: _from_base64(value, f"the header {name!r}") for name, value in found.items()}


def _json_time(found: object) -> datetime | None:
    if found is None:
        return None
    try:
        time = datetime.fromisoformat(found)  # type: ignore[arg-type]
        microseconds_of(time, "event_time")
    except (TypeError, ValueError) as error:
        raise ValueError("event_time must be a time with a timezone, such as 2026-01-01T00:00:00+00:00") from error
    return time


def _from_base64(value: object, what: str) -> bytes:
    try:
        return base64.b64decode(value, validate=True)  # type: ignore[arg-type]
    except (binascii.Error, TypeError, ValueError) as error:
        raise ValueError(f"{what} is not valid base64") from error


def _routing_key(found: Mapping[str, Any]) -> str | None:
    key = found.get("routing_key")
    if not isinstance(key, str | None):
        raise ValueError("routing_key must be a string or null")
    return key


# ---------------------------------------------------------------------- msgpack


class Msgpack:
    """A map per event: ``data``, ``written_at``, and if present ``routing_key``, ``headers`` and ``event_time``.

    Times are in microseconds.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._pack = msgpack.Packer(unicode_errors="surrogatepass").pack

    def write(self, batch: rg.EventBatch[bytes]) -> None:
        for data, key, headers, written_at, event_time in zip(
            batch.raw, batch.routing_keys, batch.headers, batch.written_at, batch.event_times, strict=True
        ):
            record: dict[str, object] = {"data": data, "written_at": written_at}
            if key is not None:
                record["routing_key"] = key
            if headers:
                record["headers"] = headers
            if event_time is not None:
                record["event_time"] = event_time
            self._file.write(self._pack(record))


class MsgpackRecords:
    unit = "record"

    def __init__(self, file: BinaryIO, max_event_bytes: int) -> None:
        self.position = 0
        self._read = 0
        self._file = file
        self._most_bytes = min(_LONGEST_FORM * max_event_bytes, 2**31 - 1)  # more, msgpack does not take

    def read(self, size: int = -1) -> bytes:
        """Read for the unpacker, and count the bytes: it reads ahead of the events that it returns."""
        data = self._file.read(size)
        self._read += len(data)
        return data

    def __iter__(self) -> Iterator[ImportedRecord]:
        unpacker = msgpack.Unpacker(self, unicode_errors="surrogatepass", max_buffer_size=self._most_bytes)
        while True:
            try:
                found = next(unpacker, None)
            except (ValueError, msgpack.UnpackException) as error:
                raise ValueError("this is not msgpack") from error
            if found is None:
                break
            self.position = unpacker.tell()
            yield _of_map(found)
        if self.position < self._read:
            raise ValueError("the file ends inside this record")


def _of_map(found: object) -> ImportedRecord:
    if not isinstance(found, dict) or not isinstance(found.get("data"), bytes):
        raise ValueError("a record must be a map with the bytes of the event in data")
    if unknown := found.keys() - {"data", "routing_key", "headers", "written_at", "event_time"}:
        raise ValueError(f"the field {min(map(str, unknown))!r} is unknown")
    headers = found.get("headers")
    if not isinstance(headers, dict | None):
        raise ValueError("headers must map strings to bytes")
    return ImportedRecord(found["data"], _routing_key(found), headers, _packed_time(found.get("event_time")))


def _packed_time(found: object) -> datetime | None:
    if found is None:
        return None
    if type(found) is not int:
        raise ValueError("event_time must be an integer, in microseconds since 1970")
    try:
        return time_of(found)
    except OverflowError as error:
        raise ValueError("event_time must be in the years 1 to 9999") from error
