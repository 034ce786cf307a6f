"""Decodes events into the columns of a schema, and finds those that do not fit it.

msgspec decodes JSON, only the fields of the schema. For an event that msgspec refuses, the serializer decides: it takes
NaN, for example, and 1.0 as an integer. Where both take an event, its columns are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Final, NamedTuple, TypedDict, cast

import msgspec
import pyarrow
from pyarrow import types

from ..streams.serializers import JsonSerializer, MsgpackSerializer

_LOADS: Final[Mapping[str, Callable[[bytes], Any]]] = {
    "json": JsonSerializer().loads,
    "msgpack": MsgpackSerializer().loads,
}
#: The errors of events that cannot be decoded, or whose fields have other types than the columns.
_ERRORS: Final = (ValueError, TypeError, OverflowError, RecursionError)

#: The fields of an event.
Fields = Mapping[str, Any]


class Misfit(NamedTuple):
    """An event that does not fit the schema."""

    row: int
    #: The first column that it does not fit; None if the event has no columns at all.
    column: str | None
    error: Exception


class Decoded(NamedTuple):
    """The columns of some events, null where an event does not fit, and these events in their order."""

    columns: Mapping[str, pyarrow.Array]
    misfits: Sequence[Misfit]


class EventDecoder:
    """Decodes events into columns with these names and types."""

    def __init__(self, columns: Sequence[pyarrow.Field], serializer: str) -> None:
        self._columns = tuple(columns)
        self._serializer = serializer

    def decode(self, events: pyarrow.BinaryArray) -> Decoded:
        """Return the columns of the events, of which none is null."""
        misfits: dict[int, Misfit] = {}
        decoded, is_typed = self._fields_of(events, misfits)
        columns = {}
        for each in self._columns:
            values = [fields.get(each.name) for fields in decoded]
            columns[each.name] = _Column(each, is_typed=is_typed).array(values, misfits)
        return Decoded(columns, [misfits[row] for row in sorted(misfits)])

    def _fields_of(self, events: pyarrow.BinaryArray, misfits: dict[int, Misfit]) -> tuple[list[Fields], bool]:
        """Return the fields of each event, and whether integers and maps are known to be such."""
        is_typed = self._serializer == "json" and _is_text(events)
        loads = _typed_json_loads(self._columns) if is_typed else self._loads
        decoded: list[Fields] = []
        for row, event in enumerate(events.to_pylist()):
            try:
                fields = loads(event)
            except _ERRORS:
                is_typed = False
                fields = self._loads_or_misfit(row, event, misfits)
            decoded.append(fields or {})
        return decoded, is_typed

    def _loads(self, event: bytes) -> Fields | None:
        fields = _LOADS[self._serializer](event)
        if fields is None or isinstance(fields, dict):
            return fields
        raise TypeError(f"a value of type {type(fields).__name__} has no fields")

    def _loads_or_misfit(self, row: int, event: bytes, misfits: dict[int, Misfit]) -> Fields | None:
        try:
            return self._loads(event)
        except _ERRORS as error:
            misfits[row] = Misfit(row, None, error)
            return None


class _Column:
    """Makes one column from the values of a field."""

    def __init__(self, column: pyarrow.Field, *, is_typed: bool) -> None:
        self._name = column.name
        self._kind = column.type
        self._stored = _as_stored(column.type)
        self._is_trap = None if is_typed or not _has_traps(column.type) else _finds_trap(column.type)

    def array(self, values: Sequence[Any], misfits: dict[int, Misfit]) -> pyarrow.Array:
        """Return the column, null where a value has another type, and add the events of these values to ``misfits``."""
        parts = list(self._parts(values, 0, misfits))
        return parts[0] if len(parts) == 1 else pyarrow.concat_arrays(parts)

    def _parts(self, values: Sequence[Any], start: int, misfits: dict[int, Misfit]) -> Iterator[pyarrow.Array]:
        """Divide the values until each part has one type."""
        array = self._array_or_error(values)
        if isinstance(array, pyarrow.Array):
            yield array
        elif len(values) == 1:
            misfits.setdefault(start, Misfit(start, self._name, array))
            yield pyarrow.nulls(1, self._kind)
        else:
            middle = len(values) // 2
            yield from self._parts(values[:middle], start, misfits)
            yield from self._parts(values[middle:], start + middle, misfits)

    def _array_or_error(self, values: Sequence[Any]) -> pyarrow.Array | Exception:
        try:
            if self._is_trap is not None and any(map(self._is_trap, values)):
                raise ValueError("the value has another type: text is no array, and true no number")
            return self._exact_or_rounded(values).cast(self._kind)
        except _ERRORS as error:
            return error

    def _exact_or_rounded(self, values: Sequence[Any]) -> pyarrow.Array:
        try:
            return pyarrow.array(values, self._stored)
        except pyarrow.ArrowInvalid:  # as for an integer that is no floating-point number exactly
            if not _has_floats(self._kind):
                raise
            return pyarrow.array([_rounded(value, self._kind) for value in values], self._stored)


def _is_text(events: pyarrow.BinaryArray) -> bool:
    """Return whether all events are UTF-8, which msgspec does not check in fields that it skips."""
    try:
        events.cast(pyarrow.string())
    except pyarrow.ArrowInvalid:
        return False
    return True


@cache
def _typed_json_loads(columns: tuple[pyarrow.Field, ...]) -> Callable[[bytes], Fields | None]:
    """Return a function that decodes these fields, and raises where a field for integers has something else."""
    return msgspec.json.Decoder(_python_type(pyarrow.struct(columns))).decode


def _python_type(kind: pyarrow.DataType) -> Any:
    if types.is_integer(kind):
        return int | None
    if types.is_floating(kind):
        return float | None
    if types.is_struct(kind):
        return cast(Any, TypedDict)("Fields", {each.name: _python_type(each.type) for each in kind}, total=False) | None
    if types.is_list(kind):
        return list[_python_type(kind.value_type)] | None  # type: ignore[misc]
    if types.is_map(kind):
        return dict[str, _python_type(kind.item_type)] | None  # type: ignore[misc]
    return Any


def _as_stored(kind: pyarrow.DataType) -> pyarrow.DataType:
    """Return the type that a value of this type has in JSON, and here in msgpack too."""
    if types.is_timestamp(kind) or types.is_date(kind) or types.is_decimal(kind):
        return pyarrow.string()
    if types.is_struct(kind):
        return pyarrow.struct([each.with_type(_as_stored(each.type)) for each in kind])
    if types.is_list(kind):
        return pyarrow.list_(kind.value_field.with_type(_as_stored(kind.value_type)))
    if types.is_map(kind):
        return pyarrow.map_(_as_stored(kind.key_type), kind.item_field.with_type(_as_stored(kind.item_type)))
    return kind


def _has_floats(kind: pyarrow.DataType) -> bool:
    return bool(types.is_floating(kind) or any(_has_floats(kind.field(index).type) for index in range(kind.num_fields)))


def _rounded(value: Any, kind: pyarrow.DataType) -> Any:
    """Return the value with floating-point numbers for the integers in their place."""
    if types.is_floating(kind) and isinstance(value, int):
        return float(value)
    if value is None or not types.is_nested(kind):
        return value
    if types.is_struct(kind):
        return {each.name: _rounded(value.get(each.name), each.type) for each in kind}
    if types.is_list(kind):
        return [_rounded(each, kind.value_type) for each in value]
    return {key: _rounded(each, kind.item_type) for key, each in value.items()}


def _finds_trap(kind: pyarrow.DataType) -> Callable[[Any], bool]:
    """Return a check for what must not reach Arrow in a value of this type.

    Arrow drops the fraction of a number in place of an integer, takes text as an array of its characters, an empty one
    as a struct or map, and true as 1.0. A list with null in place of a map ends the process.
    """
    if types.is_integer(kind):
        return lambda value: isinstance(value, float) and not value.is_integer()
    if types.is_floating(kind):
        return lambda value: isinstance(value, bool)
    if types.is_struct(kind):
        fields = {each.name: _finds_trap(each.type) for each in kind if _has_traps(each.type)}
        return _other_than(dict, lambda value: any(finds(value.get(name)) for name, finds in fields.items()))
    if types.is_list(kind):
        finds = _finds_trap(kind.value_type)
        return _other_than(list, lambda value: any(map(finds, value)))
    if types.is_map(kind):
        finds = _finds_trap(kind.item_type)
        return _other_than(dict, lambda value: any(map(finds, value.values())))
    return lambda value: False


def _other_than(container: type, has_trap: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Return a check that finds values other than this container or null, and traps in such a container."""
    return lambda value: value is not None and (not isinstance(value, container) or has_trap(value))


def _has_traps(kind: pyarrow.DataType) -> bool:
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_nested(kind))
