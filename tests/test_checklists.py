"""The checklists of CONTRIBUTING.md, checked on each present backend, notifier, recipe and command."""

from __future__ import annotations

import inspect
import re
from functools import cache
from typing import Any

import pytest
from typer.testing import CliRunner

import readergroup as rg
import synchronizer
from notifications import Notification, PollingNotifier
from readergroup.cli.app import _MODULES
from readergroup.group import notifiers
from synchronizer.stores import opening
from synchronizer.testing import SegmentStoreConformance
from tests.command import app, command_of
from tests.conftest import SERVERS
from tests.places import DOCS, ROOT
from tests.synchronizer.stores import test_conformance

_PAGE = (ROOT / "CONTRIBUTING.md").read_text()
_CHECKLISTS = _PAGE[_PAGE.index("## Add a backend") : _PAGE.index("## Former names")]
#: Folders of stores that have a server.
_BACKENDS = {"postgres": "postgresql", "nats": "nats"}


def test_the_files_and_names_of_the_checklists_exist() -> None:
    sources = {
        path: path.read_text()
        for folder in ("synchronizer", "notifications", "readergroup", "tests")
        for path in (ROOT / folder).rglob("*.py")
    }
    words = set(re.findall(r"\w+", " ".join(sources.values())))
    for named in set(re.findall(r"`([^`\s]+)`", _CHECKLISTS)):
        if "/" in named:
            assert (ROOT / named.partition("::")[0]).exists(), named
        elif named.endswith((".py", ".md", ".toml")):
            assert any(path.name == named for path in [*sources, *ROOT.iterdir()]), named
        elif re.fullmatch(r"[A-Za-z_]\w+", named):
            assert named in words or named in (ROOT / "pyproject.toml").read_text(), named


def test_each_backend_has_what_the_checklist_says() -> None:
    folders = {path.parent.name for path in (ROOT / "synchronizer/stores").glob("*/__init__.py")}
    assert folders == {"sqlite", *_BACKENDS}
    project = (ROOT / "pyproject.toml").read_text()
    tested = {
        name
        for name, each in vars(test_conformance).items()
        if inspect.isclass(each) and issubclass(each, SegmentStoreConformance)
    }
    guarantees = (DOCS / "guarantees.md").read_text()
    for folder in folders:
        scheme = _BACKENDS.get(folder, folder)
        assert scheme in opening._BUILT_IN
        assert any(name.lower().startswith(f"test{folder}") for name in tested)
        assert re.search(rf"^\|.*\b{scheme}\b.*\|$", guarantees, re.IGNORECASE | re.MULTILINE)
        assert f"`{scheme}://" in (DOCS / "operations.md").read_text()
        assert folder in (ROOT / "tests/faults/points.py").read_text()
    for folder, scheme in _BACKENDS.items():
        assert scheme in SERVERS
        assert re.search(rf"^{folder} = \[", project, re.MULTILINE), "its extra"
        assert re.search(rf"readergroup\[[a-z,]*\b{folder}\b", project), "the extra in wheel-test"
        assert f'"synchronizer.stores.{folder}.' in project, "the driver in the import contract"


def _own(module: Any, kind: type) -> list[type]:
    return [
        each for each in vars(module).values() if inspect.isclass(each) and issubclass(each, kind) and each is not kind
    ]


def test_each_notifier_has_what_the_checklist_says() -> None:
    with rg.connect("memory://") as client:
        client.streams.create("shop/orders")
        group = client.groups.create("billing", streams=["shop/orders"])
        assert group.segment_notifier in group._notifiers
        assert {type(each) for each in group._notifiers} == set(_own(notifiers, PollingNotifier))
    tests = " ".join(path.read_text() for path in (ROOT / "tests/readergroup/group").glob("*.py"))
    for notification in _own(notifiers, Notification):
        assert notification.__name__ in rg.__all__
        assert f"`{notification.__name__}`" in (DOCS / "api.md").read_text()
    for notifier in _own(notifiers, PollingNotifier):
        assert re.sub(r"(?<!^)([A-Z])", r"_\1", notifier.__name__).lower() in tests


def _is_of_a_recipe(exported: object) -> bool:
    return getattr(exported, "__module__", "").startswith("synchronizer.recipes.")


def test_each_recipe_has_what_the_checklist_says() -> None:
    methods = {
        name: inspect.signature(each).return_annotation
        for name, each in inspect.getmembers(rg.Client, inspect.isfunction)
        if name[0] != "_"
    }
    index = (DOCS / "recipes/README.md").read_text()
    pages = {path.name for path in (DOCS / "recipes").glob("*.md")} - {"README.md"}
    assert all(f"({page})" in index for page in pages)
    described = index + "".join((DOCS / "recipes" / page).read_text() for page in pages)
    found = set()
    of_recipes = (each for each in synchronizer.__all__ if _is_of_a_recipe(getattr(synchronizer, each)))
    for name in of_recipes:
        method = next((method for method, kind in methods.items() if re.search(rf"\b{name}\b", str(kind))), None)
        if method is not None:
            found.add(name)
            assert name in synchronizer.__all__ and name in rg.__all__, name
            assert f"`{name}`" in (DOCS / "api.md").read_text()
            assert re.search(rf"\b{method}\b", described), f"no page describes client.{method}"
            arguments = (ROOT / "tests/test_arguments.py").read_text()
            assert re.search(rf"(client|synchronizer)\.{method}\(", arguments, re.IGNORECASE), method
    assert {"SharedMap", "EventQueue", "Membership", "LeaderElection", "Barrier"} <= found


def _commands(command: Any, *path: str) -> dict[tuple[str, ...], Any]:
    """The commands by their words. Some releases of typer have classes of click of their own."""
    subcommands = getattr(command, "commands", None)
    if subcommands is None:
        return {path: command}
    return {key: each for name, sub in subcommands.items() for key, each in _commands(sub, *path, name).items()}


@pytest.mark.parametrize("path", _commands(command_of(app)), ids=" ".join)
def test_each_command_has_what_the_checklist_says(path: tuple[str, ...]) -> None:
    command = _commands(command_of(app))[path]
    assert command.help
    explained = CliRunner().invoke(app, [*path, "--help"])
    assert explained.exit_code == 0
    assert "Usage: " in explained.stdout
    words = [rf'"{word}"' for word in path]
    assert re.search(r",\s*".join(words), _tests()) or " ".join(path) in _tests(), "no test runs it"


@cache
def _tests() -> str:
    return "".join(each.read_text() for each in (ROOT / "tests/readergroup").rglob("*.py"))


def test_each_file_of_commands_is_registered() -> None:
    files = {
        path.stem for path in (ROOT / "readergroup/cli").glob("*.py") if "context: typer.Context" in path.read_text()
    }
    registered = " ".join(_MODULES.values()).split()
    assert files <= {*registered, "app", "session"} and len(files) > 5
