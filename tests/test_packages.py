"""The packages that are installed are whole: each module can be imported, and they say that they have types."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import notifications
import readergroup
import synchronizer
from tests.waiting import PATIENCE_SECONDS


@pytest.mark.parametrize("package", [notifications, readergroup, synchronizer], ids=lambda package: package.__name__)
def test_every_module_can_be_imported(package: object) -> None:
    path, name = package.__path__, package.__name__  # type: ignore[attr-defined]
    modules = [module.name for module in pkgutil.walk_packages(path, f"{name}.")]
    assert len(modules) > 2
    for module in modules:
        importlib.import_module(module)
    assert Path(path[0], "py.typed").is_file()


@pytest.mark.parametrize("name", ["readergroup", "readergroup-notifications"])
def test_spark_finds_a_module_for_each_format(name: str) -> None:
    module = importlib.import_module(f"pyspark_{name.replace('-', '_')}")
    assert module.DefaultSource.name() == name


def test_without_pyarrow_the_modules_leave_the_sources_of_others_alone() -> None:
    program = "import sys; sys.modules['pyarrow'] = None; import pyspark_readergroup, pyspark_readergroup_notifications"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=PATIENCE_SECONDS)
