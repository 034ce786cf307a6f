"""Transcripts of what happens to a group's state: `tests/scenarios/*.txt`. ``UPDATE=1 pytest`` rewrites them.

A transcript is blocks, parted by empty lines, that go on where the one before ended; a comment before a block says
what it shows. Above the dashes stands what is tried, one entry per line, below what became of it. The group reads one
stream; ``s3`` is its segment 3. ``s3@120#71>r2`` is read from offset 120 on under the token 71 (that of the eighth
entry) and is marked for r2.

    segments N              a new group of N segments
    add r1 ...              readers join, one entry each      remove r1 [s0@120 ...]
    reassign r1 s0          release r1 s0 120                 complete r1 s0 900
    split s0 ...            merge s0 s1                       end
    weigh s0=2 ...          balance                           both: UPDATE && UPDATE   in one entry
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from readergroup import balance
from readergroup.state import ReaderGroupState
from readergroup.streams.config import SegmentId
from readergroup.updates import (
    AddReader,
    CompleteSegment,
    ReassignSegment,
    RecordWeights,
    ReleaseSegment,
    RemoveReader,
)
from synchronizer import ReaderGroupError, Update
from tests.readergroup.histories import STREAM, History, group_state, seg

SCENARIOS = sorted((Path(__file__).parent.parent / "scenarios").glob("*.txt"))


@pytest.mark.parametrize("path", SCENARIOS, ids=[path.stem for path in SCENARIOS])
def test_scenario(path: Path) -> None:
    written = path.read_text()
    played = play(written)
    if os.environ.get("UPDATE"):
        path.write_text(played)
        return
    assert played == written


def test_there_are_scenarios() -> None:
    assert SCENARIOS


def play(text: str) -> str:
    """The transcript with what really happens below the dashes."""
    history = Scenario()
    blocks = [block for block in text.split("\n\n") if block.strip()]
    return "\n\n".join(play_block(history, block.strip("\n")) for block in blocks) + "\n"


def play_block(scenario: Scenario, block: str) -> str:
    above = block.split("\n----", 1)[0].split("\n")
    commands = [line for line in above if line and not line.startswith("#")]
    if not commands:
        return block
    outcome = [complaint for command in commands if (complaint := scenario.run(command)) is not None]
    return "\n".join([*above, "----", *outcome, *describe(scenario.history.state)])


class Scenario:
    def __init__(self) -> None:
        self.history = History()

    def run(self, command: str) -> str | None:
        """Carry it out; what it was refused with."""
        verb, *words = command.split()
        try:
            if verb == "segments":
                self.history = History(group_state(int(words[0])))
            elif verb == "both:":
                updates = [u for part in " ".join(words).split("&&") for u in self.updates(part.split())]
                self.history.apply(*updates)
            elif verb == "split":
                self.history.split(*map(number, words))
            elif verb == "merge":
                self.history.merge(*map(number, words))
            elif verb == "end":
                self.history.end()
            else:
                self.apply_each(verb, words)
        except ReaderGroupError as error:
            return f"{command}: {error.message}"
        return None

    def apply_each(self, verb: str, words: list[str]) -> None:
        if verb == "add":
            for reader in words:
                self.history.add(reader)
        elif verb == "balance":
            moves = balance.plan(self.history.state)
            if moves:
                self.history.apply(*moves)
        else:
            self.history.apply(*self.updates([verb, *words]))

    def updates(self, words: list[str]) -> list[Update[ReaderGroupState]]:
        match words:
            case ["add", reader]:
                return [AddReader(reader=reader)]
            case ["remove", reader, *position]:
                at = dict(each.split("@") for each in position)
                return [RemoveReader(reader=reader, position={seg(number(s)): int(o) for s, o in at.items()})]
            case ["reassign", reader, segment]:
                return [ReassignSegment(segment=seg(number(segment)), reader=reader)]
            case ["release", reader, segment, offset]:
                return [ReleaseSegment(reader=reader, segment=seg(number(segment)), offset=int(offset))]
            case ["complete", reader, segment, offset]:
                return [CompleteSegment(reader=reader, segment=seg(number(segment)), offset=int(offset))]
            case ["weigh", *weights]:
                pairs = (each.split("=") for each in weights)
                return [RecordWeights(weights={seg(number(segment)): int(weight) for segment, weight in pairs})]
        raise AssertionError(f"no such command: {' '.join(words)}")


def number(segment: str) -> int:
    return int(segment.removeprefix("s"))


def describe(state: ReaderGroupState) -> list[str]:
    lines = []
    for reader in sorted(state.readers):
        held = in_order(state.segments_of(reader))
        lines.append(f"{reader}: " + (" ".join(describe_segment(state, each) for each in held) or "-"))
    groups = {
        "unassigned": [s for s, found in state.segments.items() if found.readable and found.owner is None],
        "waiting": [s for s, found in state.segments.items() if found.waiting_for],
        "completed": [s for s, found in state.segments.items() if found.completed],
    }
    for name, segments in groups.items():
        if segments:
            lines.append(f"{name}: " + " ".join(describe_segment(state, each) for each in in_order(segments)))
    cut = " ".join(f"{short(s)}@{state.cuts[STREAM].offsets[s]}" for s in in_order(state.cuts[STREAM].offsets))
    lines.append(f"cut: {cut}" + (" (end of data)" if state.end_of_data else ""))
    return lines


def in_order(segments: object) -> list[SegmentId]:
    return sorted(segments, key=lambda segment: int(segment.rpartition("/")[2]))  # type: ignore[call-overload, no-any-return]


def short(segment: SegmentId) -> str:
    return "s" + segment.rpartition("/")[2]


def describe_segment(state: ReaderGroupState, segment: SegmentId) -> str:
    found = state.segments[segment]
    token = f"#{found.token}" if found.token is not None else ""
    target = f">{found.target}" if found.target is not None else ""
    return f"{short(segment)}@{found.offset}{token}{target}"
