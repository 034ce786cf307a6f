"""Encodes values of a shared collection as bytes and decodes them. Each value is checked against the type.

The state holds bytes, and only the process that opened the collection knows the type. With values of user types in the
state, a replica that cannot read one value could not apply the update as the others do, and would stop for every key.
Here it gets the error when it reads that key. Releases with different models can share a map, and the command line
reads a configuration without its model. Each read decodes: about 1 µs for a number, 4 µs for a configuration of three
fields.

Conditions compare values, so a dict in another order matches. Items of a set are keys of the state, which compares
bytes. So a set inside a value is written in sorted order.
"""

from __future__ import annotations

from typing import Annotated, Any, Generic, TypeVar, get_args, get_origin

import msgpack
from pydantic import TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError, to_jsonable_python

from synchronizer.comparing import is_equal
from synchronizer.error_translation import raise_interrupt_in
from synchronizer.errors import InvalidArgumentError

V = TypeVar("V")


class ValueCodec(Generic[V]):
    """Encodes and decodes values of one type.

    The type may be ``str``, ``int``, ``float``, ``bool``, ``bytes``, None, lists and dicts of these, a pydantic model,
    and any type that pydantic serializes as one of these, such as ``datetime``.

    The stored form holds the value without its type, so a type may grow: a model with a new field that has a default
    reads values that were written without it.
    """

    def __init__(self, value_type: Any, name: str = "value_type") -> None:
        """Errors call the type ``name``."""
        if value_type is None or isinstance(value_type, str):  # pydantic accepts these as types
            raise InvalidArgumentError(f"{name} must be a type, such as int", found=repr(value_type))
        bare = get_args(value_type)[0] if get_origin(value_type) is Annotated else value_type
        self._name = bare.__name__ if isinstance(bare, type) else str(bare)
        try:
            self._adapter: TypeAdapter[V] = TypeAdapter(value_type)
        except Exception as error:  # pydantic raises many kinds here, and runs code of the type
            raise InvalidArgumentError(
                f"{name} is not a type whose values can be shared: {error}", type=self._name
            ) from error

    def encode(self, value: V, **facts: object) -> bytes:
        """Return bytes that decode to an equal value. An error shows ``facts``, which say where the value belongs."""
        try:
            checked = self._adapter.validate_python(value, strict=True, extra="forbid")
        except ValidationError as error:
            facts["expected"] = self._name
            if (found := type(value).__name__) != self._name:
                facts["found"] = found
            raise InvalidArgumentError(f"the value does not match its type: {reason(error)}", **facts) from error
        try:
            data = bytes(
                msgpack.packb(self._adapter.dump_python(checked, by_alias=True, warnings=False), default=_plain)
            )
            if is_equal(self._read(data), checked, nan=False):
                return data
        except (TypeError, ValueError, OverflowError, RecursionError, PydanticSerializationError) as error:
            raise_interrupt_in(error)
            why = reason(error) if isinstance(error, ValidationError) else error
            raise InvalidArgumentError(
                f"the value cannot be stored: {why}", **facts, found=type(value).__name__
            ) from error
        raise InvalidArgumentError(
            "the value changes when it is stored and read back; use lists instead of tuples and no NaN, or "
            "declare the exact type",
            **facts,
            found=type(value).__name__,
        )

    def checked(self, value: V, **facts: object) -> V:
        """Return ``value`` as it would be decoded, to compare it with a stored value."""
        return self.decode(self.encode(value, **facts))

    def decode(self, data: bytes, **facts: object) -> V:
        try:
            return self._read(data)
        except ValidationError as error:
            raise InvalidArgumentError(
                "the stored value does not match this type; put or remove it, or open it with the type that it "
                f"was written with: {reason(error)}",
                **facts,
                expected=self._name,
            ) from error

    def _read(self, data: bytes) -> V:
        return self._adapter.validate_python(msgpack.unpackb(data, strict_map_key=False))


def reason(error: ValidationError) -> str:
    """Return the text of the first validation error, without the value, which may be a secret."""
    first = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(map(str, first["loc"]))
    return f"{place}: {first['msg']}" if place else first["msg"]


def _plain(value: Any) -> Any:
    """Convert a value that msgpack does not know to one that pydantic reads back. Equal sets get equal bytes."""
    if isinstance(value, set | frozenset):
        return sorted(value, key=lambda item: bytes(msgpack.packb(item, default=_plain)))
    return to_jsonable_python(value)
