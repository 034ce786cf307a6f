"""A persistent mapping for the fields of a state: changing a key costs about the same for any number of keys."""

from __future__ import annotations

from collections.abc import ItemsView, Iterable, Iterator, Mapping, ValuesView
from itertools import chain
from typing import Any, Final, TypeVar, get_args

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

K = TypeVar("K")
V = TypeVar("V")

# A map is a tree. A leaf is a dict of up to 64 items. A branch is a list of 32 nodes, and five bits of a key's hash
# choose one of them. No node changes once a map has it, so maps share nodes, and threads read them without a lock.
_BITS: Final = 5
_MASK: Final = (1 << _BITS) - 1
_LEAF_ITEMS: Final = 64
#: The bits of a hash end here. Leaves below have any number of items: their keys have equal hashes.
_HASH_BITS: Final = 64
_NO_ITEMS: Final[dict[Any, Any]] = {}
_EMPTY_BRANCH: Final[list[Any]] = [_NO_ITEMS] * (1 << _BITS)


class Map(Mapping[K, V]):
    """An immutable `Mapping`. ``set`` and ``delete`` return a new one that shares the unchanged items.

    The order of iteration differs between equal maps and between processes, like that of a set. Sort the keys where
    ``apply_to`` depends on the order. As the type of a pydantic field (``Map[str, int]``) it accepts any mapping and is
    written as a dict.
    """

    __slots__ = ("_length", "_root")
    _length: int
    _root: Any

    def __init__(self, items: Mapping[K, V] | Iterable[tuple[K, V]] = ()) -> None:
        if isinstance(items, Map):
            self._root, self._length = items._root, items._length
        else:
            copied = dict(items)
            self._root, self._length = _updated(_NO_ITEMS, copied, 0), len(copied)

    @classmethod
    def _of(cls, root: Any, length: int) -> Map[K, V]:
        new = cls.__new__(cls)
        new._root = root
        new._length = length
        return new

    @classmethod
    def _of_own(cls, items: dict[K, V]) -> Map[K, V]:
        """Return a map of a dict that nothing else has."""
        length = len(items)
        return cls._of(items if length <= _LEAF_ITEMS else _updated(_NO_ITEMS, items, 0), length)

    def set(self, key: K, value: V) -> Map[K, V]:
        """Return a map in which ``key`` has this value."""
        top = parent = [self._root]
        index, shift, hashed = 0, 0, hash(key)
        while type(node := parent[index]) is list:
            parent[index] = node = node.copy()
            parent, index, shift = node, hashed >> shift & _MASK, shift + _BITS
        parent[index] = leaf = node.copy()
        before = len(leaf)
        leaf[key] = value
        if len(leaf) > _LEAF_ITEMS:
            parent[index] = _updated(_NO_ITEMS, leaf, shift)
        return self._of(top[0], self._length + len(leaf) - before)

    def delete(self, key: K) -> Map[K, V]:
        """Return a map without ``key``. Raise `KeyError` if it is absent."""
        return self._of(_without(self._root, key, hash(key)), self._length - 1)

    def update(self, items: Mapping[K, V] | Iterable[tuple[K, V]]) -> Map[K, V]:
        """Return a map with these items added or replaced."""
        changed = dict(items)
        return self._of(_updated(self._root, changed, 0), self._length + sum(key not in self for key in changed))

    def __getitem__(self, key: K) -> V:
        leaf = self._root
        if type(leaf) is list:
            leaf = _leaf(leaf, hash(key))
        value: V = leaf[key]
        return value

    def get(self, key: K, default: Any = None) -> Any:
        leaf = self._root
        if type(leaf) is list:
            leaf = _leaf(leaf, hash(key))
        return leaf.get(key, default)

    def __contains__(self, key: object) -> bool:
        leaf = self._root
        if type(leaf) is list:
            leaf = _leaf(leaf, hash(key))
        return key in leaf

    def __iter__(self) -> Iterator[K]:
        return chain.from_iterable(_leaves(self._root))

    def __len__(self) -> int:
        return self._length

    def items(self) -> ItemsView[K, V]:
        return _Items(self)

    def values(self) -> ValuesView[V]:
        return _Values(self)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Map):
            # Maps with equal trees are equal, and shared nodes are compared by identity.
            return self._length == other._length and (
                bool(self._root == other._root) or dict(self.items()) == dict(other.items())
            )
        return isinstance(other, Mapping) and dict(self.items()) == dict(other)

    def __hash__(self) -> int:
        return hash(frozenset(self.items()))

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process has other hashes.
        return type(self), (dict(self.items()),)

    def __repr__(self) -> str:
        return f"Map({dict(self.items())!r})"

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        key_type, value_type = get_args(source) or (Any, Any)
        items = core_schema.dict_schema(handler.generate_schema(key_type), handler.generate_schema(value_type))
        return core_schema.no_info_before_validator_function(
            lambda value: dict(value.items()) if type(value) is not dict and isinstance(value, Map) else value,
            core_schema.no_info_after_validator_function(cls._of_own, items),
            serialization=core_schema.plain_serializer_function_ser_schema(
                lambda value: dict(value.items()), return_schema=items
            ),
        )


class _Items(ItemsView[K, V]):
    """Walks the leaves instead of looking up each key."""

    _mapping: Map[K, V]

    def __iter__(self) -> Iterator[tuple[K, V]]:
        return chain.from_iterable(map(dict.items, _leaves(self._mapping._root)))


class _Values(ValuesView[V]):
    _mapping: Map[Any, V]

    def __iter__(self) -> Iterator[V]:
        return chain.from_iterable(map(dict.values, _leaves(self._mapping._root)))


def _leaf(node: Any, hashed: int) -> Any:
    """Return the leaf that has the keys with this hash."""
    while type(node) is list:
        node = node[hashed & _MASK]
        hashed >>= _BITS
    return node


def _leaves(node: Any) -> Iterable[dict[Any, Any]]:
    return (node,) if type(node) is dict else chain.from_iterable(map(_leaves, node))


def _updated(node: Any, items: dict[Any, Any], shift: int) -> Any:
    """Return the node with these items, whose place in it the bits from ``shift`` decide."""
    if type(node) is dict:
        items = node | items
        if len(items) <= _LEAF_ITEMS or shift > _HASH_BITS:
            return items
        node = _EMPTY_BRANCH
    places: dict[int, dict[Any, Any]] = {}
    for key, value in items.items():
        place = hash(key) >> shift & _MASK
        if place in places:
            places[place][key] = value
        else:
            places[place] = {key: value}
    changed = node.copy()
    for place, some in places.items():
        changed[place] = _updated(changed[place], some, shift + _BITS)
    return changed


def _without(node: Any, key: object, hashed: int) -> Any:
    """Return the node without the key. Where nothing is left, it is an empty leaf."""
    changed = node.copy()
    if type(changed) is dict:
        del changed[key]
        return changed or _NO_ITEMS
    place = hashed & _MASK
    changed[place] = _without(node[place], key, hashed >> _BITS)
    return _NO_ITEMS if changed == _EMPTY_BRANCH else changed
