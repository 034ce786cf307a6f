"""The roots of the packages export what users need: `dir` shows only that, and docs/api.md lists all of it."""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
from types import ModuleType
from typing import Final

import pytest

import notifications
import readergroup
import synchronizer
from tests.places import DOCS

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


@pytest.mark.parametrize("name", ["synchronizer.testing", "readergroup.testing", "readergroup.spark"])
def test_dir_of_a_public_submodule_shows_its_names_only(name: str) -> None:
    module = pytest.importorskip(name)
    assert dir(module) == sorted(module.__all__)
    assert all(getattr(module, each).__doc__ for each in module.__all__)


@each_package
def test_every_name_that_the_root_imports_is_exported(package: ModuleType) -> None:
    imported = {name for name, each in vars(package).items() if not name.startswith("_") and not inspect.ismodule(each)}
    assert imported == {*package.__all__}


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
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.split() == sorted(package.__all__)
