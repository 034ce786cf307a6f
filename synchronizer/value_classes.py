"""Checks the classes of states and updates when they are defined, with the models and dataclasses within them.

Their values must come back from the log as they were, and those of a state must not change in place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableSequence, Sequence, Set
from dataclasses import fields, is_dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin, get_type_hints
from weakref import WeakKeyDictionary

from pydantic import AfterValidator, BaseModel, PlainValidator, RootModel, WrapValidator
from pydantic.fields import FieldInfo

from .map import Map

#: The classes with types that were not defined yet, and whether they are of states.
_unfinished: Final = WeakKeyDictionary[type[BaseModel], bool]()
#: Of an abstract mapping or set, too, pydantic makes a dict or a set.
_CHANGEABLE: Final = (MutableSequence, Mapping, Set)

#: The types that most fields have.
PLAIN: Final = (str, int, float, bool, bytes)

#: The name and the type of a field, and whether it is read back as None if it is not written.
_Field = tuple[str, Any, bool]


def check_class_of_values(checked: type[BaseModel], *, is_state: bool) -> None:
    """Raise `TypeError` for a class of a state or an update, or one within it, whose values would not come back.

    If types in it are not defined yet, `check_unfinished` has to follow.
    """
    _unfinished.pop(checked, None)
    for record, found in _with_nested(checked, is_state):
        if is_state and not _is_frozen(record):
            raise TypeError(
                f"{record.__name__} is part of a state, so it must be frozen: class {record.__name__}(BaseModel,"
                " frozen=True), or a dataclass with frozen=True"
            )
        for name, annotation, is_none_by_default in found:
            if not is_none_by_default and _may_be_none(annotation):
                raise TypeError(
                    f"{record.__name__}.{name} allows None, which is not written, so its default must be None"
                )
            if is_state and any(map(_is_changeable, _types_in(annotation, converted=False))):
                raise TypeError(f"{record.__name__}.{name} is mutable; use tuple, frozenset or Map")
            if any(map(_is_looked_up_by_records, _types_in(annotation))):
                raise TypeError(
                    f"{record.__name__}.{name} holds models or dataclasses as keys or in a set, which are written as"
                    " dicts; use a tuple, a named tuple, or a Map from a key to them"
                )


def check_unfinished(classes: Iterable[type[BaseModel]]) -> None:
    """Check those of the classes again that had types which were not defined yet. Call it when they are used."""
    for each in classes:
        if (is_state := _unfinished.get(each)) is not None:
            check_class_of_values(each, is_state=is_state)


def classes_of(annotation: Any) -> tuple[type, ...]:
    """Return the classes of which a value of this type is, or () if that is not known."""
    meant = _meant(annotation)
    origin = get_origin(meant)
    if origin is Annotated:
        return classes_of(get_args(meant)[0])
    if origin in (Union, UnionType):
        found = [classes_of(each) for each in get_args(meant)]
        return tuple({each for classes in found for each in classes}) if all(found) else ()
    if origin is Literal:
        return tuple(set(map(type, get_args(meant))))
    kind = NoneType if meant is None else origin or meant
    is_known = isinstance(kind, type) and kind not in (Any, object) and not _is_typed_dict(kind)
    return (kind,) if is_known else ()


def _with_nested(checked: type[BaseModel], is_state: bool) -> Iterator[tuple[type, Sequence[_Field]]]:
    """Yield the class and all records in it, with those of their fields that need a closer look.

    If one has types that are not defined yet, the class is `_unfinished`.
    """
    waiting: list[type] = [checked]
    seen = {*waiting}
    while waiting:
        record = waiting.pop()
        if not getattr(record, "__pydantic_complete__", True):
            _unfinished[checked] = is_state
        try:
            found = [each for each in _fields_of(record) if not any(each[1] is kind for kind in PLAIN)]
        except NameError:  # of a class that follows, or one that only pydantic knows
            _unfinished[checked] = is_state
            found = []
        yield record, found
        nested = {each for _, annotation, _ in found for each in _records_in(annotation)} - seen
        waiting.extend(nested)
        seen |= nested


def _fields_of(record: type) -> Iterator[_Field]:
    """Yield the fields. Raise `NameError` for a type that is not defined yet."""
    if issubclass(record, BaseModel):
        for name, field in record.model_fields.items():
            annotation: Any = field.annotation
            if field.metadata:
                annotation = Annotated[annotation, *field.metadata]
            yield name, annotation, field.default is None and field.default_factory is None
        return
    hints = get_type_hints(record, include_extras=True)
    if is_dataclass(record):
        known = getattr(record, "__pydantic_fields__", {})  # with defaults that are inside of annotations
        for each in fields(record):
            info: Any = known.get(each.name) or (each.default if isinstance(each.default, FieldInfo) else each)
            is_none = info.default is None or (callable(info.default_factory) and info.default_factory() is None)
            yield each.name, hints[each.name], is_none
        return
    for name, annotation in hints.items():
        yield name, annotation, issubclass(record, tuple)  # a None in a tuple is written


def _meant(annotation: Any) -> Any:
    """Return what a ``type`` statement or a `NewType` stands for."""
    while type(named := get_origin(annotation) or annotation).__name__ in ("TypeAliasType", "NewType"):
        annotation = named.__value__ if hasattr(named, "__value__") else named.__supertype__
    return annotation


def _types_in(annotation: Any, *, converted: bool = True) -> Iterator[Any]:
    """Yield the annotation and those inside of it; unless ``converted``, none whose values a validator may convert."""
    waiting, seen = [annotation], set[int]()  # aliases may be recursive
    while waiting:
        meant = _meant(named := waiting.pop())
        if meant is not named:
            waiting.extend(get_args(named))  # of an alias with parameters
        if id(meant) in seen:
            continue
        seen.add(id(meant))
        yield meant
        inner = get_args(meant)
        if get_origin(meant) is Annotated:
            inner, notes = inner[:1], inner[1:]
            if not converted and any(
                isinstance(note, AfterValidator | PlainValidator | WrapValidator) for note in notes
            ):
                continue
        waiting.extend(inner)


def _records_in(annotation: Any) -> Iterator[type]:
    """Yield the models, dataclasses, typed dicts and named tuples in an annotation."""
    for each in _types_in(annotation):
        found = get_origin(each) or each
        if isinstance(found, type) and (_has_fields(found) or _is_named_tuple(found)):
            yield found


def _has_fields(kind: type) -> bool:
    return issubclass(kind, BaseModel) or is_dataclass(kind) or _is_typed_dict(kind)


def _is_written_as_dict(kind: type) -> bool:
    decorators: Any = getattr(kind, "__pydantic_decorators__", None)
    return _has_fields(kind) and not issubclass(kind, RootModel) and not (decorators and decorators.model_serializers)


def _is_named_tuple(kind: type) -> bool:
    return issubclass(kind, tuple) and hasattr(kind, "_fields")


def _is_typed_dict(kind: type) -> bool:
    return hasattr(kind, "__required_keys__")  # of `typing` or `typing_extensions`


def _may_be_none(annotation: Any) -> bool:
    annotation = _meant(annotation)
    if get_origin(annotation) is Annotated:
        return _may_be_none(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return any(map(_may_be_none, get_args(annotation)))
    is_literal = get_origin(annotation) is Literal
    return annotation in (None, NoneType, Any, object) or (is_literal and None in get_args(annotation))


def _is_frozen(record: type) -> bool:
    """Return whether no field of its objects can be set."""
    if issubclass(record, BaseModel):
        return record.model_config.get("frozen", False)
    params: Any = getattr(record, "__dataclass_params__", None)
    return _is_named_tuple(record) if params is None else params.frozen


def _is_changeable(annotation: Any) -> bool:
    """Return whether its values are collections that can be changed in place, when pydantic has read them."""
    kind = get_origin(annotation) or annotation
    return isinstance(kind, type) and issubclass(kind, _CHANGEABLE) and not issubclass(kind, Map | frozenset)


def _is_looked_up_by_records(annotation: Any) -> bool:
    """Return whether its values are sets of records, or mappings with such keys."""
    kind = get_origin(annotation)
    if not isinstance(kind, type) or not issubclass(kind, Mapping | Set):
        return False
    return any(_is_written_as_dict(record) for key in get_args(annotation)[:1] for record in _records_in(key))
