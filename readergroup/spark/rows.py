"""Turns events into the rows of a read: unchanged, or decoded into the user's own columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import pyarrow
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from synchronizer import InvalidArgumentError

from ..batch.arrow import COLUMNS, DEFAULT_COLUMNS
from ..batch.arrow import schema as schema_of_columns
from ..errors import CorruptDataError
from ..streams.config import segment_id
from ..streams.serializers import JsonSerializer, MsgpackSerializer
from .options import ReadOptions

#: The Spark types of the columns of a stream.
SPARK_TYPES: Final[Mapping[str, str]] = {
    "event": "binary",
    "scope": "string",
    "stream": "string",
    "segment_id": "bigint",
    "offset": "bigint",
    "routing_key": "string",
    "written_at": "timestamp",
    "headers": "map<string,binary>",
}
_LOADS: Final[Mapping[str, Callable[[bytes], Any]]] = {
    "json": JsonSerializer().loads,
    "msgpack": MsgpackSerializer().loads,
}
#: The errors of events that cannot be decoded.
_ERRORS: Final = (ValueError, TypeError)


def default_schema(options: ReadOptions) -> str:
    """Return the schema of a read without a schema of the user's."""
    if options.serializer is not None:
        raise InvalidArgumentError(
            "a serializer needs the columns of the decoded events; declare them with .schema(...), for example "
            ".schema('id bigint, name string')",
            serializer=options.serializer,
        )
    return ", ".join(f"{name} {SPARK_TYPES[name]}" for name in options.columns or DEFAULT_COLUMNS)


def check_once(names: Sequence[str]) -> None:
    """Raise if two names of a schema mean one column of a stream, in which case does not count."""
    if len({name.lower() for name in names}) != len(names):
        raise InvalidArgumentError(
            "two columns have the same name, except for upper and lower case; rename or drop one", columns=[*names]
        )


class Rows:
    """Makes the rows of a read with this schema."""

    def __init__(self, schema: StructType, options: ReadOptions) -> None:
        self._schema = to_arrow_schema(schema, timezone="UTC")
        self._stream = options.stream
        self._loads = None if options.serializer is None else _LOADS[options.serializer]
        names = tuple(self._schema.names)
        if self._loads is None:
            self._taken = {name: name.lower() for name in names}
            if unknown := [name for name in names if name.lower() not in COLUMNS]:
                raise InvalidArgumentError(
                    "the stream has no such columns; with the option 'serializer', events are decoded into your "
                    "own columns",
                    columns=unknown,
                    known=list(COLUMNS),
                )
            if options.columns not in (None, tuple(self._taken.values())):
                raise InvalidArgumentError(
                    "the schema has other columns than the option 'columns'; remove one of the two"
                )
        else:
            self._taken = {name: name.lower() for name in names if name.lower() in (options.columns or ())}
        check_once([name for name in names if name in self._taken])
        self._check_types()
        decoded = [field for field in self._schema if field.name not in self._taken]
        self._is_cut_off = _finds_cut_off(pyarrow.struct(decoded))
        self._events = pyarrow.struct([field.with_type(_as_stored(field.type)) for field in decoded])
        #: The columns of the stream that `of` needs.
        self.columns = tuple(self._taken.values())
        if self._loads is not None:
            self.columns = tuple({*self.columns, "event", "segment_id", "offset"})

    def of(self, batch: pyarrow.RecordBatch) -> pyarrow.RecordBatch:
        """Return the rows of the events in ``batch``, which has `columns`."""
        if self._loads is None:
            return batch.rename_columns(self._schema.names)
        decoded = self._decoded(batch)
        arrays = [batch[self._taken[name]] if name in self._taken else decoded[name] for name in self._schema.names]
        return pyarrow.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _check_types(self) -> None:
        expected = schema_of_columns(tuple(self._taken.values())) if self._taken else pyarrow.schema([])
        for field in self._schema:
            if not field.nullable:
                raise InvalidArgumentError(
                    "remove 'NOT NULL' from the schema, because it is not checked", column=field.name
                )
            if field.name in self._taken and field.type != expected.field(self._taken[field.name]).type:
                raise InvalidArgumentError(
                    "the type of this column differs; use the given type",
                    column=field.name,
                    type=SPARK_TYPES[self._taken[field.name]],
                )

    def _decoded(self, batch: pyarrow.RecordBatch) -> Mapping[str, pyarrow.Array]:
        events = batch["event"].to_pylist()
        try:
            return self._columns_of(events)
        except _ERRORS:
            for index, event in enumerate(events):
                self._check(event, batch, index)
            raise

    def _check(self, event: bytes, batch: pyarrow.RecordBatch, index: int) -> None:
        try:
            self._columns_of([event])
        except _ERRORS as error:
            raise CorruptDataError(
                "the event does not match the schema; to handle such events, read the column 'event' and decode "
                "it with from_json or your own function",
                segment=segment_id(self._stream, batch["segment_id"][index].as_py()),
                offset=batch["offset"][index].as_py(),
                **self._misfit(event),
                error=str(error),
            ) from error

    def _misfit(self, event: bytes) -> Mapping[str, object]:
        """Return the first column that the event does not fit; nothing if the event has no columns at all."""
        assert self._loads is not None
        try:
            decoded = self._loads(event)
        except _ERRORS:
            return {}
        for field in self._events if isinstance(decoded, dict) else ():
            kind = self._schema.field(field.name).type
            try:
                pyarrow.array([decoded.get(field.name)], field.type).cast(kind)
            except _ERRORS:
                return {"column": field.name, "type": str(kind)}
        return {}

    def _columns_of(self, events: list[bytes]) -> Mapping[str, pyarrow.Array]:
        assert self._loads is not None
        decoded = list(map(self._loads, events))
        if any(map(self._is_cut_off, decoded)):
            raise ValueError("a number with a fraction is not an integer")
        values = pyarrow.array(decoded, self._events)
        return {
            field.name: column.cast(self._schema.field(field.name).type)
            for field, column in zip(self._events, values.flatten(), strict=True)
        }


def _as_stored(kind: pyarrow.DataType) -> pyarrow.DataType:
    """Return the type that a value of this type has in JSON, and here in msgpack too."""
    types = pyarrow.types
    is_text = types.is_timestamp(kind) or types.is_date(kind) or types.is_decimal(kind)
    return pyarrow.string() if is_text else kind


def _finds_cut_off(kind: pyarrow.DataType) -> Callable[[Any], bool]:
    """Return a check for fractions in place of integers in a value of this type: Arrow would drop the fraction."""
    types = pyarrow.types
    if types.is_integer(kind):
        return lambda value: isinstance(value, float) and not value.is_integer()
    if types.is_struct(kind):
        fields = {field.name: _finds_cut_off(field.type) for field in kind if _has_integers(field.type)}
        return lambda value: isinstance(value, dict) and any(finds(value.get(name)) for name, finds in fields.items())
    if types.is_list(kind):
        finds = _finds_cut_off(kind.value_type)
        return lambda value: isinstance(value, list) and any(map(finds, value))
    if types.is_map(kind):
        finds = _finds_cut_off(kind.item_type)
        return lambda value: isinstance(value, dict) and any(map(finds, value.values()))
    return lambda value: False


def _has_integers(kind: pyarrow.DataType) -> bool:
    inner = [kind.field(index).type for index in range(kind.num_fields)]
    return pyarrow.types.is_integer(kind) or any(map(_has_integers, inner))
