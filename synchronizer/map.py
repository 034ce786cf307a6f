"""A persistent mapping for the fields of a state: changing a key costs about the same for any number of keys."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar, get_args

import immutables
from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

K = TypeVar("K")
V = TypeVar("V")


class Map(Mapping[K, V]):
    """An immutable `Mapping`. ``set`` and ``delete`` return a new one that shares the unchanged items.

    The order of iteration differs between processes, like that of a set. Sort the keys where ``apply_to`` depends on
    the order. As the type of a pydantic field (``Map[str, int]``) it accepts any mapping and is written as a dict.
    """

    __slots__ = ("_map",)
    _map: immutables.Map[K, V]

    def __init__(self, items: Mapping[K, V] | Iterable[tuple[K, V]] = ()) -> None:
        self._map = items._map if isinstance(items, Map) else immutables.Map(items)

    @classmethod
    def _of(cls, inner: immutables.Map[K, V]) -> Map[K, V]:
        new = cls.__new__(cls)
        new._map = inner
        return new

    def set(self, key: K, value: V) -> Map[K, V]:
        """Return a map in which ``key`` has this value."""
        return self._of(self._map.set(key, value))

    def delete(self, key: K) -> Map[K, V]:
        """Return a map without ``key``. Raise `KeyError` if it is absent."""
        return self._of(self._map.delete(key))

    def update(self, items: Mapping[K, V] | Iterable[tuple[K, V]]) -> Map[K, V]:
        """Return a map with these items added or replaced."""
        return self._of(self._map.update(items))

    def __getitem__(self, key: K) -> V:
        return self._map[key]

    def get(self, key: K, default: Any = None) -> Any:
        return self._map.get(key, default)

    def __contains__(self, key: object) -> bool:
        return key in self._map

    def __iter__(self) -> Iterator[K]:
        return iter(self._map)

    def __len__(self) -> int:
        return len(self._map)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Map):
            return bool(self._map == other._map)
        return isinstance(other, Mapping) and dict(self) == dict(other)

    def __hash__(self) -> int:
        return hash(self._map)

    def __repr__(self) -> str:
        return f"Map({dict(self._map)!r})"

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        key_type, value_type = get_args(source) or (Any, Any)
        items = core_schema.dict_schema(handler.generate_schema(key_type), handler.generate_schema(value_type))
        return core_schema.no_info_before_validator_function(
            lambda value: dict(value) if isinstance(value, Map) else value,
            core_schema.no_info_after_validator_function(cls, items),
            serialization=core_schema.plain_serializer_function_ser_schema(dict, return_schema=items),
        )
