"""A name that begins with an underscore belongs to its module: no other module of the product uses it."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import Final

from tests.places import ROOT, product_files

#: Public in spite of their names: of named tuples, and of the standard library.
DOCUMENTED: Final = frozenset({"_replace", "_asdict", "_fields", "_make", "os._exit", "sys._current_frames", "_thread"})
#: What a module may use of another one nevertheless, and why.
ALLOWED: Final[Mapping[str, frozenset[str]]] = {
    "nats-py has no public way, and each part is checked for when the module is imported": frozenset({
        "synchronizer/stores/nats/client.py: (await self.subscribe(subject))._id",
        "synchronizer/stores/nats/client.py: client._server_info",
        "synchronizer/stores/nats/client.py: client._transport",
        "synchronizer/stores/nats/client.py: subscription._id",
    }),
    "multiprocessing has no public way to forget a child whose exit code others have taken": frozenset({
        "readergroup/scaling/worker_process.py: multiprocessing.process._children",
    }),
    "a worker asks for it with each event, where a property would cost a call": frozenset({
        "readergroup/scaling/worker.py: event._batch",
    }),
    "the asyncio client shares the locks of its client, which applications hold by `lock` and `semaphore`": frozenset({
        "readergroup/aio/client.py: self._sync._lock",
    }),
    "the client closes the relays and notifiers of an outbox with what it has opened itself": frozenset({
        "readergroup/outbox/outbox.py: self._client._keep",
    }),
    "a writer's methods for the end of its process, which are no part of what applications call": frozenset({
        "readergroup/streams/writing/open_writers.py: writer._abandon",
        "readergroup/streams/writing/open_writers.py: writer._close_until",
        "readergroup/streams/writing/open_writers.py: writer._store_until",
    }),
    "groups wait for all their notifiers until one deadline, and applications for one notifier at a time": frozenset({
        "readergroup/group/reader_group.py: notifier._close_until",
    }),
}  # fmt: skip


def test_no_module_uses_what_is_private_to_another() -> None:
    allowed = frozenset().union(*ALLOWED.values())
    found = {
        f"{path.relative_to(ROOT)}: {use}" for path in product_files() for use in foreign_privates(path.read_text())
    }
    assert found - allowed == set(), "give it a public name, or say in ALLOWED why not"
    assert allowed - found == set(), "it is no longer used: take it out of ALLOWED"


def test_each_way_to_a_private_name_is_found() -> None:
    source = """
from .other import _hidden, shown
import package._inner
class Own(Base):
    def __init__(self): self._mine = 1
    def same(self, other: Own): return other._mine + self._of_base + super()._of_base
    def foreign(self): return self.part._theirs
class Shape(Protocol):
    def _of_shape(self): ...
def use(shape: Shape): shape._of_shape(); shape.__doc__; pair._replace(); os._exit(0)
"""
    assert sorted(foreign_privates(source)) == [
        "from .other import _hidden",
        "import package._inner",
        "self.part._theirs",
        "shape._of_shape",
    ]


def foreign_privates(source: str) -> Iterator[str]:
    """Each use of a private name that the module does not define: neither a protocol nor a base class counts as that,
    but what an object calls its own, as ``self``, may come from a base."""
    tree = ast.parse(source)
    own = set(_defined(tree))
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value, name) if _is_private(name) and name not in own:
                if ast.unparse(value) not in ("self", "cls", "super()") and ast.unparse(node) not in DOCUMENTED:
                    yield ast.unparse(node)
            case ast.ImportFrom(module, names, level):
                path = "." * level + (module or "")
                yield from (f"from {path} import {each.name}" for each in names if _has_private_part(path, each.name))
            case ast.Import(names):
                yield from (f"import {each.name}" for each in names if _has_private_part(each.name))


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name not in DOCUMENTED


def _has_private_part(*paths: str) -> bool:
    return any(_is_private(part) for path in paths for part in path.split("."))


def _defined(node: ast.AST) -> Iterator[str]:
    """The names that are defined in it, as functions, classes or variables, or as attributes of ``self``."""
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.ClassDef(bases=bases) if any("Protocol" in ast.unparse(base) for base in bases):
                continue
            case ast.FunctionDef(name) | ast.AsyncFunctionDef(name) | ast.ClassDef(name):
                yield name
            case ast.Name(name, ast.Store()) | ast.Attribute(ast.Name("self" | "cls"), name, ast.Store()):
                yield name
        yield from _defined(child)
