"""What users write: a `State`, which is a value, and its `Update` classes, which are the only way to change it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Generic, Self, TypeVar

import msgpack
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo

from .errors import CorruptStateError, InvalidArgumentError, UnknownUpdateError
from .revisioned import Revision


class State(BaseModel):
    """A value that every process holds alike. Subclasses add fields, all of them with defaults that need no I/O.

    Frozen: ``apply_to`` makes a new one with ``replace``. For collections use ``tuple``, ``frozenset`` and `Map`.
    ``class Counter(State, format=2)`` numbers the format of a state whose stored fields changed their meaning: a
    release that knows only smaller numbers neither reads nor compacts it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=False)

    state_format: ClassVar[int] = 1

    def __init_subclass__(cls, *, format: int = 1, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.state_format = format

    def replace(self, **changes: Any) -> Self:
        """This state with other values in the named fields. The cost does not depend on the size of the others."""
        unknown = changes.keys() - type(self).model_fields.keys()
        if unknown:
            raise InvalidArgumentError(
                "the state has no such field", state=type(self).__name__, fields=sorted(unknown)
            )
        return self.model_copy(update=changes)


S = TypeVar("S", bound=State)


class Update(BaseModel, Generic[S]):
    """One step of a state: ``class Add(Update[Counter], tag="add")`` with fields and a pure ``apply_to``.

    The tag is the update's name on the wire: never used again for something else. A field whose value may be None
    defaults to None, which is not written; so a field that is added later does not change what is stored without it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    tag: ClassVar[str] = ""

    def __init_subclass__(cls, *, tag: str = "", **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.tag = tag

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        for name, field in cls.model_fields.items():
            if _may_be_none(field) and (field.is_required() or field.get_default() is not None):
                raise TypeError(f"{cls.__name__}.{name} may be None, so its default has to be None")

    @abstractmethod
    def apply_to(self, state: S, revision: Revision) -> S:
        """The state after this update. Pure: the same arguments give the same result in every process, for ever.

        Raising refuses the update before anything is written, and the error reaches the caller.
        """


def _may_be_none(field: FieldInfo) -> bool:
    return type(None) in getattr(field.annotation, "__args__", ())


class StateCodec(Generic[S]):
    """Bodies of entries to and from bytes, for one class of states and its classes of updates."""

    def __init__(self, state_type: type[S], updates: tuple[type[Update[S]], ...]) -> None:
        self.state_type = state_type
        self._classes: dict[str, type[Update[S]]] = {}
        for update in updates:
            if not update.tag:
                raise TypeError(f'{update.__name__} has no tag: class {update.__name__}(Update[...], tag="...")')
            if self._classes.setdefault(update.tag, update) is not update:
                raise TypeError(f"two updates have the tag {update.tag!r}")

    def encode_updates(self, updates: Sequence[Update[S]]) -> bytes:
        rows = []
        for update in updates:
            if self._classes.get(update.tag) is not type(update):
                raise InvalidArgumentError(
                    "this class is not among the updates that the synchronizer was opened with",
                    update=type(update).__name__,
                )
            rows.append([update.tag, update.model_dump(exclude_none=True)])
        return _pack(["u", rows])

    def encode_initial(self, state: S) -> bytes:
        return _pack(["i", self.state_type.state_format, state.model_dump()])

    def encode_tombstone(self) -> bytes:
        return _pack(["d"])

    def encode_snapshot(self, state: S | None, checksum: int) -> bytes:
        """Refuses, with `InvalidArgumentError`, a state that would not come back equal."""
        fields = None if state is None else state.model_dump()
        body = _pack(["s", self.state_type.state_format, checksum, fields])
        if self.decode_snapshot(body)[0] != state:
            raise InvalidArgumentError(
                "the state does not survive being written and read; check the types that apply_to puts in its fields",
                state=self.state_type.__name__,
            )
        return body

    def size(self, state: S) -> int:
        """The bytes that ``state`` takes when it is written."""
        return len(_pack(state.model_dump()))

    def decode_snapshot(self, body: bytes) -> tuple[S | None, int]:
        kind, state_format, checksum, fields = _unpack(body)
        assert kind == "s", kind
        return (None if fields is None else self._decode_state(state_format, fields)), checksum

    def decode_body(self, body: bytes) -> S | None | list[Update[S]]:
        """The state that begins here, None where the state was deleted, or updates."""
        kind, *rest = _unpack(body)
        if kind == "u":
            return [self._decode_update(tag, fields) for tag, fields in rest[0]]
        if kind == "i":
            return self._decode_state(*rest)
        if kind == "d":
            return None
        raise UnknownUpdateError("a newer release wrote this entry; deploy that release here", kind=kind)

    def _decode_state(self, state_format: int, fields: dict[str, Any]) -> S:
        if state_format > self.state_type.state_format:
            raise UnknownUpdateError(
                "a newer release wrote this state; deploy that release here",
                state=self.state_type.__name__,
                format=state_format,
                known_format=self.state_type.state_format,
            )
        return _validate(self.state_type, fields)

    def _decode_update(self, tag: str, fields: dict[str, Any]) -> Update[S]:
        update = self._classes.get(tag)
        if update is None:
            raise UnknownUpdateError("no class is registered for this update; deploy the release that has it", tag=tag)
        return _validate(update, fields)


M = TypeVar("M", bound=BaseModel)


def _validate(model: type[M], fields: dict[str, Any]) -> M:
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        unknown = [".".join(map(str, e["loc"])) for e in error.errors() if e["type"] == "extra_forbidden"]
        if unknown:
            raise UnknownUpdateError(
                "a newer release wrote these fields; deploy that release here", type=model.__name__, fields=unknown
            ) from error
        raise CorruptStateError(
            "a stored value does not fit its class; was the type of a field changed?", type=model.__name__
        ) from error


def _pack(value: Any) -> bytes:
    return bytes(msgpack.packb(value, default=_packable))


def _unpack(body: bytes) -> Any:
    return msgpack.unpackb(body, strict_map_key=False)


def _packable(value: Any) -> Any:
    """What msgpack does not know but pydantic reads back."""
    if isinstance(value, frozenset | set):
        return sorted(value)
    raise InvalidArgumentError(
        "values of this type cannot be stored in a state or update; use one that msgpack has", type=type(value).__name__
    )
