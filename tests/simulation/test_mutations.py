"""The simulation finds what is wrong: with a rule of the product taken out, some seed breaks what the rule is for.

A mutation that is not found is a hole in the scenarios or in the auditor.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from types import ModuleType

import pytest

from readergroup.group import updater
from readergroup.group.model import positions
from readergroup.group.model.state import SegmentState
from tests.simulation.apart import run_apart
from tests.simulation.mutations import BY_NAME, MUTATIONS, Mutation, Words, mutated

#: In every run a third of the mutations is tried. Starting a process takes longer than finding most of them.
THIRDS = [MUTATIONS[first::3] for first in range(3)]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "mutations",
    [THIRDS[0], *(pytest.param(third, marks=pytest.mark.broad) for third in THIRDS[1:])],
    ids=["a third", "another", "the last"],
)
def test_each_rule_that_is_taken_out_is_missed(mutations: Sequence[Mutation]) -> None:
    ended = run_apart("tests.simulation.mutations", *(mutation.name for mutation in mutations))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for mutation, line in zip(mutations, ended.stdout.splitlines(), strict=True):
        found = re.fullmatch(rf"{mutation.name}: seed \d+: (\w+) broken.*", line)
        assert found is not None and found[1] in mutation.breaks, line


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mutation_lasts_as_long_as_its_block(mutation: Mutation) -> None:
    places = [place for change in mutation.changes for place in change.replacements()]
    before = [vars(owner)[name] for owner, name, _ in places]
    with mutated(mutation.name):
        assert all(vars(owner)[name] is not was for (owner, name, _), was in zip(places, before, strict=True))
    assert [vars(owner)[name] for owner, name, _ in places] == before


def test_a_mutated_function_is_replaced_wherever_it_was_imported() -> None:
    def held_by(*modules: ModuleType) -> set[object]:
        return {vars(module)["current_offsets"] for module in modules}

    before = held_by(positions)
    assert held_by(updater) == before
    with mutated("fencing check"):
        assert held_by(updater) == held_by(positions) != before
    assert held_by(updater, positions) == before


def test_a_mutated_property_is_still_one() -> None:
    waiting = SegmentState(low=0.0, high=1.0, waiting_for=1)
    assert not waiting.readable
    with mutated("predecessor rule"):
        assert waiting.readable


def test_a_mutation_of_words_that_are_gone_is_refused() -> None:
    assert "predecessor rule" in BY_NAME
    with pytest.raises(LookupError, match="bring the mutation up to date"):
        list(Words(SegmentState, "readable", "what nobody wrote", "").replacements())
