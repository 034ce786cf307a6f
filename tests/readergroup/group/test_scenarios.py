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

The same happens to a group whose state is held in a store, on every one. There entries lie at other offsets: what is
shown is the token that an update has in the transcript.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from readergroup.group.model import balance
from readergroup.group.model.state import ReaderGroupState
from readergroup.group.model.updates import (
    UPDATES,
    AddReader,
    CompleteSegment,
    ReassignSegment,
    RecordWeights,
    ReleaseSegment,
    RemoveReader,
)
from readergroup.streams.config import SegmentId
from synchronizer import ReaderGroupError, Revision, SegmentStore, StateSynchronizer, Update, open_store
from tests.places import ROOT
from tests.readergroup.group.histories import STREAM, History, group_state, seg

SCENARIOS = sorted((ROOT / "tests" / "scenarios").glob("*.txt"))


@pytest.mark.parametrize("path", SCENARIOS, ids=[path.stem for path in SCENARIOS])
def test_scenario(path: Path) -> None:
    written = path.read_text()
    played = play(written)
    if os.environ.get("UPDATE"):
        path.write_text(played)
        return
    assert played == written


@pytest.mark.stores
@pytest.mark.parametrize("path", SCENARIOS, ids=[path.stem for path in SCENARIOS])
def test_scenario_in_a_store(path: Path, store_url: str) -> None:
    written = path.read_text()
    with open_store(store_url) as store, open_store(store_url) as elsewhere:
        assert play(written, partial(StoredHistory, store, elsewhere)) == written


def test_there_are_scenarios() -> None:
    assert SCENARIOS


class StoredHistory(History):
    """One process makes the entries, another says what has become of them. Now and then the log is compacted."""

    def __init__(self, store: SegmentStore, elsewhere: SegmentStore, state: ReaderGroupState | None = None) -> None:
        super().__init__(state)
        name = f"group/{sum(1 for _ in store.list())}"
        self._log = _opened(store, name, self.state)
        self._other = _opened(elsewhere, name, self.state)
        self._tokens: dict[int, int] = {}

    def apply(self, *updates: Update[ReaderGroupState]) -> ReaderGroupState:
        self._log.update_state_unconditionally(*updates)
        self.state = self._other.fetch_updates()
        for index in range(len(updates)):
            stored = Revision(self._other.revision.offset, index).token
            self._tokens[stored] = Revision(self.offset, index).token
        self.offset += 10
        if self.offset % 30 == 0:
            self._log.compact()
            self._other = _opened(self._other.store, self._log.name, self.state)
        return self.state

    def shown(self, token: int) -> int:
        return self._tokens[token]


def _opened(store: SegmentStore, name: str, initial: ReaderGroupState) -> StateSynchronizer[ReaderGroupState]:
    return StateSynchronizer(store, name, initial=initial, updates=UPDATES, compaction_bytes=None)


def play(text: str, begin: Callable[..., History] = History) -> str:
    """The transcript with what really happens below the dashes. ``begin`` makes a group of a state."""
    scenario = Scenario(begin)
    blocks = [block for block in text.split("\n\n") if block.strip()]
    return "\n\n".join(play_block(scenario, block.strip("\n")) for block in blocks) + "\n"


def play_block(scenario: Scenario, block: str) -> str:
    above = block.split("\n----", 1)[0].split("\n")
    commands = [line for line in above if line and not line.startswith("#")]
    if not commands:
        return block
    outcome = [complaint for command in commands if (complaint := scenario.run(command)) is not None]
    return "\n".join([*above, "----", *outcome, *describe(scenario.history)])


class Scenario:
    def __init__(self, begin: Callable[..., History]) -> None:
        self._begin = begin
        self.history = begin()

    def run(self, command: str) -> str | None:
        """Carry it out; what it was refused with."""
        verb, *words = command.split()
        try:
            if verb == "segments":
                self.history = self._begin(group_state(int(words[0])))
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


def describe(history: History) -> list[str]:
    state = history.state
    lines = []
    for reader in sorted(state.readers):
        held = in_order(state.segments_of(reader))
        lines.append(f"{reader}: " + (" ".join(describe_segment(history, each) for each in held) or "-"))
    groups = {
        "unassigned": [s for s, found in state.segments.items() if found.readable and found.owner is None],
        "waiting": [s for s, found in state.segments.items() if found.waiting_for],
        "completed": [s for s, found in state.segments.items() if found.completed],
    }
    for name, segments in groups.items():
        if segments:
            lines.append(f"{name}: " + " ".join(describe_segment(history, each) for each in in_order(segments)))
    cut = " ".join(f"{short(s)}@{state.cuts[STREAM].offsets[s]}" for s in in_order(state.cuts[STREAM].offsets))
    lines.append(f"cut: {cut}" + (" (end of data)" if state.end_of_data else ""))
    return lines


def in_order(segments: object) -> list[SegmentId]:
    return sorted(segments, key=lambda segment: int(segment.rpartition("/")[2]))  # type: ignore[call-overload, no-any-return]


def short(segment: SegmentId) -> str:
    return "s" + segment.rpartition("/")[2]


def describe_segment(history: History, segment: SegmentId) -> str:
    found = history.state.segments[segment]
    token = f"#{history.shown(found.token)}" if found.token is not None else ""
    target = f">{found.target}" if found.target is not None else ""
    return f"{short(segment)}@{found.offset}{token}{target}"
