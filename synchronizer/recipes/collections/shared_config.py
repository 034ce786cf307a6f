"""`SharedConfig`: a pydantic model whose fields all processes can set, and which is always valid."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final, Generic, Literal, TypeVar, Unpack

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from synchronizer.arguments import check_class, check_type
from synchronizer.errors import InvalidArgumentError
from synchronizer.log.entries import Revision
from synchronizer.log.replica import AppliedUpdate
from synchronizer.state import Update
from synchronizer.store import ANY, AnyValue, SegmentStore

from .shared import Shared, SynchronizerOptions, ValueChange
from .shared_map import MAP_UPDATES, ClearMap, Decided, MapState, PutEntry, RemoveEntry, SharedMap
from .values import ValueCodec, reason

M = TypeVar("M", bound=BaseModel)

_NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})
#: The revision for trying out an update; no update of a map depends on it.
_NOWHERE: Final = Revision(0, 0)


class SharedConfig(Shared[MapState], Generic[M]):
    """A shared configuration: a pydantic model in which fields that were never put have their defaults.

    ``value`` is the copy in this process; `refresh` brings it up to date. A change is decided on the newest state, and
    refused with `InvalidArgumentError` if the model would be invalid with it. Stored fields that the model does not
    have are left alone, so releases with different fields can share a configuration.

    Args:
        store: Holds the configuration.
        name: The same in all processes that share it.
        model: A pydantic model with a default for every field, and at most one alias for each.
        **options: See `SynchronizerOptions`.

    Raises:
        InvalidArgumentError: A field of the model has no default, or several aliases.
    """

    kind = "config"

    def __init__(self, store: SegmentStore, name: str, model: type[M], **options: Unpack[SynchronizerOptions]) -> None:
        check_class(model, BaseModel, "model")
        required = [field for field, info in model.model_fields.items() if info.is_required()]
        if required:
            raise InvalidArgumentError(
                "every field of a shared configuration needs a default, which applies until a value is put",
                model=model.__name__,
                fields=required,
            )
        self._model = model
        self._inputs = {field: _input_name(field, info) for field, info in model.model_fields.items()}
        self._fields: dict[str, ValueCodec[Any]] = {
            field: ValueCodec(info.rebuild_annotation(), f"{field} of the model")
            for field, info in model.model_fields.items()
        }
        super().__init__(store, name, MapState(), MAP_UPDATES, options)

    @property
    def value(self) -> M:
        """The configuration as this process knows it. To change it, put fields: this is a copy."""
        return self._read(self.synchronizer.state)

    # ------------------------------------------------------------------ changes

    def put(self, field: str, value: Any, *, timeout: float | None = None) -> None:
        """Set a field, whatever it is now."""
        put = self._put(field, value)
        self.synchronizer.update_state(lambda state: self._valid(state, [put]), timeout=timeout)

    def update(self, fields: Mapping[str, Any] = _NOTHING, /, **more: Any) -> None:
        """Set all these fields in one step: no process sees some of them without the others."""
        check_type(fields, Mapping, "fields")
        puts = [self._put(field, value) for field, value in {**fields, **more}.items()]
        self.synchronizer.update_state(lambda state: self._valid(state, puts))

    def put_if_absent(self, field: str, value: Any, *, timeout: float | None = None) -> bool:
        """Set a field that has not been put; return whether this call set it."""
        put = self._put(field, value)
        return self._change_if(lambda state: field not in state.entries, put, timeout)

    def replace(self, field: str, new: Any, expected: Any, *, timeout: float | None = None) -> bool:
        """Set a field if its value, put or default, is ``expected``; return whether this call set it."""
        put = self._put(field, new)
        wanted = self._codec(field).checked(expected, field=field)
        return self._change_if(lambda state: self._value_of(field, state) == wanted, put, timeout)

    def remove(self, field: str, expected: Any | Literal[AnyValue.ANY] = ANY, *, timeout: float | None = None) -> bool:
        """Reset a field that was put to its default if its value is ``expected``; return whether this call did so."""
        codec = self._codec(field)
        wanted = expected if expected is ANY else codec.checked(expected, field=field)

        def is_there(state: MapState) -> bool:
            return field in state.entries and (wanted is ANY or self._value_of(field, state) == wanted)

        return self._change_if(is_there, RemoveEntry(key=field), timeout)

    def clear(self, *, timeout: float | None = None) -> None:
        """Reset all fields to their defaults in one step."""
        self.synchronizer.update_state(lambda state: [ClearMap()] if state.entries else [], timeout=timeout)

    # ------------------------------------------------------------------ listening

    def watch(self) -> Iterator[M]:
        """Yield the configuration now, then the newest one after each change, until it is closed."""
        return map(self._read, self.synchronizer.watch())

    def register_listener(
        self, listener: Callable[[ValueChange[M]], object], *, field: str | None = None
    ) -> Callable[[], None]:
        """Call ``listener`` with every change after the present copy; return a function that ends it.

        With ``field``, only when that field changes.
        """
        if field is not None:
            self._codec(field)

        def tell(
            told: Callable[[ValueChange[M]], object], before: M, after: M, applied: AppliedUpdate[MapState]
        ) -> None:
            if before != after if field is None else getattr(before, field) != getattr(after, field):
                told(ValueChange(before, after, applied.revision))

        return self._on_update(listener, self._read, tell)

    # ------------------------------------------------------------------ steps

    def _change_if(
        self, condition: Callable[[MapState], bool], change: Update[MapState], timeout: float | None
    ) -> bool:
        def decide(state: MapState) -> Decided[bool]:
            return (self._valid(state, [change]), True) if condition(state) else ([], False)

        return self.synchronizer.update_state_returning(decide, timeout=timeout)

    def _valid(self, state: MapState, changes: Iterable[Update[MapState]]) -> Iterable[Update[MapState]]:
        """Return ``changes`` if the model is valid with them; raise `InvalidArgumentError` otherwise."""
        for change in changes:
            state = change.apply_to(state, _NOWHERE)
        self._read(state)
        return changes

    def _put(self, field: str, value: Any) -> PutEntry:
        return PutEntry(key=field, value=self._codec(field).encode(value, field=field))

    def _codec(self, field: str) -> ValueCodec[Any]:
        codec = self._fields.get(field) if isinstance(field, str) else None
        if codec is None:
            raise InvalidArgumentError("the model has no such field", model=self._model.__name__, field=field)
        return codec

    def _value_of(self, field: str, state: MapState) -> Any:
        return getattr(self._read(state), field)

    def _read(self, state: MapState) -> M:
        values = {
            self._inputs[field]: codec.decode(state.entries[field], field=field)
            for field, codec in self._fields.items()
            if field in state.entries
        }
        try:
            return self._model.model_validate(values)
        except ValidationError as error:
            raise InvalidArgumentError(
                f"the configuration is invalid: {reason(error)}", model=self._model.__name__, name=self.name
            ) from error


def _input_name(field: str, info: FieldInfo) -> str:
    """Return the name of the field in the input of the model: its alias, if it has one."""
    if info.validation_alias is None or isinstance(info.validation_alias, str):
        return info.validation_alias or field
    raise InvalidArgumentError("a field of a shared configuration must have at most one alias", field=field)


class ConfigEntries(SharedMap[object]):
    """The entries of a `SharedConfig`, for programs without its model. New values are not validated."""

    kind = SharedConfig.kind

    def __init__(self, store: SegmentStore, name: str, **options: Unpack[SynchronizerOptions]) -> None:
        super().__init__(store, name, object, **options)
