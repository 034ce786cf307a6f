"""A new update of a group's state is registered, tested, and decided on in every module that treats classes of updates
differently. CONTRIBUTING.md has the steps."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from readergroup.group.model import updates
from synchronizer import Update
from tests.places import ROOT, product_files

#: The modules that treat some classes of updates differently from others; the first four belong to the product.
CONSUMERS: Final[Mapping[str, str]] = {
    "notifier": "readergroup/group/notifiers.py",  # which readers died
    "member": "readergroup/group/member.py",  # why this reader is out of its group
    "checkpointing": "readergroup/group/checkpointing.py",  # which updates are about another checkpoint
    "flow": "readergroup/serve/flow.py",  # what was read and taken over
    "demo": "readergroup/demo/ownership.py",  # which readers died
    "random": "tests/readergroup/group/model/test_state_random.py",
    "auditor": "tests/simulation/auditor.py",
    "keeping": "tests/simulation/keeping.py",
    "sightings": "tests/simulation/sightings.py",
    "checks": "tests/chaos/checks.py",
    "evidence": "tests/chaos/evidence.py",
}
#: The consumers that name each update. To the others, it is an entry like any other.
NAMED_BY: Final[Mapping[str, frozenset[str]]] = {
    "AddReader": frozenset({"auditor", "checks", "sightings"}),
    "RemoveReader": frozenset(
        {"auditor", "checks", "demo", "evidence", "flow", "keeping", "member", "notifier", "sightings"}
    ),
    "ReassignSegment": frozenset({"auditor", "flow", "sightings"}),
    "ReleaseSegment": frozenset({"auditor", "checks", "evidence", "random", "sightings"}),
    "CompleteSegment": frozenset({"auditor", "checks", "evidence", "flow", "random", "sightings"}),
    "AddEpoch": frozenset(),
    "EndStream": frozenset(),
    "RecordWeights": frozenset({"auditor", "random"}),
    "ConfigureGroup": frozenset(),
    "ConfigureStreams": frozenset({"auditor", "flow", "random"}),
    "CreateCheckpoint": frozenset({"checkpointing", "random"}),
    "PassCheckpoint": frozenset({"auditor", "checkpointing", "keeping", "random", "sightings"}),
    "FailCheckpoint": frozenset({"checkpointing", "random"}),
    "ResetStream": frozenset({"auditor", "flow", "keeping"}),
    "SetRetentionCuts": frozenset({"random"}),
    "NoteSkipped": frozenset({"random"}),
}


def test_every_update_is_registered() -> None:
    defined = {
        each for each in vars(updates).values() if isinstance(each, type) and issubclass(each, Update) and each.tag
    }
    assert defined == set(updates.UPDATES), "a class in updates.py is missing in UPDATES"


def test_every_consumer_is_decided_on_for_every_update() -> None:
    names = {each.__name__ for each in updates.UPDATES}
    assert set(NAMED_BY) == names, "give the new update a line: which consumers have to name it?"
    for consumer, file in CONSUMERS.items():
        expected = {update for update, named_by in NAMED_BY.items() if consumer in named_by}
        assert named_in(ROOT / file) & names == expected, file


def test_no_other_module_of_the_product_tells_updates_apart() -> None:
    names = {each.__name__ for each in updates.UPDATES}
    known = {ROOT / file for file in CONSUMERS.values()}
    found = {str(file.relative_to(ROOT)) for file in product_files() if file not in known and tells_apart(file, names)}
    assert not found, "name it in CONSUMERS"


def named_in(file: Path) -> set[str]:
    """The names that its code uses, imports left out."""
    return {node.id for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Name)}


def tells_apart(file: Path, names: set[str]) -> bool:
    """Whether it asks of which class an update is."""
    for node in ast.walk(ast.parse(file.read_text())):
        match node:
            case ast.Call(ast.Name("isinstance"), [_, classes]) | ast.MatchClass(classes):
                if names & {each.id for each in ast.walk(classes) if isinstance(each, ast.Name)}:
                    return True
    return False
