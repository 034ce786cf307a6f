"""Turns events into the rows of a read: unchanged, or decoded into the user's own columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import pyarrow
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from synchronizer import InvalidArgumentError

from ..errors import CorruptDataError
from ..streams.data.columns import COLUMNS, DEFAULT_COLUMNS
from ..streams.data.columns import schema as schema_of_columns
from .decoding import EventDecoder, Misfit
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
    "event_time": "timestamp",
}
#: The event, and its address for errors.
_NEEDED_TO_DECODE: Final = ("event", "scope", "stream", "segment_id", "offset")
#: Where Spark's own sources put events that do not fit.
_CORRUPT_RECORD: Final = "_corrupt_record"


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
        if not schema.names:
            raise InvalidArgumentError("the schema has no column; declare at least one, such as 'offset bigint'")
        self._mode = options.mode or "FAILFAST"
        names = tuple(self._schema.names)
        self._taken = _taken(names, options)
        check_once([name for name in names if name in self._taken or names.count(name) > 1])
        self._corrupt = None
        self._decoder = None
        #: The columns of the stream that `of` needs.
        self.columns = tuple(self._taken.values())
        if options.serializer is not None:
            self._corrupt = self._corrupt_column(options)
            decoded = [each for each in self._schema if each.name not in self._taken and each.name != self._corrupt]
            self._decoder = EventDecoder(decoded, options.serializer)
            self.columns = tuple({*self.columns, *_NEEDED_TO_DECODE})
        self._check_types()

    def of(self, batch: pyarrow.RecordBatch) -> pyarrow.RecordBatch:
        """Return the rows of the events in ``batch``, which has `columns`."""
        if self._decoder is None:
            return batch.rename_columns(self._schema.names)
        columns, misfits = self._decoder.decode(batch["event"])
        if misfits and self._mode == "FAILFAST":
            raise self._corrupt_data(batch, misfits[0]) from misfits[0].error
        columns = {**columns, **{name: batch[column] for name, column in self._taken.items()}}
        if self._corrupt is not None:
            columns[self._corrupt] = self._corrupt_records(batch["event"], misfits)
        arrays = [columns[name] for name in self._schema.names]
        rows = pyarrow.RecordBatch.from_arrays(arrays, schema=self._schema)
        return _without(rows, misfits) if misfits and self._mode == "DROPMALFORMED" else rows

    def _corrupt_column(self, options: ReadOptions) -> str | None:
        """Return the column for events that do not fit, if the schema has it."""
        wanted = options.corrupt_column or _CORRUPT_RECORD
        found: list[str] = [name for name in self._schema.names if name.lower() == wanted.lower()]
        check_once(found)
        if not found and not options.corrupt_column:
            return None
        if not found or found[0] in self._taken:
            raise InvalidArgumentError(
                "the column for events that do not fit must be in the schema, and not in the option 'columns'",
                option="columnNameOfCorruptRecord",
                column=wanted,
            )
        (name,) = found
        kinds = [pyarrow.binary(), *([pyarrow.string()] if options.serializer == "json" else [])]
        if self._schema.field(name).type not in kinds:
            raise InvalidArgumentError(
                "the column for events that do not fit has another type; declare it as one of the given types",
                column=name,
                types=list(map(str, kinds)),
            )
        return name

    def _corrupt_records(self, events: pyarrow.BinaryArray, misfits: Sequence[Misfit]) -> pyarrow.Array:
        """Return the column for events that do not fit: null for those that do."""
        kind = self._schema.field(self._corrupt).type
        records: list[Any] = [None] * len(events)
        for each in misfits if self._mode == "PERMISSIVE" else ():
            event = events[each.row].as_py()
            records[each.row] = event.decode(errors="replace") if pyarrow.types.is_string(kind) else event
        return pyarrow.array(records, kind)

    def _corrupt_data(self, batch: pyarrow.RecordBatch, misfit: Misfit) -> CorruptDataError:
        column = {}
        if misfit.column is not None:
            column = {"column": misfit.column, "type": str(self._schema.field(misfit.column).type)}
        return CorruptDataError(
            "the event does not match the schema; set the option 'mode' to PERMISSIVE or DROPMALFORMED, or read the "
            "column 'event' and decode it with from_json or your own function",
            segment="/".join(str(batch[name][misfit.row]) for name in ("scope", "stream", "segment_id")),
            offset=batch["offset"][misfit.row].as_py(),
            **column,
            error=str(misfit.error),
        )

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


def _taken(names: Sequence[str], options: ReadOptions) -> Mapping[str, str]:
    """Return the columns of the stream that the schema names, each with its own name, which is in lower case."""
    if options.serializer is not None:
        return {name: name.lower() for name in names if name.lower() in (options.columns or ())}
    if unknown := [name for name in names if name.lower() not in COLUMNS]:
        raise InvalidArgumentError(
            "the stream has no such columns; with the option 'serializer', events are decoded into your own columns",
            columns=unknown,
            known=list(COLUMNS),
        )
    taken = {name: name.lower() for name in names}
    if options.columns not in (None, tuple(taken.values())):
        raise InvalidArgumentError("the schema has other columns than the option 'columns'; remove one of the two")
    return taken


def _without(rows: pyarrow.RecordBatch, misfits: Sequence[Misfit]) -> pyarrow.RecordBatch:
    wrong = {each.row for each in misfits}
    return rows.take(pyarrow.array([row for row in range(rows.num_rows) if row not in wrong], pyarrow.int64()))
