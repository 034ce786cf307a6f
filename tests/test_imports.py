"""No module imports what imports it, imports for type checking included."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.places import ROOT, product_files


def modules(root: Path) -> Mapping[str, Path]:
    """The files by the names of their modules."""
    return {
        ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): file
        for file in product_files(root)
    }


def imports(name: str, file: Path, known: Mapping[str, Path]) -> Iterator[str]:
    """The modules that ``file`` imports, or imports something of."""
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                yield f"{base}.{alias.name}" if f"{base}.{alias.name}" in known else base


def graph(root: Path) -> Mapping[str, set[str]]:
    known = modules(root)
    return {name: {*imports(name, file, known)} & known.keys() - {name} for name, file in known.items()}


def test_imports_make_no_cycle() -> None:
    found = graph(ROOT)
    assert len(found) > 200
    TopologicalSorter(found).prepare()


def test_a_cycle_for_type_checking_is_noticed(tmp_path: Path) -> None:
    package = tmp_path / "synchronizer" / "log"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "writer.py").write_text("from . import entries\n")
    (package / "entries.py").write_text("if TYPE_CHECKING:\n    from ..log.writer import LogWriter\n")
    with pytest.raises(CycleError):
        TopologicalSorter(graph(tmp_path)).prepare()
