"""Simpler versions of the product, each without one of its rules: the simulator has to find what the rule is for.

A mutation replaces a few words in a function of the product, or a constant, for as long as a ``with mutated(name)``
lasts. The words are looked for in the source as it is now, so a mutation whose words are gone says so, instead of
changing nothing.

``python -m tests.simulation.mutations [NAME ...] [--seeds N]`` runs seeds under each mutation, the known one and those
from 0 on, up to the first that breaks what the rule is for, and prints a line for each.
"""

from __future__ import annotations

import argparse
import inspect
import os
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final, NamedTuple, Protocol

from notifications.durable import DurableListening
from readergroup.group import updater
from readergroup.group.assigned_segments import AssignedSegment
from readergroup.group.following import GroupFollower
from readergroup.group.member import GroupMember
from readergroup.group.model import positions, updates, weights
from readergroup.group.model.checkpoint import CheckpointState
from readergroup.group.model.state import ReaderGroupState, SegmentState
from readergroup.group.model.updates import ConfigureStreams, RemoveReader, ResetStream
from readergroup.group.updater import GroupUpdater
from readergroup.record.recorder import NotificationRecording
from readergroup.retries.diverting import DelayedEvents
from readergroup.retries.returning import Returning
from readergroup.retries.waiting import Diverting
from readergroup.scaling.concurrent_worker import ConcurrentWorker
from readergroup.scaling.in_flight import InFlight
from readergroup.streams.data_segments import DataSegments
from readergroup.streams.retention import decision as retention
from readergroup.streams.scaling import decision as scaling
from readergroup.streams.state import AnnounceScale
from readergroup.streams.transactions.merging import Merge
from readergroup.streams.writing.appending import BatchAppender
from synchronizer.compare_and_set import Cell
from synchronizer.liveness import lease
from synchronizer.liveness.exclusive_role import ExclusiveRole
from synchronizer.liveness.lease import Lease
from synchronizer.log import entries
from synchronizer.log.batches import EntryBatcher
from synchronizer.log.compaction import Compactor
from synchronizer.log.entries import EntryLog
from synchronizer.log.writer import LogWriter
from tests.places import PACKAGES

from .auditor import Violation
from .run import run
from .scenario import generate
from .world import load_simulated
from .year import run_seed

MAX_SEEDS: Final = 2_000


class Change(Protocol):
    """Something that is put in place of something of the product."""

    def replacements(self) -> Iterator[tuple[Any, str, object]]:
        """In which module or class, under which name, what is to stand."""
        ...


class Words(NamedTuple):
    """A function, method or property that says ``say`` where it said ``instead_of``."""

    owner: Any  # its module or class
    name: str
    instead_of: str
    say: str

    def replacements(self) -> Iterator[tuple[Any, str, object]]:
        found = inspect.getattr_static(self.owner, self.name)
        if isinstance(found, property):
            assert found.fget is not None
            yield self.owner, self.name, property(self._rewritten(found.fget))
            return
        rewritten = self._rewritten(found)
        for module in [self.owner] if isinstance(self.owner, type) else _modules_with(self.name, found):
            yield module, self.name, rewritten

    def _rewritten(self, function: Callable[..., Any]) -> Callable[..., Any]:
        source = textwrap.dedent(inspect.getsource(function))
        if source.count(self.instead_of) != 1:
            raise LookupError(
                f"{function.__qualname__} does not say {self.instead_of!r} once; bring the mutation up to date"
            )
        source = source.replace(self.instead_of, self.say).removeprefix("@property\n")
        made: dict[str, Callable[..., Any]] = {}
        code = compile("from __future__ import annotations\n" + source, f"<{self.name}, mutated>", "exec")
        exec(code, function.__globals__, made)
        return made[function.__name__]


class Constant(NamedTuple):
    """A constant of a module that has another value."""

    module: ModuleType
    name: str
    value: object

    def replacements(self) -> Iterator[tuple[Any, str, object]]:
        assert hasattr(self.module, self.name), self
        yield self.module, self.name, self.value


def _modules_with(name: str, found: object) -> Iterator[ModuleType]:
    """All modules of the product that hold ``found`` under this name: its own, and those that import it."""
    for module_name, module in list(sys.modules.items()):
        if module_name.split(".")[0] in PACKAGES and vars(module).get(name) is found:
            yield module


@dataclass(frozen=True)
class Mutation:
    """One rule taken out of the product."""

    name: str
    #: What the simpler product does.
    instead: str
    #: A seed that showed it when this was written: it is tried first, and then those from 0 on.
    first: int
    #: The guarantees of which one is to be seen broken. "bug": the product itself fails.
    breaks: frozenset[str]
    changes: tuple[Change, ...]
    #: The seed is one of weeks (`year`).
    long: bool = False

    def violations(self, seed: int) -> list[Violation]:
        """What breaks in the product as it is now."""
        return run_seed(seed).violations if self.long else run(generate(seed)).violations


MUTATIONS: Final[tuple[Mutation, ...]] = (
    Mutation(
        "fencing check",
        "What a reader says of a segment counts, whoever owns that by now and under whichever token.",
        145,
        frozenset({"S1"}),
        (
            Words(updater, "_is_current", " and found.owner == reader and found.token == reached.token", ""),
            Words(updater, "_check_member", "if state.reader(reader).lease != lease:", "if False:"),
            Words(positions, "current_offsets", "found.owner == reader and found.token == token and ", ""),
            Words(ReaderGroupState, "owned_segment", "if found.owner != reader:", "if False:"),
            Words(GroupUpdater, "remove_reader", " or lease not in (None, found.lease)", ""),
        ),
    ),
    Mutation(
        "lease comparison",
        "A renewal, and the positions in it, is written over whatever is there: also after the reader was removed.",
        3,
        frozenset({"S1"}),
        (
            Words(
                Lease,
                "renew",
                "outcome = self._cell.change(",
                "self._cell.stored = __import__('synchronizer').ANY; outcome = self._cell.change(",
            ),
        ),
    ),
    Mutation(
        "predecessor rule",
        "The successors of a segment are given out as soon as the group knows of them.",
        2,
        frozenset({"S3"}),
        (Words(SegmentState, "readable", " and not self.waiting_for", ""),),
    ),
    Mutation(
        "validation of nothing to do",
        "A call that finds nothing to do, or whose generator raises, returns without having looked for a newer state.",
        4,
        frozenset({"S4"}),
        (Words(LogWriter, "_decide_until_final", "fetched = False  #", "fetched = True  #"),),
    ),
    Mutation(
        "monotonic positions",
        "The last position that was said is taken, also one before an earlier one.",
        0,
        frozenset({"S1"}),
        (
            Words(AssignedSegment, "process_to", "max(self.processed, offset)", "offset"),
            Words(updates, "_forward", "if offset < found.offset:", "if False:"),
            Words(positions, "current_offsets", " and offset > found.offset", ""),
        ),
    ),
    Mutation(
        "apply before append",
        "Entries are appended wherever the log ends, and not only behind what they were applied to.",
        0,
        frozenset({"S4"}),
        (Words(EntryLog, "append", "expected_offset=offset", "expected_offset=None"),),
    ),
    Mutation(
        "self-stop of a reader",
        "A reader hands out events until it hears that it was removed, however long it has not renewed its lease.",
        404,
        frozenset({"S1"}),
        (
            Words(
                Lease,
                "keep_to",
                "self.expires_at = self.renewed_at + STOP_AFTER * timeout_seconds",
                'self.expires_at = float("inf")',
            ),
        ),
    ),
    Mutation(
        "previous mark",
        "A compaction gives up the log before its own mark at once, and not before the one that it replaced.",
        5,
        frozenset({"S5"}),
        (
            Words(
                Compactor,
                "compact",
                "(old.next_offset if old else 0) if keep_last else new.next_offset",
                "new.next_offset",
            ),
        ),
    ),
    Mutation(
        "comparison of marks",
        "A compaction that was overtaken sets its mark all the same.",
        28,
        frozenset({"S5"}),
        (
            Words(
                EntryLog,
                "move_mark",
                "None if old is None else old.encode()",
                "self.store.attributes(self.segment, MARK).get(MARK)",
            ),
        ),
    ),
    Mutation(
        "condition of the planner",
        "Moves that were planned on the state as this process knew it are written, whatever the state is by now.",
        301,
        frozenset({"L3", "S4"}),
        (
            Words(
                GroupUpdater,
                "rebalance",
                "update_state(balance.plan)",
                "update_state_unconditionally(*balance.plan(self.state))",
            ),
        ),
    ),
    Mutation(
        "rest before weights",
        "A group records weights while segments move, so that moves add up.",
        49,
        frozenset({"L3"}),
        (Words(weights, "record", "state.handing_over or balance.plan(state)", "False"),),
    ),
    Mutation(
        "whose value a cell finds",
        "A change that loses a comparison takes what it finds for a value of its own.",
        3,
        frozenset({"S1"}),
        (Words(Cell, "change", "was_own = found in self._tried", "was_own = True"),),
    ),
    Mutation(
        "idempotence of the writer",
        "A batch whose answer was lost is sent again without comparing the writer's event number on the segment.",
        0,
        frozenset({"S3"}),
        (
            Words(
                BatchAppender,
                "append",
                "outcome = cell.change(",
                "cell.stored = __import__('synchronizer').ANY; outcome = cell.change(",
            ),
        ),
    ),
    Mutation(
        "number of the call",
        "After a lost answer a process does not look for its own entry among those that it lost to.",
        83,
        frozenset({"S4", "bug"}),
        (Words(EntryBatcher, "_look_for_own", "if self.in_flight is not None and", "if False and"),),
    ),
    Mutation(
        "contact of observers",
        "A process that could not reach the store itself judges others by how long it has not heard of them.",
        245,
        frozenset({"L1"}),
        (Constant(lease, "CONTACT", float("inf")),),
    ),
    Mutation(
        "incarnation of the target of a hand-over",
        "A segment is handed to any reader with the target's id, and a hand-over stays planned when its target leaves.",
        1,
        frozenset({"S1"}),
        (
            Words(updates, "_hand_over", " and target.incarnation == found.target_incarnation", ""),
            Words(RemoveReader, "apply_to", "state.segment_index.planned.get(self.reader, ())", "()"),
        ),
    ),
    Mutation(
        "positions of checkpoints are recorded once",
        "Where a segment is given up is its position in every checkpoint that is under way, passed or not.",
        52,
        frozenset({"S6"}),
        (
            Words(updates, "_record", "state.checkpoints_ahead_of(found.owner)", "state.outstanding_checkpoints"),
            Words(CheckpointState, "with_position", "reader not in self.waiting or token", "token"),
        ),
    ),
    Mutation(
        "segments that move pass checkpoints",
        "A segment that is given up before its owner has passed a checkpoint stands in it where it was at first.",
        30,
        frozenset({"S6"}),
        (Words(updates, "_hand_over", "state = _record(state, segment, found, offset)", "state = state"),),
    ),
    Mutation(
        "barrier of checkpoints",
        "A reader goes on with what it was given since a checkpoint, and passes that when it looks again.",
        83,
        frozenset({"S6"}),
        (
            Words(
                GroupFollower,
                "_follow_state",
                "if ahead := state.checkpoints_ahead_of(self._member.reader_id):",
                "ahead = state.checkpoints_ahead_of(self._member.reader_id)\n"
                "        if ahead and owned.keys() <= assigned.by_id.keys():",
            ),
        ),
    ),
    Mutation(
        "readers that are lost are counted",
        "A checkpoint does not say that readers died with what they had.",
        47,
        frozenset({"S6"}),
        (Words(RemoveReader, "apply_to", 'if self.cause != "closed" and', "if False and"),),
    ),
    Mutation(
        "tokens of before a reset",
        "What was committed before a reset is where a dead reader's segments go on.",
        16,
        frozenset({"S1", "S2", "S3", "S6"}),
        (Words(positions, "current_offsets", " and found.token == token", ""),),
    ),
    Mutation(
        "a reset fails checkpoints",
        "A checkpoint that is under way when its group is reset is completed all the same.",
        29,
        frozenset({"S6"}),
        (Words(ResetStream, "apply_to", "if each.completed", "if True"),),
    ),
    Mutation(
        "progress of merges",
        "What a transaction brings to a segment is appended without comparing how far the merge has come there.",
        62,
        frozenset({"S3"}),
        (
            Words(
                Merge,
                "_merge_into",
                "after = self._encoded(chunk.after)",
                "after = self._encoded(chunk.after); cell.stored = __import__('synchronizer').ANY",
            ),
        ),
    ),
    Mutation(
        "heard is what was returned from",
        "What a durable listener is told counts as heard when it is told.",
        63,
        frozenset({"S8"}),
        (
            Words(
                DurableListening,
                "_begin_call",
                "self._call = _ListenerCall(after)",
                "self._call = _ListenerCall(after); self._role.record(*after)",
            ),
        ),
    ),
    Mutation(
        "patience with who holds the role",
        "A role is taken from whoever has it.",
        384,
        frozenset({"S1", "S8"}),
        (Words(ExclusiveRole, "take", "and not self._stood_still(now)", "and False"),),
    ),
    Mutation(
        "checksum of the predecessor",
        "An entry is applied whatever it was written behind.",
        233,
        frozenset({"S4"}),
        (Words(entries, "_decode_entry", "if named != previous:", "if False:"),),
    ),
    Mutation(
        "comparison of what is recorded",
        "Notifications are appended to the record without comparing how far that goes.",
        3,
        frozenset({"S8"}),
        (
            Words(
                NotificationRecording,
                "_append",
                "RECORDED, self._recorded.encode())",
                "RECORDED, __import__('synchronizer').ANY)",
            ),
        ),
    ),
    Mutation(
        "positions without gaps",
        "A pool commits an event that is done although one before it is not.",
        17,
        frozenset({"S2"}),
        (
            Words(
                InFlight,
                "done",
                "while items and items[0].done:",
                "lane.end = item.end; self._moved[lane] = None\n    while items and items[0].done:",
            ),
        ),
    ),
    Mutation(
        "one event of a key at a time",
        "A pool begins the events of a key as it begins those of different keys.",
        3,
        frozenset({"S3"}),
        (Words(InFlight, "add", "key = item.key", "key = item.key = None"),),
    ),
    Mutation(
        "a retry holds back its key",
        "While an event waits for its next attempt, the next one of its key begins.",
        10,
        frozenset({"S3"}),
        (
            Words(
                InFlight,
                "failed",
                "item.held = False",
                "item.held = False\n    if item.key is not None:\n        self._next_of_key(item)\n    item.key = None",
            ),
        ),
    ),
    Mutation(
        "a key outlives an assignment",
        "A reader that gets a segment back begins an event while an earlier one of its key still runs.",
        215,
        frozenset({"S3"}),
        (Words(InFlight, "add", "self._last_of_key[stream_of(segment)]", "{}"),),
    ),
    Mutation(
        "an event of a lost segment ends before those of a later one",
        "A reader begins a segment while an event of an earlier one, which it has lost, still runs.",
        403_226,
        frozenset({"S3"}),
        (Words(ConcurrentWorker, "_must_wait", "return any", "return False and any"),),
    ),
    Mutation(
        "bound of what is finished behind a gap",
        "A pool takes events of a segment however many lie behind its first unfinished one.",
        17,
        frozenset({"S2"}),
        (
            Words(
                ConcurrentWorker,
                "_settle",
                "lane.events > self._window - self._most_taken or lane.size >= WINDOW_BYTES",
                "False",
            ),
        ),
    ),
    Mutation(
        "a segment settles before it moves",
        "A pool gives up a segment, and passes checkpoints, while events of it run.",
        3,
        frozenset({"S3", "S6"}),
        (Words(ConcurrentWorker, "is_settled", "settled = lane.settled", "settled = True"),),
    ),
    Mutation(
        "an added stream is read whole",
        "A group that adds a stream leaves out the first of its segments.",
        19,
        frozenset({"S2", "S6"}),
        (
            Words(
                ConfigureStreams,
                "apply_to",
                "for segment, found in start.segments.items():",
                "for segment, found in [*start.segments.items()][1:]:",
            ),
        ),
    ),
    Mutation(
        "what waits is stored once",
        "A reader that takes over a segment does not look which of its events wait.",
        2166,
        frozenset({"S3"}),
        (Words(Diverting, "_take_over", "for each in log.all()", "for each in ()"),),
    ),
    Mutation(
        "a retry ends a wait",
        "Events that were returned to their group go on waiting.",
        28,
        frozenset({"S3"}),
        (Words(Returning, "_return", "self._store.truncate(log.segment, frames[-1].end)", "pass"),),
    ),
    Mutation(
        "returned events are known",
        "A process that returns events does not look which of them a former one has returned.",
        3915,
        frozenset({"S3"}),
        (Words(Returning, "_return", "left.pop(row, None)", "pass"),),
    ),
    Mutation(
        "a failure waits before it counts",
        "An event that failed counts as processed and is not stored for its retry.",
        28,
        frozenset({"S2"}),
        (Words(DelayedEvents, "divert", "self._diverting.put(waiting, delay, event.fencing_token)", "pass"),),
    ),
    Mutation(
        "a closed reader leaves",
        "A reader that is closed gives up its lease, and its group waits until that has run out.",
        0,
        frozenset({"L1"}),
        (Words(GroupMember, "leave", "if self._gone is None:", "if False:"),),
    ),
)

#: Rules without which weeks go wrong. R1: a stream keeps more than its policy allows. R2: something grows without end.
LONG_MUTATIONS: Final[tuple[Mutation, ...]] = (
    Mutation(
        "consumption by all",
        "Retention deletes what the first subscribed group has consumed.",
        2,
        frozenset({"S2"}),
        (Words(retention, "_consumed", "bounds = list(consumed.values())", "bounds = [*consumed.values()][:1]"),),
        long=True,
    ),
    Mutation(
        "limit of size",
        "Retention deletes from twice the size on.",
        11,
        frozenset({"R1"}),
        (Words(retention, "_last_within", "if left <= size)", "if left <= 2 * size)"),),
        long=True,
    ),
    Mutation(
        "the keys of a scale",
        "A split leaves the last of its parts out.",
        0,
        frozenset({"S3"}),
        (
            Words(scaling, "_split", ".keys.split(parts[number])", ".keys.split(parts[number])[:-1]"),
            Words(AnnounceScale, "apply_to", "if _covered(each.keys", "if False and _covered(each.keys"),
        ),
        long=True,
    ),
    Mutation(
        "forgotten segments",
        "Segments that were retired stay in the metadata.",
        1,
        frozenset({"R2"}),
        (Words(DataSegments, "delete_retired", "if not old:", "if True:"),),
        long=True,
    ),
)

BY_NAME: Final = {mutation.name: mutation for mutation in (*MUTATIONS, *LONG_MUTATIONS)}


@contextmanager
def mutated(name: str) -> Iterator[None]:
    """Inside, the product lacks this rule."""
    load_simulated()  # a module that is loaded inside would keep the mutation
    with ExitStack() as undo:
        for change in BY_NAME[name].changes:
            for place, attribute, value in list(change.replacements()):
                undo.callback(setattr, place, attribute, inspect.getattr_static(place, attribute))
                setattr(place, attribute, value)
        yield


class Found(NamedTuple):
    """A seed that breaks, under a mutation and only under it, what its rule is for."""

    seed: int
    violation: Violation


def search(name: str, seeds: int = MAX_SEEDS) -> Found | None:
    """A seed that shows what the rule is for, if it is one of so many from 0 on."""
    mutation = BY_NAME[name]
    for seed in (mutation.first, *range(seeds)):
        with mutated(name):
            violations = mutation.violations(seed)
        if violations and violations[0].guarantee in mutation.breaks and not mutation.violations(seed):
            return Found(seed, violations[0])
    return None


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.mutations", description="What each rule is for.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"all, or some of: {', '.join(BY_NAME)}")
    parser.add_argument("--seeds", type=int, default=MAX_SEEDS, help="how many seeds to try at most")
    options = parser.parse_args(arguments)
    missing = 0
    for name in options.names or [mutation.name for mutation in MUTATIONS]:
        found = search(name, options.seeds)
        missing += found is None
        told = f"seed {found.seed}: {found.violation}" if found else f"not found in {options.seeds} seeds"
        print(f"{name}: {told}", flush=True)
    return missing


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":  # which order sets have is part of a run
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.simulation.mutations", *sys.argv[1:]])
    sys.exit(main(sys.argv[1:]))
