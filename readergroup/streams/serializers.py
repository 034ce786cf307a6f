"""How an application's values become the bytes of events, and back."""

from __future__ import annotations

import json
from typing import Any, Generic, Protocol, TypeVar

import msgpack
from pydantic import BaseModel

from synchronizer import InvalidArgumentError

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)


class Serializer(Protocol[T]):
    """What types a writer or reader. ``loads(dumps(value))`` equals ``value``."""

    def dumps(self, value: T, /) -> bytes: ...

    def loads(self, data: bytes, /) -> T: ...


class BytesSerializer:
    """Events are bytes already."""

    def dumps(self, value: bytes, /) -> bytes:
        if type(value) is not bytes:
            raise InvalidArgumentError(
                "this writer takes bytes; give it a serializer for other values", type=type(value).__name__
            )
        return value

    def loads(self, data: bytes, /) -> bytes:
        return data


class JsonSerializer:
    """Events are JSON in UTF-8: what ``json`` takes, in its compact form."""

    def dumps(self, value: Any, /) -> bytes:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")

    def loads(self, data: bytes, /) -> Any:
        return json.loads(data.decode("utf-8", "surrogatepass"))


class MsgpackSerializer:
    """Events are msgpack."""

    def dumps(self, value: Any, /) -> bytes:
        return bytes(msgpack.packb(value, unicode_errors="surrogatepass"))

    def loads(self, data: bytes, /) -> Any:
        return msgpack.unpackb(data, strict_map_key=False, unicode_errors="surrogatepass")


class PydanticSerializer(Generic[M]):
    """Events are models of one class, as JSON. An event that does not fit it raises pydantic's ``ValidationError``."""

    def __init__(self, model: type[M]) -> None:
        self.model = model

    def dumps(self, value: M, /) -> bytes:
        return value.model_dump_json().encode()

    def loads(self, data: bytes, /) -> M:
        return self.model.model_validate_json(data)
