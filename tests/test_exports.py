"""The roots of the packages export what users need: `dir` shows only that, and docs/api.md lists all of it."""

from __future__ import annotations

import ast
import importlib
import inspect
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Final

import pytest

import notifications
import readergroup
import synchronizer
from tests.places import DOCS
from tests.waiting import PATIENCE_SECONDS

PACKAGES: Final = (notifications, readergroup, synchronizer)
PAGE: Final = (DOCS / "api.md").read_text()
#: Between backticks on the page, and no exports.
NOT_NAMES: Final = {*(package.__name__ for package in PACKAGES), "retryable", "facts", "TimeoutError", "LookupError"}
each_package = pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)


@each_package
def test_dir_shows_the_exported_names_and_no_module(package: ModuleType) -> None:
    assert dir(package) == sorted(package.__all__)
    assert len(set(package.__all__)) == len(package.__all__)
    assert not [name for name in dir(package) if inspect.ismodule(getattr(package, name))]


@pytest.mark.parametrize(
    "name",
    ["synchronizer.testing", "readergroup.testing", "readergroup.sinks", "readergroup.spark", "readergroup.telemetry"],
)
def test_dir_of_a_public_submodule_shows_its_names_only(name: str) -> None:
    module = pytest.importorskip(name)
    assert dir(module) == sorted(module.__all__)
    assert all(getattr(module, each).__doc__ for each in module.__all__)


@each_package
def test_type_checkers_and_the_interpreter_see_the_same_names_of_the_same_modules(package: ModuleType) -> None:
    for_checkers = set(_imports_for_type_checkers(package))
    assert for_checkers == {(module, name) for module, names in package._MODULES.items() for name in names.split()}
    assert sorted(name for _, name in for_checkers) == sorted(package.__all__)


@each_package
def test_type_checkers_do_not_see_the_function_that_finds_names(package: ModuleType) -> None:
    """They would take any name for an export."""
    tree = ast.parse(inspect.getsource(package))
    hidden = [ast.unparse(node) for node in tree.body if isinstance(node, ast.If)]
    assert [text for text in hidden if "__getattr__" in text][0].startswith("if not TYPE_CHECKING:")
    assert not any("__getattr__" in ast.unparse(node) for node in tree.body if not isinstance(node, ast.If))


def _imports_for_type_checkers(package: ModuleType) -> Iterator[tuple[str, str]]:
    for node in ast.parse(inspect.getsource(package)).body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for each in node.body:
                assert isinstance(each, ast.ImportFrom)
                yield from (("." * each.level + (each.module or ""), alias.name) for alias in each.names)


@each_package
def test_a_misspelt_name_is_an_error_that_names_the_package(package: ModuleType) -> None:
    with pytest.raises(AttributeError, match=f"module '{package.__name__}' has no attribute 'conect'"):
        package.conect  # noqa: B018
    with pytest.raises(ImportError):
        exec(f"from {package.__name__} import conect")


def test_exports_pickle_by_the_names_of_their_modules() -> None:
    exported = [getattr(readergroup, name) for name in readergroup.__all__]
    program = "import pickle, sys; print(len(pickle.load(sys.stdin.buffer)))"
    done = subprocess.run(
        [sys.executable, "-c", program], input=pickle.dumps(exported), capture_output=True, timeout=PATIENCE_SECONDS
    )
    assert (done.stdout.strip(), done.stderr) == (str(len(exported)).encode(), b"")


def test_threads_that_use_all_names_at_once_get_the_same_objects() -> None:
    program = """
import random, sys, threading
import readergroup
sys.setswitchinterval(1e-5)
found, start = [], threading.Barrier(8)
def use(seed):
    names = random.Random(seed).sample(readergroup.__all__, len(readergroup.__all__))
    start.wait()
    found.append({name: getattr(readergroup, name) for name in names})
threads = [threading.Thread(target=use, args=[seed]) for seed in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert len(found) == 8 and all(each == found[0] for each in found)
"""
    subprocess.run([sys.executable, "-c", program], timeout=PATIENCE_SECONDS, check=True)


@each_package
def test_every_exported_class_and_function_has_a_docstring(package: ModuleType) -> None:
    exported = [getattr(package, name) for name in package.__all__]
    own = [each for each in exported if inspect.isclass(each) or inspect.isfunction(each)]
    assert len(own) > len(exported) // 2
    # A dataclass without a docstring of its own shows its signature.
    bare = [each for each in own if not each.__doc__ or each.__doc__.startswith(f"{each.__name__}(")]
    assert bare == []


def test_the_page_of_public_names_lists_exactly_what_is_exported() -> None:
    exported = {name for package in PACKAGES for name in package.__all__}
    listed = {name for name in re.findall(r"`([A-Za-z_]+)`", PAGE) if name not in NOT_NAMES}
    assert listed == exported


@pytest.mark.parametrize("module", ["readergroup.testing", "synchronizer.testing", "readergroup.batch.client"])
def test_a_submodule_can_be_imported_as_before(module: str) -> None:
    package, *inner = module.split(".")
    importlib.import_module(module)
    found: object = sys.modules[package]
    for name in inner:
        found = getattr(found, name)
    assert found is sys.modules[module]


@each_package
def test_a_star_import_brings_the_exported_names(package: ModuleType) -> None:
    program = f"from {package.__name__} import *; print(*sorted(name for name in globals() if name[:2] != '__'))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=True
    )
    assert done.stdout.split() == sorted(package.__all__)
