"""Modules load when they are first used, also while another thread forks the process."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.places import ROOT, product_files

#: Processes that do not fork while a thread loads something: commands, the demo, and tasks of Spark.
NO_FORKS = ("readergroup/cli/", "readergroup/demo/", "readergroup/spark/")

FORK = """
import os, sys, threading
from synchronizer.threads.loading import loading

started = threading.Event()

def load():
    with loading():
        with loading():  # a module that is loaded loads others
            pass
        import slow

thread = threading.Thread(target=load)
thread.start()
started.wait()
child = os.fork()
if child == 0:
    import slow
    os._exit(slow.value)
thread.join()
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
SLOW = """
import __main__, time
__main__.started.set()
time.sleep(0.3)  # until the fork waits
value = 7
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_child_can_use_a_module_that_a_thread_of_its_parent_was_loading(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    assert _run(FORK, tmp_path) == "7"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.parametrize(
    "delay", [0.0, 0.06, *(pytest.param(delay, marks=pytest.mark.broad) for delay in (0.01, 0.03, 0.1, 0.15))]
)
def test_a_child_can_use_a_client_that_a_thread_of_its_parent_was_loading(delay: float, tmp_path: Path) -> None:
    program = f"""
import os, threading, time
import readergroup

def use():
    with readergroup.connect("memory://") as client:
        client.streams.create("shop/orders")
        with client.groups.create("billing", streams=["shop/orders"]).reader():
            return 7

thread = threading.Thread(target=use)
thread.start()
time.sleep({delay})
child = os.fork()
if child == 0:
    os._exit(use())
thread.join()
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert _run(program, tmp_path) == "7"


def _run(program: str, folder: Path) -> str:
    done = subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_every_import_in_a_function_is_one_that_forks_wait_for() -> None:
    files = [path for path in product_files() if not str(path.relative_to(ROOT)).startswith(NO_FORKS)]
    found = {f"{path.relative_to(ROOT)}: {text}" for path in files for text in _bare(ast.parse(path.read_text()))}
    assert found == set(), "write it in a block `with loading():`"


def test_an_import_in_a_function_is_found() -> None:
    source = "import a\ndef f():\n    with loading():\n        import b\n    if b:\n        from c import d\n"
    assert list(_bare(ast.parse(source))) == ["from c import d"]


def _bare(node: ast.AST, *, in_function: bool = False) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom) and in_function:
            yield ast.unparse(child)
        is_loading = isinstance(child, ast.With) and ast.unparse(child.items[0]) == "loading()"
        is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
        yield from _bare(child, in_function=(in_function or is_function) and not is_loading)
