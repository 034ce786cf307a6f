"""``python -m tests.sizes [ROOT]``: how large the files, classes and functions of the packages are, and their folders.

Prints the numbers beside those of projects that we learn from.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Final, NamedTuple

from tests.places import ROOT, product_files

LARGE_FILE_LINES: Final = 400
LARGE_CLASS_LINES: Final = 300
FULL_FOLDER_FILES: Final = 14
#: Median and 90th percentile of the lines of a function, measured in November 2026.
MODELS: Final = {"eventsourcing": (7, 32), "kazoo": (8, 35)}


class Measured(NamedTuple):
    name: str
    lines: int


class Sizes(NamedTuple):
    files: list[Measured]
    classes: list[Measured]
    functions: list[int]
    folders: list[Measured]  # folders, and how many modules each has


def measure(root: Path) -> Sizes:
    """Measure the three packages under ``root``, without the code that backends of other distributions test with."""
    files: list[Measured] = []
    classes: list[Measured] = []
    functions: list[int] = []
    folders: dict[str, int] = {}
    for file in product_files(root):
        name = str(file.relative_to(root))
        source = file.read_text()
        files.append(Measured(name, source.count("\n")))
        if file.name != "__init__.py":
            folders[str(file.parent.relative_to(root))] = folders.get(str(file.parent.relative_to(root)), 0) + 1
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                classes.append(Measured(f"{name}: {node.name}", _lines(node)))
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                functions.append(_lines(node))
    return Sizes(files, classes, functions, [Measured(*room) for room in folders.items()])


def _lines(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def report(sizes: Sizes) -> Iterator[str]:
    functions = sorted(sizes.functions)
    ninth = functions[len(functions) * 9 // 10]
    models = ", ".join(f"{name} {middle}/{tenth}" for name, (middle, tenth) in MODELS.items())
    yield f"functions: median {median(functions):.0f} lines, nine of ten up to {ninth} ({models})"
    for title, measured, limit in (
        ("files", sizes.files, LARGE_FILE_LINES),
        ("classes", sizes.classes, LARGE_CLASS_LINES),
        ("folders", sizes.folders, FULL_FOLDER_FILES),
    ):
        large = sorted((each for each in measured if each.lines > limit), key=lambda each: -each.lines)
        unit = "modules" if title == "folders" else "lines"
        yield f"{title}: {len(measured)}, of which {len(large)} over {limit} {unit}"
        yield from (f"  {each.lines:5} {each.name}" for each in large)


if __name__ == "__main__":
    print("\n".join(report(measure(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT))))
