"""The classes that users derive from: `State`, which is a value, and `Update`, which is the only way to change it."""

from __future__ import annotations

import reprlib
from abc import abstractmethod
from collections.abc import Sequence
from inspect import formatannotation
from typing import Any, ClassVar, Final, Generic, Self, TypeVar

import msgpack
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import PydanticSerializationError, to_jsonable_python

from .arguments import check_class
from .callables import check_callable
from .comparing import is_equal
from .error_translation import raise_interrupt_in
from .errors import CorruptStateError, InvalidArgumentError, UnknownUpdateError, shown
from .log.entries import Revision
from .value_classes import check_class_of_values, check_unfinished, classes_of

#: Large enough for most packed updates. The buffer grows for the others.
_BUFFER_BYTES: Final = 512
_set: Final = object.__setattr__
#: Those that msgpack can write.
_LEAST_INTEGER: Final = -(2**63)
_GREATEST_INTEGER: Final = 2**64 - 1


class State(BaseModel):
    """A value that is the same in every process. Subclasses add fields.

    It is frozen: ``apply_to`` makes a new one with ``replace``. For collections use ``tuple``, ``frozenset`` and `Map`.
    A class with a list, dict or set raises `TypeError`, and so does one with a model or dataclass that is not frozen.
    Put numbers of the declared type into them: where a process reads the state from a snapshot, an int in a
    ``Map[str, float]`` is an equal float. A time keeps its offset to UTC, and not the name of its zone.

    Give the class a higher format number, as in ``class Counter(State, format=2)``, when its stored fields change their
    meaning: a release that knows only lower numbers neither reads nor compacts the state. A field whose value may be
    None must default to None, which is not written, also in nested models and dataclasses. The previous release then
    reads a state with a new field until the field is used.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=False)

    state_format: ClassVar[int] = 1

    def __init_subclass__(cls, *, format: int | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if format is not None:
            cls.state_format = format

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        check_class_of_values(cls, is_state=True)

    def replace(self, **changes: Any) -> Self:
        """Return this state with other values in the named fields. The size of the other fields costs no time.

        Raise `InvalidArgumentError` for a field that the state does not have.
        """
        cls = type(self)
        if not cls.__pydantic_fields__.keys() >= changes.keys():
            unknown = changes.keys() - cls.__pydantic_fields__.keys()
            raise InvalidArgumentError("the state has no such field", state=cls.__name__, fields=sorted(unknown))
        if cls.__pydantic_post_init__ or len(self.__dict__) != len(cls.__pydantic_fields__):
            # What is derived from the fields, such as a private attribute or a cached property, is derived again.
            values = {name: self.__dict__[name] for name in cls.__pydantic_fields__} | changes
            return cls.model_construct(_fields_set=self.__pydantic_fields_set__ | changes.keys(), **values)
        copied = self.__new__(cls)  # like `model_copy`, in less than half the time
        _set(copied, "__dict__", {**self.__dict__, **changes})
        _set(copied, "__pydantic_extra__", self.__pydantic_extra__)
        _set(copied, "__pydantic_fields_set__", self.__pydantic_fields_set__ | changes.keys())
        _set(copied, "__pydantic_private__", None)
        return copied


S = TypeVar("S", bound=State)


#: What to do instead of an ``apply_to`` that awaits.
AWAIT_FIRST: Final = "it must be pure; await before you make the update, and put the result into its fields"


class Update(BaseModel, Generic[S]):
    """One typed change of a state, as in ``class Add(Update[Counter], tag="add")``: fields and a pure ``apply_to``.

    The tag is the update's name in the log: never use it again for another update. A field whose value may be None must
    default to None, which is not written. So a field that is added later does not change updates stored without it.
    An update that would be read back with another value, as of a subclass of the declared class, is refused.

    ``may_exceed_limit=True`` lets the update pass in a state at its limit, although it makes the state larger: use it
    for an update without which nothing could be removed. However often it is repeated, it must add little.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    tag: ClassVar[str] = ""
    may_exceed_limit: ClassVar[bool] = False

    def __init_subclass__(cls, *, tag: str = "", may_exceed_limit: bool = False, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.tag = tag
        cls.may_exceed_limit = may_exceed_limit
        check_callable(cls.apply_to, "apply_to", advice=AWAIT_FIRST, update=cls.__name__)

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        check_class_of_values(cls, is_state=False)

    @abstractmethod
    def apply_to(self, state: S, revision: Revision) -> S:
        """Return the state after this update. It must be pure: the same arguments give the same result everywhere.

        An exception refuses the update: nothing is written, and the caller gets the exception.

        Args:
            state: The state before the update.
            revision: The revision of the state after it.
        """


class StateCodec(Generic[S]):
    """Encodes and decodes the bodies of entries, for one class of states and its classes of updates."""

    def __init__(self, state_type: type[S], updates: tuple[type[Update[S]], ...]) -> None:
        self.state_type = state_type
        self._classes: dict[str, type[Update[S]]] = {}
        for update in updates:
            check_class(update, Update, "each item of updates")
            if not update.tag:
                raise InvalidArgumentError(
                    f"{update.__name__} has no tag; declare it as class {update.__name__}(Update[...], tag='...')"
                )
            if self._classes.setdefault(update.tag, update) is not update:
                raise InvalidArgumentError(f"two updates have the tag {update.tag!r}; give each its own")
        check_unfinished([state_type, *updates])
        self._fields = {
            name: classes_of(field.annotation) for name, field in state_type.model_fields.items() if not field.exclude
        }
        self._checked: set[type[Update[S]]] = set()

    def encode_updates(self, updates: Sequence[Update[S]]) -> bytes:
        rows = []
        for update in updates:
            if self._classes.get(update.tag) is not type(update):
                raise InvalidArgumentError(
                    "the class of this update is not registered; pass it to the synchronizer in updates=[...]",
                    update=type(update).__name__,
                )
            rows.append([update.tag, _fields(update)])
        return _pack(["u", self.state_type.state_format, rows])

    def check_state(self, state: S) -> None:
        if type(state) is not self.state_type:
            raise InvalidArgumentError(
                "the class of the state is not the one that the synchronizer was opened with",
                state=type(state).__name__,
                expected=self.state_type.__name__,
            )

    def check_changes(self, before: S, after: S, updates: Sequence[Update[S]], *, is_small: bool) -> None:
        """Raise `InvalidArgumentError` if ``apply_to`` put a value into the state that a snapshot would not give back.

        Each time, it checks the fields that were changed: their classes, and the range of integers. So the cost does
        not grow with the state. The first time for each class of updates, in a small state, it looks at the whole
        values. The fields that were not changed refuse nothing.
        """
        old, new, classes = before.__dict__, after.__dict__, self._fields
        changed = [name for name in classes if new.get(name) is not old.get(name)]
        strange = [name for name in changed if not _is_of(new.get(name), classes[name])]
        if not strange and (not is_small or all(type(each) in self._checked for each in updates)):
            return
        for name in self._not_given_back(after, changed):
            raise InvalidArgumentError(
                "apply_to put a value into a field that would be read back as another one, or not at all; use a value "
                "of the declared type, and integers of at most 64 bits",
                update=type(updates[-1]).__name__,
                field=name,
                value=shown(new.get(name), reprlib.repr),
                declared=formatannotation(self.state_type.model_fields[name].annotation),
            )
        self._checked.update(map(type, updates))
        for name in strange:  # as those of `AwareDatetime`, a `Path` or what a validator makes
            if type(new[name]) not in classes[name]:
                classes[name] = (*classes[name], type(new[name]))

    def _not_given_back(self, state: S, fields: Sequence[str]) -> Sequence[str]:
        """Return those of the fields whose values a snapshot of the state would not give back."""
        try:
            read = self.decode_snapshot(self._snapshot(state, checksum=0))[0]
        except (InvalidArgumentError, PydanticSerializationError):
            return [name for name in fields if not _can_be_packed(state, name)]
        except (CorruptStateError, UnknownUpdateError) as error:
            found = error.__cause__
            assert isinstance(found, ValidationError)
            wrong = {part for each in found.errors() for part in each["loc"][:1]}
            return [name for name in fields if name in wrong]
        return [name for name in fields if not _is_same_in(name, read, state)]

    def encode_initial(self, state: S) -> bytes:
        self.check_state(state)
        return _pack(["i", self.state_type.state_format, _fields(state)])

    def encode_tombstone(self) -> bytes:
        return _pack(["d"])

    def encode_snapshot(self, state: S | None, checksum: int) -> bytes:
        """Return the body of a snapshot. Raise `InvalidArgumentError` for a state that is not equal when read back."""
        try:
            body = self._snapshot(state, checksum)
            read = self.decode_snapshot(body)[0]
        except (CorruptStateError, UnknownUpdateError, PydanticSerializationError) as error:
            raise self._not_reproducible() from error
        if not _is_same(read, state):
            raise self._not_reproducible()
        return body

    def _snapshot(self, state: S | None, checksum: int) -> bytes:
        return _pack(["s", self.state_type.state_format, checksum, None if state is None else _fields(state)])

    def _not_reproducible(self) -> InvalidArgumentError:
        return InvalidArgumentError(
            "the state does not survive encoding and decoding; check the types that apply_to puts in its fields",
            state=self.state_type.__name__,
        )

    def size(self, state: S) -> int:
        """Return how many bytes ``state`` takes when it is written."""
        return len(_pack(_fields(state)))

    def decode_snapshot(self, body: bytes) -> tuple[S | None, int]:
        kind, *rest = _unpack(body)
        if kind != "s":
            raise _written_by_a_newer_release(kind)
        state_format, checksum, fields = rest
        self._check_format(state_format)
        return (None if fields is None else _validate(self.state_type, fields)), checksum

    def read_back(self, body: bytes, content: Sequence[BaseModel]) -> S | None | list[Update[S]]:
        """Decode a body before it is written, as every process will.

        Raise `InvalidArgumentError` if that fails, or does not give the ``content`` of which the body was made.
        """
        try:
            read = self.decode_body(body)
        except (CorruptStateError, UnknownUpdateError) as error:
            raise InvalidArgumentError(
                "the entry does not survive encoding and decoding; check the types of its values", **error.facts
            ) from error
        if read is not None:
            objects: Sequence[BaseModel] = read if isinstance(read, list) else [read]
            try:
                for one, given in zip(objects, content, strict=True):
                    if one.__dict__ != given.__dict__:  # the objects are of one class
                        _check_fields(one, given)
            except RecursionError as error:
                raise InvalidArgumentError("a value is nested too deeply to be stored") from error
        return read

    def decode_body(self, body: bytes) -> S | None | list[Update[S]]:
        """Return the initial state, None for a deletion, or the updates."""
        kind, *rest = _unpack(body)
        if kind == "d":
            return None
        if kind not in ("u", "i"):
            raise _written_by_a_newer_release(kind)
        state_format, content = rest
        self._check_format(state_format)
        if kind == "i":
            return _validate(self.state_type, content)
        return [self._decode_update(tag, fields) for tag, fields in content]

    def _check_format(self, state_format: int) -> None:
        """Raise `UnknownUpdateError` for a later format: in it the same names mean something else."""
        if state_format > self.state_type.state_format:
            raise UnknownUpdateError(
                "a newer release wrote this state; deploy that release here",
                state=self.state_type.__name__,
                format=state_format,
                known_format=self.state_type.state_format,
            )

    def _decode_update(self, tag: str, fields: dict[str, Any]) -> Update[S]:
        update = self._classes.get(tag)
        if update is None:
            raise UnknownUpdateError("no class is registered for this update; deploy the release that has it", tag=tag)
        return _validate(update, fields, tag=tag)


def _is_of(value: object, classes: tuple[type, ...]) -> bool:
    """Whether the value is of one of the classes, of which there may be none, and no integer of more than 64 bits.

    True is no int here, and neither is an object of a subclass: it would be read back as an int.
    """
    if isinstance(value, int) and not _LEAST_INTEGER <= value <= _GREATEST_INTEGER:
        return False
    return type(value) in classes or not classes


def _can_be_packed(state: State, field: str) -> bool:
    try:
        _pack(_fields(state, {field}))
    except (InvalidArgumentError, PydanticSerializationError):
        return False
    return True


def _written_by_a_newer_release(kind: object) -> UnknownUpdateError:
    return UnknownUpdateError("a newer release wrote this entry; deploy that release here", kind=kind)


def _fields(model: BaseModel, include: set[str] | None = None) -> dict[str, Any]:
    # Like model_dump, whose handling of arguments takes three times as long. A value of another type than its field's
    # is refused when it is read back; pydantic would only warn.
    try:
        fields: dict[str, Any] = model.__pydantic_serializer__.to_python(
            model, include=include, exclude_none=True, exclude_computed_fields=True, warnings=False
        )
    except PydanticSerializationError as error:
        raise_interrupt_in(error)
        raise
    except (TypeError, ValueError) as error:  # of a set of models, which become dicts, or a value within itself
        raise InvalidArgumentError(f"a value cannot be stored in a state or update: {error}") from error
    return fields


def _check_fields(read: BaseModel, given: BaseModel) -> None:
    """Raise `InvalidArgumentError` if a field was read back with another value."""
    for name, field in type(read).model_fields.items():
        if not field.exclude and not is_equal(getattr(read, name), getattr(given, name), exact=False):
            raise InvalidArgumentError(
                "the field would be read back with another value; declare it with the class of its value, without an"
                " alias, and let what may be None default to None",
                type=type(read).__name__,
                field=name,
                given=reprlib.repr(getattr(given, name)),
                read_back=reprlib.repr(getattr(read, name)),
            )


def _is_same(read: State | None, written: State | None) -> bool:
    """Return whether the states are equal, in fields of the same types."""
    if read is None or written is None:
        return read is written
    return is_equal(read, written) and all(_is_same_in(name, read, written) for name in type(read).model_fields)


def _is_same_in(field: str, read: State | None, written: State) -> bool:
    """Return whether the field has equal values of one type: 1 is not True here, and a dict is no `Map`."""
    one, other = getattr(read, field), getattr(written, field, None)
    return type(one) is type(other) and is_equal(one, other)


M = TypeVar("M", bound=BaseModel)

_UNKNOWN_FIELD: Final = ("extra_forbidden", "unexpected_keyword_argument")  # of a model, of a dataclass


def _validate(model: type[M], fields: dict[str, Any], **facts: object) -> M:
    try:
        # Like model_validate, whose handling of arguments takes twice as long. A model within it must not ignore a
        # field either that a newer release has written.
        value: M = model.__pydantic_validator__.validate_python(fields, extra="forbid")
        return value
    except ValidationError as error:
        facts["type"] = model.__name__
        unknown = [".".join(map(str, e["loc"])) for e in error.errors() if e["type"] in _UNKNOWN_FIELD]
        if unknown:
            raise UnknownUpdateError(
                "a newer release wrote these fields; deploy that release here", **facts, fields=unknown
            ) from error
        raise CorruptStateError(
            "a stored value does not match its class; check whether the type of a field was changed", **facts
        ) from error


def _pack(value: Any) -> bytes:
    try:
        # Like packb, whose buffer of a megabyte takes longer to allocate than most values take to pack.
        return bytes(msgpack.Packer(default=_packable, buf_size=_BUFFER_BYTES).pack(value))
    except (TypeError, ValueError, OverflowError) as error:
        if isinstance(error, InvalidArgumentError):
            raise
        raise InvalidArgumentError(f"a value cannot be stored in a state or update: {error}") from error


def _unpack(body: bytes) -> Any:
    # Tuples, not lists: they can be keys, and a state must hold nothing that can be changed in place.
    return msgpack.unpackb(body, strict_map_key=False, use_list=False)


def _packable(value: Any) -> Any:
    """Convert a value that msgpack does not know but pydantic reads back."""
    if isinstance(value, frozenset | set):
        try:
            return sorted(value)
        except TypeError:  # they cannot be compared
            return sorted(value, key=_pack)
    if isinstance(value, int):
        raise InvalidArgumentError("an integer in a state or update has at most 64 bits", bits=value.bit_length())
    try:
        return to_jsonable_python(value)  # a time, a decimal number, a UUID, a path, a member of an enumeration
    except PydanticSerializationError as error:
        raise_interrupt_in(error)
        raise InvalidArgumentError(
            "values of this type cannot be stored in a state or update; use one that msgpack or pydantic can write",
            type=type(value).__name__,
        ) from error
