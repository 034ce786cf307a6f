"""Serializers: from an application's values to the bytes of events, and back."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final, Generic, Protocol, TypeVar

import msgpack
from pydantic import BaseModel
from pydantic_core import to_json

from synchronizer import InvalidArgumentError
from synchronizer.arguments import check_items, type_name
from synchronizer.callables import check_callable, check_returned

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)


class Serializer(Protocol[T]):
    """Turns values into bytes and back; it types a writer or reader. ``loads(dumps(value))`` equals ``value``."""

    def dumps(self, value: T, /) -> bytes: ...

    def loads(self, data: bytes, /) -> T: ...


def check_serializer(serializer: Serializer[T]) -> Serializer[T]:
    """Return ``serializer``; refuse a class, and one with missing or ``async`` methods."""
    if isinstance(serializer, type) or not all(hasattr(serializer, name) for name in ("dumps", "loads")):
        raise InvalidArgumentError(
            "serializer must be an object with dumps and loads; pass an instance, such as JsonSerializer() or "
            "PydanticSerializer(Model)",
            found=type_name(serializer),
        )
    for name in ("dumps", "loads"):
        check_callable(getattr(serializer, name), f"{name} of a serializer", serializer=type(serializer).__name__)
    return serializer


def serializer_or_bytes(serializer: Serializer[Any] | None) -> Serializer[Any]:
    """Return ``serializer``, or a `BytesSerializer` for None."""
    return BytesSerializer() if serializer is None else serializer


def checked_dumps(serializer: Serializer[T]) -> Callable[[T], bytes]:
    """Return ``dumps``, wrapped in a check that it returns bytes unless the serializer is one of this module."""
    check_serializer(serializer)
    if type(serializer) in _RETURN_BYTES:
        return serializer.dumps

    def dumps(value: T) -> bytes:
        data = serializer.dumps(value)
        if type(data) is not bytes:
            check_returned(data, "dumps of a serializer", serializer=type(serializer).__name__)
            raise InvalidArgumentError(
                "dumps of a serializer must return bytes",
                serializer=type(serializer).__name__,
                found=type(data).__name__,
            )
        return data

    return dumps


class BytesSerializer:
    """For events that are bytes already."""

    def dumps(self, value: bytes, /) -> bytes:
        if type(value) is not bytes:
            raise InvalidArgumentError(
                "this writer takes only bytes; give it a serializer for other values", type=type(value).__name__
            )
        return value

    def loads(self, data: bytes, /) -> bytes:
        return data


class JsonSerializer:
    """For events in JSON, as UTF-8: all values that ``json`` takes, in its compact form.

    Refuses NaN and the infinities, which are no JSON: readers in other languages could not read the event.
    """

    def dumps(self, value: Any, /) -> bytes:
        try:
            text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidArgumentError(
                f"the value cannot be written as JSON: {error}", type=type(value).__name__
            ) from error
        return text.encode("utf-8", "surrogatepass")

    def loads(self, data: bytes, /) -> Any:
        return json.loads(data.decode("utf-8", "surrogatepass"))


class MsgpackSerializer:
    """For events in msgpack."""

    def dumps(self, value: Any, /) -> bytes:
        try:
            return bytes(msgpack.packb(value, unicode_errors="surrogatepass"))
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidArgumentError(
                f"the value cannot be written as msgpack: {error}", type=type(value).__name__
            ) from error

    def loads(self, data: bytes, /) -> Any:
        return msgpack.unpackb(data, strict_map_key=False, unicode_errors="surrogatepass")


class PydanticSerializer(Generic[M]):
    """For events that are models of one class, as JSON. Other JSON raises pydantic's ``ValidationError`` when read.

    A value of another class is refused. A value of a subclass is written with its own fields, and read as the model.
    NaN and the infinities are refused, because pydantic writes them as null, unless the ``ser_json_inf_nan`` of the
    model's config is ``"strings"`` or ``"constants"``.
    """

    def __init__(self, model: type[M]) -> None:
        if not isinstance(model, type) or not issubclass(model, BaseModel):
            raise InvalidArgumentError("PydanticSerializer needs a model class", found=repr(model))
        self.model = model

    def dumps(self, value: M, /) -> bytes:
        if not isinstance(value, self.model):
            raise InvalidArgumentError(
                "the value is not an instance of the model class of this serializer, so readers could not decode it",
                takes=self.model.__name__,
                type=type(value).__name__,
            )
        text = value.model_dump_json()
        # Most values have no null, or none but fields that are None: for these, two quick looks are enough.
        if "null" in text and b"null" in to_json(value, exclude_none=True, serialize_unknown=True):
            _check_nulls(value, text)
        return text.encode()

    def loads(self, data: bytes, /) -> M:
        return self.model.model_validate_json(data)


def _check_nulls(value: BaseModel, text: str) -> None:
    if _has_null_for_number(value.model_dump(), json.loads(text)):
        raise InvalidArgumentError(
            "the value has a number that is NaN or infinite, which would be written as null; use None, or set "
            "ser_json_inf_nan in the config of the model that has the number",
            type=type(value).__name__,
        )


def _has_null_for_number(value: object, written: object) -> bool:
    """Return whether ``written``, the JSON of ``value``, has null where the value has NaN or an infinity."""
    if written is None:
        return isinstance(value, float) and not math.isfinite(value)
    if isinstance(value, Mapping) and isinstance(written, dict):
        return any(map(_has_null_for_number, value.values(), written.values()))
    if isinstance(value, Collection) and isinstance(written, list):
        return any(map(_has_null_for_number, value, written))
    return False


_RETURN_BYTES: Final = (BytesSerializer, JsonSerializer, MsgpackSerializer, PydanticSerializer)


def keeps_bytes(serializer: Serializer[Any]) -> bool:
    """Return whether events are stored as the bytes that they are."""
    return type(serializer) is BytesSerializer


def check_takes_bytes(serializer: Serializer[Any]) -> None:
    """Refuse a serializer where columns are written as they are."""
    if not keeps_bytes(serializer):
        raise InvalidArgumentError(
            "a column is written as its bytes, without a serializer; open the writer without one, and encode the "
            "column before",
            serializer=type(serializer).__name__,
        )


def checked_lists(
    events: Iterable[T],
    routing_keys: Iterable[str | None] | None,
    serializer: Serializer[T],
    dumps: Callable[[T], bytes],
) -> tuple[Sequence[bytes], Sequence[str | None] | None]:
    """Return the bytes of the events, and their routing keys. ``dumps`` is that of the serializer, checked."""
    check_items(events, Iterable, "events")
    check_items(routing_keys, Iterable, "routing_keys", or_none=True)
    if isinstance(routing_keys, set | frozenset):
        raise InvalidArgumentError("routing_keys must be in the order of the events, and a set has none; pass a list")
    values: Sequence[Any] = list(events)  # copied: the caller may change it while the call waits
    keys = None if routing_keys is None else list(routing_keys)
    if not keeps_bytes(serializer) or set(map(type, values)) - {bytes}:
        values = [dumps(each) for each in values]  # `map` would end at a StopIteration of the serializer
    return values, keys
