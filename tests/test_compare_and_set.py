"""Appends to the store are made in one place, where lost answers are found out."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.places import ROOT, product_files

#: The verbs of a store whose answers may be lost, in a way that only a comparison finds out.
VERBS = {"append", "append_unread", "append_unflushed", "append_together", "concat", "concat_unread"}
ALLOWED = {
    "readergroup/streams/event_time/watermarks.py",  # a lost answer delays a watermark until the next mark
    "readergroup/streams/maintenance.py",  # a lost answer delays the next application by one interval
    "synchronizer/compare_and_set.py",
    "synchronizer/log/entries.py",  # an update is found again in the log by the number of its call
    "synchronizer/store.py",
}
BACKENDS = ("synchronizer/stores/", "synchronizer/testing/")


def test_nothing_appends_to_a_store_but_the_log_and_the_cells() -> None:
    found = [
        f"{path}:{call.lineno}"
        for file in product_files()
        if (path := str(file.relative_to(ROOT))) not in ALLOWED and not path.startswith(BACKENDS)
        for call in appends_in(file)
    ]
    assert not found, "append through synchronizer.compare_and_set"


def appends_in(file: Path) -> Iterator[ast.expr]:
    """Uses of a verb of something called a store, also where it is passed on without being called."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Attribute) and node.attr in VERBS:
            owner = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
            if "store" in owner:
                yield node


def test_an_append_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text("self._store.append(name, b'')\npartial(client.store.concat, name)\nevents.append(event)\n")
    assert [call.lineno for call in appends_in(file)] == [1, 2]
