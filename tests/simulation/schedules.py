"""The schedules that break simpler protocols, each as a scenario of its own, with the real product.

Each brings about one interleaving exactly. That it came about is read off `sightings`; what came of it is the auditor's
to judge. The same patterns are looked for in random runs, so that what is arranged here is also found by chance.

Which of the 24 has its scenario here, and what is tested elsewhere because it is a matter of one backend, is in
``docs/schedules.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import readergroup as rg
from readergroup.group.model.checkpoint import CheckpointState
from readergroup.group.model.positions import decode_positions
from readergroup.group.model.updates import CompleteSegment, CreateCheckpoint, RecordWeights
from readergroup.streams.config import SegmentId, data_segment
from synchronizer import Appended, CorruptStateError, OutcomeUnknownError, StateSynchronizer, StateTooLargeError
from synchronizer.limits import DEFAULT_STATE_LIMIT_BYTES

from .actors import GROUP
from .ledger import LEDGER_UPDATES, Enter, Ledger
from .restoring import Archive
from .run import Outcome, run
from .scenario import Actor, Mishap, Scenario
from .stage import GROUP_LOG, LEDGER_LOG, Call, Gate, Matches, Stage
from .world import Done, Process

STREAM: Final = "shop/orders"
TIMEOUT: Final = 2.0

#: Looks at what came of a run.
Check = Callable[[Outcome], None]
#: Arranges what is to happen, and may say what to look at in the end.
Arrange = Callable[[Stage], "Check | None"]


@dataclass(frozen=True)
class Schedule:
    """A scenario, and what is arranged in it."""

    name: str
    #: What has to be seen in the run.
    sighting: str
    scenario: Scenario
    arrange: Arrange

    def run(self, *, transcript: bool = False) -> tuple[Outcome, Stage]:
        """Run it, and look at what came of it."""
        stages: list[Stage] = []
        checks: list[Check | None] = []

        def watch(running: Any) -> None:
            stages.append(Stage(running))
            checks.append(self.arrange(stages[0]))

        outcome = run(self.scenario, transcript=transcript, watch=watch)
        check = checks[0]
        if check is not None and not outcome.failed:
            check(outcome)
        return outcome, stages[0]


SCHEDULES: Final[dict[str, Schedule]] = {}


def schedule(
    sighting: str, *actors: Actor, mishaps: tuple[Mishap, ...] = (), **fields: Any
) -> Callable[[Arrange], Arrange]:
    """A schedule that is named after the function that arranges it."""
    usual = {"seed": 1, "duration": 5.0, "timeout": TIMEOUT, "segments": 2, "events": 40, "accidents": False}
    fields = usual | fields

    def register(arrange: Arrange) -> Arrange:
        name = f"{sighting} {arrange.__name__.replace('_', ' ')}"  # type: ignore[attr-defined]
        SCHEDULES[name] = Schedule(name, sighting, Scenario(actors=actors, mishaps=mishaps, **fields), arrange)
        return arrange

    return register


def reader(number: int, subject: str = "", *, at: float = 0.0, pause: float = 0.01) -> Actor:
    return Actor(f"reader{number}", "reader", subject=subject or f"r{number}", at=at, style="read", pause=pause)


def scaler(at: float) -> Actor:
    return Actor("scaler1", "scaler", subject=STREAM, at=at)


WRITER: Final = Actor("writer1", "writer", subject=STREAM)


def writes(tag: str, log: str = "") -> Matches:
    return lambda call: call.writes(tag, log)


def renews(call: Call) -> bool:
    return call.renews


def stores_events(call: Call) -> bool:
    return call.stores_events


def by(name: str, matches: Matches) -> Matches:
    """Such a call of the process ``name``."""
    return lambda call: call.process.name == name and matches(call)


ENTERS: Final = writes("enter", LEDGER_LOG)


def ledger_of(process: Process) -> StateSynchronizer[Ledger]:
    return process.client().synchronizer("ledger", initial=Ledger(), updates=LEDGER_UPDATES)


def enter(entry: str) -> Callable[[Ledger], list[Enter]]:
    """Enter it, unless it is there."""
    return lambda state: [] if entry in state.entries else [Enter(entry=entry, seen=len(state.entries))]


def enter_once(entry: str) -> Callable[[Ledger], list[Enter]]:
    """Enter it; a second time cannot be applied."""
    return lambda state: [Enter(entry=entry, seen=len(state.entries))]


def entries(outcome: Outcome) -> dict[str, int]:
    return dict(outcome.auditor.folds[LEDGER_LOG].replica.state.entries)


# ---------------------------------------------------------------------- F1, F2: answers and requests that are lost


@schedule("F1")
def the_answer_to_an_update_is_lost(stage: Stage) -> Check:
    """Another process has appended behind the entry before its writer asks again."""
    ends: list[int] = []

    def lose(call: Call) -> str:
        ends.append(stage.length(LEDGER_LOG) + len(call.data))
        return "lost answer"

    stage.before(by("first", ENTERS), lose)
    stage.hold(by("second", ENTERS), lambda: bool(ends) and stage.length(LEDGER_LOG) >= ends[0])
    stage.hold(by("first", ENTERS), lambda: stage.length(LEDGER_LOG) > ends[0])
    for name in ("first", "second"):
        stage.also(name, lambda process: ledger_of(process).update_state(enter_once(process.name)), at=0.5)

    def check(outcome: Outcome) -> None:
        assert entries(outcome) == {"first": 0, "second": 1}

    return check


@schedule("F1")
def the_entry_is_compacted_away_before_its_writer_has_looked(stage: Stage) -> Check:
    compacted: list[bool] = []

    def first(process: Process) -> None:
        try:
            ledger_of(process).update_state(enter_once("first"))
        except OutcomeUnknownError:
            stage.notes.append("unknown")

    def second(process: Process) -> None:
        ledger = ledger_of(process)
        stage.wait_until(lambda: stage.length(LEDGER_LOG) > 100)
        for entry in ("second", "third"):
            ledger.update_state(enter(entry))
            compacted.append(ledger.compact())

    stage.fault(by("first", ENTERS), "lost answer")
    stage.hold(by("first", ENTERS), lambda: compacted == [True, True])
    stage.also("first", first, at=0.5)
    stage.also("second", second, at=0.5)

    def check(outcome: Outcome) -> None:
        assert stage.notes == ["unknown"]
        assert entries(outcome) == {"first": 0, "second": 1, "third": 2}

    return check


@schedule("F2.1")
def an_update_without_a_condition_comes_to_another_state(stage: Stage) -> Check:
    """Both enter the first line, whatever the state: behind the other it could not be applied, by anybody."""

    def work(process: Process) -> None:
        ledger = ledger_of(process)
        try:
            ledger.update_state_unconditionally(Enter(entry=process.name, seen=0))
        except ValueError:
            stage.notes.append(f"{process.name} is refused")
        ledger.update_state(enter(f"{process.name} again"))

    gate = stage.hold(by("first", ENTERS), lambda: stage.length(LEDGER_LOG) > 100)
    stage.hold(by("second", ENTERS), lambda: gate.reached)
    stage.also("first", work, at=0.5)
    stage.also("second", work, at=0.5)

    def check(outcome: Outcome) -> None:
        assert stage.notes == ["first is refused"]
        assert entries(outcome).keys() == {"second", "second again", "first again"}

    return check


@schedule("F2.2")
def a_request_that_was_given_up_arrives(stage: Stage) -> Check:
    stage.before(by("first", ENTERS), lambda call: stage.send_late(call, lambda: stage.length(LEDGER_LOG) > 150))

    def work(process: Process) -> None:
        ledger = ledger_of(process)
        ledger.update_state(enter("first"))
        ledger.update_state(enter("second"))

    stage.also("first", work, at=0.5)

    def check(outcome: Outcome) -> None:
        assert entries(outcome) == {"first": 0, "second": 1}

    return check


# ---------------------------------------------------------------------- F3: deleted and created again


@schedule("F3.2", WRITER, reader(1), reader(2), reader(3, at=1.5))
def a_group_is_created_again_under_its_readers(stage: Stage) -> Check:
    """A reader that is about to join the group joins another one of its name."""
    gate = stage.hold(by("reader3", writes("add_reader")), lambda: bool(stage.notes))

    def found_anew(process: Process) -> None:
        client = process.client()
        stage.wait_until(lambda: gate.reached)
        client.groups.delete(GROUP)
        stage.run.found(client)
        stage.notes.append("founded")

    stage.also("founder", found_anew, at=1.4)

    def check(outcome: Outcome) -> None:
        assert stage.seen["F3.1"]

    return check


@schedule("F3.3", WRITER, reader(1), scaler(1.0))
def a_stream_is_created_again_under_its_scaler(stage: Stage) -> None:
    """The scaler has announced, and not yet sealed, when the stream is deleted and created."""
    gate = stage.hold(by("scaler1", lambda call: call.verb == "seal"), lambda: bool(stage.notes))

    def found_anew(process: Process) -> None:
        client = process.client()
        stage.wait_until(lambda: gate.reached)
        client.groups.delete(GROUP)
        client.streams.delete(STREAM)
        stage.run.found(client)
        stage.notes.append("founded")

    stage.also("founder", found_anew)


# ---------------------------------------------------------------------- F4: leases, removals and positions


@schedule("F4.1", WRITER, reader(1), reader(2))
def a_silent_reader_renews_before_its_removal_is_stored(stage: Stage) -> Check:
    renewed: list[float] = []
    removal = stage.hold(by("reader1", writes("remove_reader")), lambda: bool(renewed))
    stage.hold(by("reader2", renews), lambda: removal.reached)
    stage.after(lambda done: removal.reached and _renewed(done, "reader2"), lambda done: renewed.append(1))

    def check(outcome: Outcome) -> None:
        assert not stage.removals("dead")

    return check


@schedule("F4.2", WRITER, reader(1), reader(2), seed=2)
def a_renewal_arrives_after_the_removal(stage: Stage) -> Check:
    stage.hold(by("reader2", renews), lambda: bool(stage.removals("dead")))

    def check(outcome: Outcome) -> None:
        assert stage.removals("dead") == 1
        assert [name for name, _ in outcome.auditor.lives].count("r2") == 2, "it joins again"

    return check


@schedule("F4.3", WRITER, reader(1), reader(2, at=1.5))
def a_commit_comes_when_one_of_its_segments_has_changed_hands(stage: Stage) -> None:
    def owns_something() -> bool:
        return stage.group is not None and bool(stage.group.owned.get("r2"))

    stage.hold(by("reader1", lambda call: call.renews and len(_positions(call)) == 2), owns_something)


@schedule("F4.4", WRITER, reader(1), reader(2))
def a_dead_readers_last_renewal_arrives_after_its_removal(stage: Stage) -> None:
    def send_and_die(call: Call) -> None:
        stage.send_late(call, lambda: bool(stage.removals("dead")))
        stage.kill("reader2")

    stage.before(by("reader2", renews), send_and_die)


@schedule("F4.5", WRITER, reader(1), reader(2))
def a_commit_comes_between_the_reading_of_positions_and_the_removal(stage: Stage) -> Check:
    def wait_for_commit(call: Call) -> None:
        attribute, change = next(iter(call.attributes.items()))
        assert isinstance(change.expected, bytes)
        before = decode_positions(change.expected)

        def has_committed() -> bool:
            value = stage.world.memory.attributes(GROUP_LOG)[attribute]
            return decode_positions(value) != before

        stage.wait_until(has_committed)

    def remove(process: Process) -> None:
        group = process.client().groups.get(GROUP)
        assert group.remove_reader("r1")

    stage.before(by("remover", writes("remove_reader")), wait_for_commit)
    stage.also("remover", remove, at=0.8)

    def check(outcome: Outcome) -> None:
        assert stage.removals("removed") == 1

    return check


def _renewed(done: Done, name: str) -> bool:
    is_renewal = Call(done.process, done.verb, done.segment, done.data, done.attributes).renews
    return done.process.name == name and is_renewal and isinstance(done.result, Appended)


def _positions(call: Call) -> Mapping[Any, Any]:
    values = [change.new for change in call.attributes.values() if change.new is not None]
    return decode_positions(values[0])


# ---------------------------------------------------------------------- F5: checkpoints while segments change hands

FIRST: Final = SegmentId("shop/orders/0")
SECOND: Final = SegmentId("shop/orders/1")


def begin_checkpoints(process: Process, *names: str) -> None:
    """Begin them, and wait for nobody."""
    begun = [CreateCheckpoint(name=name) for name in names]
    process.client().groups.get(GROUP).synchronizer.update_state(lambda state: begun)


def move(process: Process, segment: SegmentId, reader: str) -> None:
    """Somebody weighs the segment anew and wants it elsewhere."""
    moves = [RecordWeights(weights={segment: 0}), rg.ReassignSegment(segment=segment, reader=reader)]
    process.client().groups.get(GROUP).synchronizer.update_state(lambda state: moves)


def ahead_of(stage: Stage, reader: str) -> Sequence[CheckpointState]:
    return () if stage.group is None else stage.group.checkpoints_ahead_of(reader)


def has_begun(stage: Stage) -> bool:
    return any(isinstance(update, CreateCheckpoint) for _, update in stage.updates)


def has_passed(stage: Stage, reader: str) -> bool:
    """Whether the reader has passed all checkpoints that were begun up to now, of which there are some."""
    return has_begun(stage) and not ahead_of(stage, reader)


def has_completed(stage: Stage) -> bool:
    return any(isinstance(update, CompleteSegment) for _, update in stage.updates)


def owner_of(stage: Stage, segment: SegmentId) -> str | None:
    return None if stage.group is None or segment not in stage.group.segments else stage.group.segments[segment].owner


def shared_out(stage: Stage) -> SegmentId:
    """Wait until r1 and r2 have one of the two segments each; that of r1."""
    stage.wait_until(lambda: {owner_of(stage, FIRST), owner_of(stage, SECOND)} == {"r1", "r2"})
    return next(segment for segment in (FIRST, SECOND) if owner_of(stage, segment) == "r1")


def all_completed(stage: Stage, number: int = 1) -> Check:
    """The checkpoints came about, and the auditor has compared them with what the readers kept."""

    def check(outcome: Outcome) -> None:
        assert outcome.auditor.keeping.counts["completed"] >= number

    return check


@schedule("F5.1", WRITER, reader(1), reader(2), keeps=True)
def a_segment_goes_to_a_reader_that_has_not_passed_the_checkpoint(stage: Stage) -> Check:
    """What the first owner has handed out since it passed is in nobody's keeping."""

    def work(process: Process) -> None:
        mine = shared_out(stage)
        stage.hold(by("reader2", writes("pass_checkpoint")), lambda: owner_of(stage, mine) == "r2")
        begin_checkpoints(process, "nightly")
        stage.wait_until(lambda: has_passed(stage, "r1"))
        process.sleep(0.3)  # its owner goes on
        move(process, mine, "r2")

    stage.also("keeper", work, at=0.5)
    return all_completed(stage)


@schedule("F5.2", WRITER, reader(1), reader(2), keeps=True)
def a_segment_goes_to_a_reader_that_has_passed_the_checkpoint(stage: Stage) -> Check:
    """Its owner is about to release it when the checkpoint begins."""

    def work(process: Process) -> None:
        mine = shared_out(stage)
        gate = stage.hold(by("reader1", writes("release")), lambda: has_passed(stage, "r2"))
        move(process, mine, "r2")
        stage.wait_until(lambda: gate.reached)
        begin_checkpoints(process, "nightly")

    stage.also("keeper", work, at=0.5)
    return all_completed(stage)


@schedule("F5.3", WRITER, reader(1), reader(2), keeps=True)
def a_checkpoint_comes_between_the_two_halves_of_a_merge(stage: Stage) -> Check:
    """Neither reader has passed when the first half is completed; what comes after the merge waits for them."""

    def work(process: Process) -> None:
        shared_out(stage)
        first = stage.hold(by("reader1", writes("complete")), lambda: has_begun(stage))
        second = stage.hold(by("reader2", writes("complete")), lambda: has_completed(stage))
        process.client().streams.scale(STREAM, merge=[0, 1])
        stage.wait_until(lambda: first.reached and second.reached)
        begin_checkpoints(process, "nightly")

    stage.also("keeper", work, at=1.0)
    return all_completed(stage)


@schedule("F5.4", WRITER, reader(1), reader(2), keeps=True)
def a_reader_dies_that_a_checkpoint_waits_for(stage: Stage) -> Check:
    """It has kept what it had, and its segments go on where it had committed."""
    stage.before(by("reader1", writes("pass_checkpoint")), lambda call: stage.kill("reader1"))
    stage.also("keeper", lambda process: begin_checkpoints(process, "nightly"), at=1.0)
    return all_completed(stage)


@schedule("F5.5", WRITER, reader(1), reader(2), keeps=True)
def two_checkpoints_are_under_way(stage: Stage) -> Check:
    """One reader has passed both and the other one of them, and they hand a segment over."""

    def work(process: Process) -> None:
        shared_out(stage)
        other = next(segment for segment in (FIRST, SECOND) if owner_of(stage, segment) == "r2")

        def is_the_second(call: Call) -> bool:
            return call.writes("pass_checkpoint") and len(ahead_of(stage, "r1")) == 1

        stage.hold(by("reader1", writes("pass_checkpoint")), lambda: has_passed(stage, "r2"))
        gate = stage.hold(by("reader1", is_the_second), lambda: owner_of(stage, other) == "r1")
        begin_checkpoints(process, "first", "second")
        stage.wait_until(lambda: gate.reached and has_passed(stage, "r2"))
        process.sleep(0.3)  # the one that has passed goes on
        move(process, other, "r1")

    stage.also("keeper", work, at=0.5)
    return all_completed(stage, 2)


@schedule("F5.6", WRITER, reader(1), reader(2), keeps=True)
def a_position_of_before_a_reset_arrives_after_it(stage: Stage) -> Check:
    """Then the reader dies: nobody has heard of the reset from it."""

    def work(process: Process) -> None:
        group = process.client().groups.get(GROUP)
        to = group.checkpoint("nightly", timeout=10)
        process.sleep(0.5)
        gate = stage.hold(by("reader1", renews), lambda: bool(stage.run.auditor.reset_at))
        stage.wait_until(lambda: gate.reached)
        stage.hold_in_hand("reader1", lambda: False)
        group.reset(to)
        stage.wait_until(lambda: bool(stage.seen["F5.6"]))
        stage.kill("reader1")

    stage.also("keeper", work, at=0.5)

    def check(outcome: Outcome) -> None:
        assert outcome.auditor.keeping.counts["resets"] == 1
        assert outcome.auditor.deliveries > sum(outcome.auditor.stored.values())

    return check


# ---------------------------------------------------------------------- F6, F7, F8: ends of segments


@schedule("F6.1", reader(1), reader(2, at=2.0), segments=1)
def a_reader_dies_with_the_last_event_of_a_sealed_segment_in_hand(stage: Stage) -> None:
    scaled = [False]

    def is_last(event: rg.Event[bytes]) -> bool:
        return len(stage.run.auditor.stored) == 6 and _end(stage, event) == event.next_offset

    def die_when_scaled() -> None:
        scaled[0] = True
        stage.wait_until(lambda: stage.stream is not None and stage.stream.epoch == 1)
        stage.kill("reader1")

    def scale(process: Process) -> None:
        stage.wait_until(lambda: scaled[0])
        process.client().streams.scale(STREAM, split=[0])

    stage.while_in_hand("reader1", is_last, die_when_scaled)
    stage.also("author", partial(_write, stage, 3), at=0.5)
    stage.also("scaler", scale)


@schedule("F6.2", WRITER, reader(1), reader(2), scaler(1.0))
def a_scaler_dies_before_it_has_published(stage: Stage) -> None:
    stage.before(by("scaler1", writes("publish-scale")), lambda call: stage.kill("scaler1"))


@schedule("F6.3", WRITER, reader(1), segments=1)
def data_is_truncated_before_it_was_read(stage: Stage) -> None:
    truncated = [False]

    def truncate(process: Process) -> None:
        streams = process.client().streams
        stage.wait_until(lambda: sum(stage.run.auditor.stored.values()) >= 30)
        streams.truncate(STREAM, streams.info(STREAM).tail)
        truncated[0] = True

    stage.hold_in_hand("reader1", lambda: truncated[0])
    stage.also("keeper", truncate)


@schedule("F7", WRITER, reader(1))
def an_append_comes_to_a_segment_that_was_sealed_meanwhile(stage: Stage) -> None:
    gate = stage.hold(by("writer1", stores_events), lambda: _is_sealed(stage, gate))
    stage.also("scaler", partial(_split, stage, gate))


@schedule("F8.1", WRITER, reader(1))
def the_answer_is_lost_then_the_segment_is_sealed(stage: Stage) -> None:
    gate = _hold_again(stage, "lost answer")
    stage.also("scaler", partial(_split, stage, gate))


@schedule("F8.1", WRITER, reader(1))
def the_request_is_lost_then_the_segment_is_sealed(stage: Stage) -> None:
    gate = _hold_again(stage, "lost request")
    stage.also("scaler", partial(_split, stage, gate))


@schedule("F8.2", WRITER, reader(1))
def the_answer_is_lost_then_the_stream_is_deleted(stage: Stage) -> None:
    stage.fault(by("writer1", stores_events), "lost answer")
    gate = stage.hold(by("writer1", stores_events), lambda: bool(stage.notes))

    def found_anew(process: Process) -> None:
        client = process.client()
        stage.wait_until(lambda: gate.reached)
        client.groups.delete(GROUP)
        client.streams.delete(STREAM)
        stage.notes.append("deleted")
        stage.run.found(client)

    stage.also("founder", found_anew)


@schedule("F8.3", reader(1))
def two_segments_with_appends_in_doubt_are_merged(stage: Stage) -> Check:
    """One of the appends is stored, the other is not, and newer events of both keys come behind them."""
    gates = []
    for number, fault in enumerate(("lost answer", "lost request")):
        matches = _stores_in(number)
        stage.fault(matches, fault)
        gates.append(stage.hold(matches, lambda number=number: _is_sealed(stage, gates[number])))  # type: ignore[misc]

    def merge(process: Process) -> None:
        stage.wait_until(lambda: all(gate.reached for gate in gates))
        process.client().streams.scale(STREAM, merge=[0, 1])

    stage.also("scaler", merge)
    stage.also("author", partial(_write, stage, 3), at=0.5)

    def check(outcome: Outcome) -> None:
        assert outcome.auditor.stored == {(key, number): 1 for key in KEYS for number in range(3)}

    return check


@schedule("F8.4", reader(1))
def a_predecessor_takes_events_when_the_other_is_sealed(stage: Stage) -> Check:
    """The successor is announced. What a writer has is still for the segment that is open."""

    def stored_in_1() -> bool:
        found = [data for name, data in stage.run.auditor.data.items() if name.endswith("/1")]
        return bool(found) and bool(found[0].events)

    def seals_1(call: Call) -> bool:  # whoever does: readers finish the scale as well
        return call.verb == "seal" and call.segment.endswith("/1")

    gates = [stage.hold(seals_1, stored_in_1) for _ in range(10)]

    def write(process: Process) -> None:
        stage.wait_until(lambda: gates[0].reached)
        _write(stage, 3, process)

    stage.also("author", write)
    stage.also("scaler", lambda process: process.client().streams.scale(STREAM, merge=[0, 1]), at=0.5)

    def check(outcome: Outcome) -> None:
        assert outcome.auditor.stored == {(key, number): 1 for key in KEYS for number in range(3)}

    return check


#: Routing keys of the first and the second segment of two.
KEYS: Final = ("2", "0")


def _write(stage: Stage, count: int, process: Process) -> None:
    """Events of both keys, each flushed in turn, and told to the auditor."""
    events = [(key, number) for number in range(count) for key in KEYS]
    with process.client().writer(STREAM) as writer:
        for key, number in events:
            writer.write(f"{key}:{number}".encode(), routing_key=key)
    stage.run.auditor.acknowledged(process, events)


def _stores_in(number: int) -> Matches:
    return lambda call: call.stores_events and call.segment.endswith(f"/{number}")


def _is_sealed(stage: Stage, gate: Gate) -> bool:
    return gate.call is not None and stage.world.memory.info(gate.call.segment).sealed


def _hold_again(stage: Stage, fault: str) -> Gate:
    """Let an append of events meet the fault, and hold its repetition until the segment is sealed."""
    hit: list[Call] = []

    def meet(call: Call) -> str:
        hit.append(call)
        return fault

    def is_again(call: Call) -> bool:
        return bool(hit) and call.segment == hit[0].segment and call is not hit[0]

    stage.before(by("writer1", stores_events), meet)
    gate = stage.hold(by("writer1", is_again), lambda: _is_sealed(stage, gate))
    return gate


def _split(stage: Stage, gate: Gate, process: Process) -> None:
    """Split the segment that a writer is held before."""
    stage.wait_until(lambda: gate.reached)
    assert gate.call is not None
    process.client().streams.scale(STREAM, split=[int(gate.call.segment.rpartition("/")[2])])


def _end(stage: Stage, event: rg.Event[bytes]) -> int:
    return stage.run.auditor.data[data_segment(event.segment, event.pointer.incarnation)].end


# ---------------------------------------------------------------------- F9, F10: outages, hand-overs


@schedule(
    "F9",
    WRITER,
    *(reader(number) for number in (1, 2, 3)),
    duration=8.0,
    mishaps=(
        Mishap(1.5, "away", seconds=2.2 * TIMEOUT),
        Mishap(1.5, "cut off", "reader2", seconds=2.2 * TIMEOUT + 1.2),
        Mishap(1.5, "cut off", "reader3", seconds=2.2 * TIMEOUT + 1.2),
    ),
)
def the_store_comes_back_for_one_reader_first(stage: Stage) -> Check:
    def check(outcome: Outcome) -> None:
        assert not stage.removals("dead")

    return check


@schedule("F10.1", WRITER, reader(1), reader(2, at=1.0))
def the_target_of_a_hand_over_dies(stage: Stage) -> None:
    def lose_target() -> None:
        stage.wait_until(lambda: stage.is_marked_for("r2"))
        stage.kill("reader2")
        stage.wait_until(lambda: not stage.has("r2"))

    stage.while_in_hand("reader1", lambda event: True, lose_target)


@schedule("F10.2", WRITER, reader(1), reader(2, at=1.0), reader(3, "r2", at=1.5))
def the_target_of_a_hand_over_comes_back_under_its_id(stage: Stage) -> None:
    def replace_target() -> None:
        stage.wait_until(lambda: stage.is_marked_for("r2"))
        stage.kill("reader2")
        stage.wait_until(lambda: bool(stage.removals("replaced")))

    stage.while_in_hand("reader1", lambda event: True, replace_target)


@schedule("F10.3", WRITER, reader(1), reader(2, at=1.0), reader(3, at=2.0))
def both_sides_of_a_hand_over_die(stage: Stage) -> Check:
    def kill_both() -> None:
        stage.wait_until(lambda: stage.is_marked_for("r2"))
        stage.kill("reader2")
        stage.kill("reader1")

    stage.while_in_hand("reader1", lambda event: True, kill_both)

    def check(outcome: Outcome) -> None:
        assert stage.removals("dead") == 2

    return check


# ---------------------------------------------------------------------- F11, F12: planners and releases


@schedule("F11", reader(1), reader(2), segments=4)
def two_processes_plan_at_once(stage: Stage) -> None:
    """Two observers, besides, weigh the segments differently; what is recorded last counts for all."""
    planned = stage.run.auditor.planned_at

    def moves_only(call: Call) -> bool:
        others = ("add_reader", "remove_reader", "release", "complete", "add_epoch", "record_weights")
        return call.writes("reassign", GROUP_LOG) and not any(call.writes(tag) for tag in others)

    def weigh(process: Process) -> None:
        synchronizer = process.client().groups.get(GROUP).synchronizer
        heavy = process.name == "first"

        def record(state: rg.ReaderGroupState) -> list[RecordWeights]:
            segments = sorted(state.segments)
            return [RecordWeights(weights={each: 5 * ((number < 2) == heavy) for number, each in enumerate(segments)})]

        stage.wait_until(lambda: stage.has("r1", "r2"))
        synchronizer.update_state(record)

    held: list[int] = []

    def wait_for_other_plan(call: Call) -> None:
        held.append(len(planned))
        stage.wait_until(lambda: len(planned) > held[0], call.process)

    stage.before(moves_only, wait_for_other_plan)
    stage.also("first", weigh, at=1.0)
    stage.also("second", weigh, at=1.5)


@schedule("F12", Actor("upgrader1", "upgrader", at=0.5))
def an_old_release_meets_what_a_new_one_wrote(stage: Stage) -> None:
    """The actor says what is broken."""


# ---------------------------------------------------------------------- F13, F14: compaction, nothing to do


@schedule("F13.1")
def a_compaction_is_overtaken_twice(stage: Stage) -> Check:
    def overtake(process: Process) -> None:
        ledger = ledger_of(process)
        stage.wait_until(lambda: gate.reached)
        for entry in ("second", "third"):
            ledger.update_state(enter(entry))
            assert ledger.compact()
        stage.notes.append("overtaken")

    def compact(process: Process) -> None:
        ledger = ledger_of(process)
        ledger.update_state(enter("first"))
        assert not ledger.compact()
        stage.notes.append("lost")

    gate = stage.hold(by("slow", lambda call: call.marks), lambda: "overtaken" in stage.notes)
    stage.also("slow", compact, at=0.5)
    stage.also("fast", overtake, at=0.5)
    stage.also("newcomer", partial(_join_ledger, stage), at=2.0)

    def check(outcome: Outcome) -> None:
        assert stage.notes == ["overtaken", "lost", "joined with 3"]

    return check


@schedule("F13.2")
def entries_come_while_a_snapshot_is_made(stage: Stage) -> Check:
    def write(process: Process) -> None:
        ledger = ledger_of(process)
        stage.wait_until(lambda: gate.reached)
        ledger.update_state(enter("second"))
        stage.notes.append("written")

    def compact(process: Process) -> None:
        ledger = ledger_of(process)
        ledger.update_state(enter("first"))
        assert ledger.compact()

    gate = stage.hold(by("compactor", lambda call: call.marks), lambda: bool(stage.notes))
    stage.also("compactor", compact, at=0.5)
    stage.also("writer", write, at=0.5)
    stage.also("newcomer", partial(_join_ledger, stage), at=2.0)

    def check(outcome: Outcome) -> None:
        assert stage.notes == ["written", "joined with 2"]

    return check


@schedule("F13.3")
def a_process_dies_between_snapshot_and_mark(stage: Stage) -> Check:
    def compact(process: Process) -> None:
        ledger = ledger_of(process)
        ledger.update_state(enter(process.name))
        assert ledger.compact()
        stage.notes.append(f"{process.name} compacted")

    stage.before(by("first", lambda call: call.marks), lambda call: stage.kill("first"))
    stage.also("first", compact, at=0.5)
    stage.also("second", compact, at=1.0)
    stage.also("newcomer", partial(_join_ledger, stage), at=2.0)

    def check(outcome: Outcome) -> None:
        assert stage.notes == ["second compacted", "joined with 2"]
        assert len(list(stage.world.memory.list(f"snapshot/{LEDGER_LOG}"))) == 1

    return check


def _join_ledger(stage: Stage, process: Process) -> None:
    stage.notes.append(f"joined with {len(ledger_of(process).state.entries)}")


@schedule("F14", seed=2)
def a_call_finds_nothing_to_do_while_others_write(stage: Stage) -> Check:
    reads: list[int] = []

    def write(process: Process) -> None:
        ledger = ledger_of(process)
        while len(reads) < 20:
            ledger.update_state(enter(f"{process.name} {stage.length(LEDGER_LOG)}"))

    def look(process: Process) -> None:
        ledger = ledger_of(process)
        for _ in range(20):
            before = process.calls
            stage.run.auditor.on_phase("nothing to do", process.name, True)
            ledger.update_state(lambda state: (), timeout=1.0)
            stage.run.auditor.on_phase("nothing to do", process.name, False)
            reads.append(process.calls - before)

    stage.also("busy", write, at=0.5)
    stage.also("idle", look, at=0.6)

    def check(outcome: Outcome) -> None:
        assert max(reads) <= 2

    return check


# ---------------------------------------------------------------------- F15, F16, F17: slow, late and twice


@schedule("F15.1", WRITER, reader(1), reader(2, at=1.0))
def a_hand_over_waits_for_a_slow_handler(stage: Stage) -> Check:
    def take_long() -> None:
        stage.wait_until(lambda: stage.is_marked_for("r2"))
        stage.simulation.sleep(1.5 * TIMEOUT)

    stage.while_in_hand("reader1", lambda event: True, take_long)

    def check(outcome: Outcome) -> None:
        assert not stage.removals("dead")

    return check


@schedule("F15.2", WRITER, reader(1), reader(2), max_processing=1.0, duration=8.0)
def a_handler_takes_longer_than_the_group_allows(stage: Stage) -> Check:
    stage.while_in_hand("reader1", lambda event: True, lambda: stage.simulation.sleep(1.0 + 2 * TIMEOUT))

    def check(outcome: Outcome) -> None:
        assert stage.removals("dead")

    return check


@schedule("F16.1", reader(1, pause=0.2), reader(2, at=1.0), segments=1, duration=8.0)
def the_answer_to_a_renewal_is_late_and_the_last_one(stage: Stage) -> Check:
    """The reader has an event in hand meanwhile, others ahead, and hears nothing else that says when it is out."""
    answered: list[bool] = []

    def delay(done: Done) -> None:
        stage.world.cut_off(done.process, 3 * TIMEOUT)
        stage.hold_in_hand("reader1", lambda: bool(answered))
        stage.simulation.sleep(0.7 * TIMEOUT)
        stage.simulation.call_at(stage.simulation.now + 0.1, lambda: answered.append(True))

    stage.after(lambda done: _renewed(done, "reader1") and stage.run.auditor.deliveries > 10, delay)
    stage.also("author", partial(_write, stage, 60), at=0.5)

    def check(outcome: Outcome) -> None:
        assert stage.removals("dead") == 1

    return check


@schedule("F16.2", WRITER, reader(1), reader(2))
def a_paused_reader_hands_out_what_is_anothers_by_now(stage: Stage) -> Check:
    """Between the look at the lease and the handing over; no clock can prevent that. It counts for nothing."""
    delivered = stage.run.auditor.delivered
    paused = [False]

    def pause_before(process: Process, event: rg.Event[bytes]) -> None:
        if process.name == "reader1" and not paused[0]:
            paused[0] = True
            stage.stop("reader1", 1.0)
            stage.simulation.sleep(0.01)
        delivered(process, event)

    stage.run.auditor.delivered = pause_before  # type: ignore[method-assign]

    def remove(process: Process) -> None:
        stage.wait_until(lambda: paused[0])
        assert process.client().groups.get(GROUP).remove_reader("r1")

    stage.also("remover", remove)

    def check(outcome: Outcome) -> None:
        assert outcome.auditor.repeats

    return check


@schedule("F17", WRITER, reader(1), reader(2, "r1", at=1.0))
def two_processes_have_the_same_id(stage: Stage) -> Check:
    def check(outcome: Outcome) -> None:
        # The reader itself stays out. Its application may open another, under this id or another one.
        assert stage.removals("replaced") >= 1

    return check


# ---------------------------------------------------------------------- F18, F19, F20, F22


@schedule("F18")
def calls_that_went_out_together_are_refused_together(stage: Stage) -> Check:
    """One has nothing to do because of another, which then finds that a rival has done it."""
    entering = ("zeroth", "shared", "shared", "third")

    def together(process: Process) -> None:
        ledger = ledger_of(process)
        for entry in entering:
            process.spawn(partial(ledger.update_state, enter(entry)), entry)
            stage.simulation.sleep(0.01)

    def rival(process: Process) -> None:
        ledger = ledger_of(process)
        stage.wait_until(lambda: gate.reached)
        ledger.update_state(enter("shared"))
        stage.notes.append("first")

    stage.before(by("several", ENTERS), lambda call: stage.simulation.sleep(0.1))
    gate = stage.hold(by("several", ENTERS), lambda: bool(stage.notes))
    stage.also("several", together, at=0.5)
    stage.also("rival", rival, at=0.5)

    def check(outcome: Outcome) -> None:
        assert entries(outcome) == {"zeroth": 0, "shared": 1, "third": 2}

    return check


@schedule("F19", WRITER, reader(1), Actor("listener1", "listener"))
def a_listener_was_stopped_while_the_log_was_compacted_twice(stage: Stage) -> None:
    def change(process: Process) -> None:
        group = process.client().groups.get(GROUP)
        stage.stop("listener1", 2.0)
        for _ in range(2):
            group.reader("short").close()
            assert group.synchronizer.compact()

    stage.also("busy", change, at=1.0)


def _listen_durably(stage: Stage, name: str, during: Callable[[], object] = lambda: None, *, at: float = 0.5) -> None:
    def work(process: Process) -> None:
        stage.run.durable.listen(process, process.client().groups.get(GROUP), during)

    stage.also(name, work, at=at)


def _scale(stage: Stage, process: Process, *epochs: int) -> None:
    """Split the first segment, so that the stream comes to each of these epochs."""
    streams = process.client().streams
    for epoch in epochs:
        streams.scale(STREAM, split=[min(streams.fetch_state(STREAM).current)])
        assert stage.stream is not None and stage.stream.epoch == epoch


def _told_of_segments(stage: Stage) -> list[tuple[str, int, bool]]:
    """Who was told of how many, and whether the call returned."""
    return [(call.process.name, len(call.value), call.returned) for call in stage.run.durable.calls["segments"]]


@schedule("F19.1", reader(1))
def a_durable_listener_dies_before_what_it_heard_is_recorded(stage: Stage) -> Check:
    def die_when_scaled() -> None:
        if _told_of_segments(stage)[-1][1] == 3:
            stage.kill("first")

    def scale(process: Process) -> None:
        _scale(stage, process, 1, 2)
        stage.wait_until(lambda: ("second", 4, True) in _told_of_segments(stage))

    _listen_durably(stage, "first", die_when_scaled)
    _listen_durably(stage, "second", at=0.8)
    stage.also("scaler", scale, at=1.5)

    def check(outcome: Outcome) -> None:
        told = _told_of_segments(stage)
        assert told[:4] == [("first", 2, True), ("first", 3, False), ("second", 3, True), ("second", 4, True)]

    return check


@schedule("F19.2", reader(1), duration=8.0)
def of_two_durable_listeners_one_hears_and_is_stopped(stage: Stage) -> Check:
    """When it goes on, it is too late, and it does not know that."""

    def scale(process: Process) -> None:
        _scale(stage, process, 1)
        stage.wait_until(lambda: ("first", 3, True) in _told_of_segments(stage))
        process.sleep(0.1)  # it has written that down
        stage.stop("first", 2.5 * TIMEOUT)
        _scale(stage, process, 2)
        stage.wait_until(lambda: ("second", 4, True) in _told_of_segments(stage))
        stage.wait_until(lambda: stage.world.processes["first"].runs)
        _scale(stage, process, 3)
        stage.wait_until(lambda: ("second", 5, True) in _told_of_segments(stage))

    _listen_durably(stage, "first")
    _listen_durably(stage, "second", at=0.8)
    stage.also("scaler", scale, at=1.5)

    def check(outcome: Outcome) -> None:
        told = _told_of_segments(stage)
        assert told[:4] == [("first", 2, True), ("first", 3, True), ("second", 4, True), ("second", 5, True)]

    return check


def records(call: Call) -> bool:
    return call.verb == "append" and bool(call.data) and call.segment.startswith("record/")


@schedule("F19.3", reader(1))
def who_records_dies_and_the_log_is_compacted(stage: Stage) -> Check:
    """All fold the log and would write the same; the one that comes first dies over it, and then a newcomer, who could
    not do it any more, loads what is left."""
    compacted: list[bool] = []

    def record(process: Process) -> None:
        stage.run.recordings.record(process, process.client().groups.get(GROUP), lag_interval_seconds=None)

    def change(process: Process) -> None:
        group = process.client().groups.get(GROUP)
        gates = [stage.hold(by(name, records), lambda: bool(compacted)) for name in ("first", "second", "third")]
        _scale(stage, process, 1)
        stage.wait_until(lambda: all(gate.reached for gate in gates))
        stage.kill("first")
        group.reader("short").close()
        compacted.append(group.synchronizer.compact())
        assert compacted[0]
        record(process)
        _scale(stage, process, 2)
        stage.wait_until(lambda: len(_recorded(group)) == 3)
        assert not any(notification.gap for notification in group.notification_record.read())
        stage.notes.append(f"recorded {_recorded(group)}")

    for name in ("first", "second", "third"):
        stage.also(name, record, at=0.5)
    stage.also("busy", change, at=1.5)

    def check(outcome: Outcome) -> None:
        assert stage.notes == ["recorded [2, 3, 4]"]

    return check


def _recorded(group: rg.ReaderGroup) -> list[int]:
    """How many segments there were, as the record tells."""
    found = group.notification_record.read()
    return [each.number_of_segments for each in found if isinstance(each, rg.SegmentNotification)]


@schedule("F20", WRITER, reader(1), reader(2), reader(3, at=2.0))
def a_reader_dies_when_the_state_is_too_large(stage: Stage) -> Check:
    """Nobody can join then, and who is dead is taken out."""

    def limit(process: Process) -> None:
        for group in stage.run.groups.values():
            group.synchronizer._writer._decider._state_limit_bytes = 1
        stage.kill("reader2")
        newcomer = process.client().groups.get(GROUP)
        newcomer.synchronizer._writer._decider._state_limit_bytes = 1
        try:
            newcomer.reader("r9")
        except StateTooLargeError:
            stage.notes.append("refused")
        stage.wait_until(lambda: not stage.has("r2"))
        for group in stage.run.groups.values():
            group.synchronizer._writer._decider._state_limit_bytes = DEFAULT_STATE_LIMIT_BYTES

    stage.also("limiter", limit, at=1.0)

    def check(outcome: Outcome) -> None:
        assert stage.notes == ["refused"]
        assert stage.removals("dead") == 1

    return check


@schedule("F22", duration=8.0)
def a_process_is_stopped_while_it_holds_the_fair_lock(stage: Stage) -> Check:
    waited: list[str] = []

    def contend(process: Process) -> None:
        ledger = ledger_of(process)
        for number in range(60):
            ledger.update_state(enter(f"{process.name} {number}"))
        stage.notes.append(process.name)

    def stop(call: Call) -> None:
        stage.stop(call.process.name, 4.0)
        stage.before(lambda call: call.verb == "fair_lock", lambda call: waited.append(call.process.name), times=50)

    stage.before(lambda call: call.verb == "fair_lock" and not stage.world.queues[call.segment], stop)
    for number in range(4):
        stage.also(f"contender{number}", contend, at=0.5)

    def check(outcome: Outcome) -> None:
        assert len(stage.notes) == 4
        assert waited

    return check


# ---------------------------------------------------------------------- F21: transactions


def merges(call: Call) -> bool:
    return call.merges


def _all_once(count: int) -> dict[tuple[str, int], int]:
    return {(key, number): 1 for key in KEYS for number in range(count)}


def _transact(stage: Stage, process: Process, *, before_commit: Callable[[], object] = lambda: None) -> None:
    """A transaction between what one writer writes before and after it, of both keys; then the auditor is told."""
    events = [[(key, number) for key in KEYS] for number in range(4)]
    with process.client().writer(STREAM) as writer:

        def write(number: int, to: rg.EventWriter[bytes] | rg.Transaction[bytes]) -> None:
            for key, _ in events[number]:
                to.write(f"{key}:{number}".encode(), routing_key=key)

        write(0, writer)
        with writer.transaction() as transaction:
            write(1, transaction)
            write(2, transaction)
            before_commit()
        stage.run.auditor.acknowledged(process, [*events[1], *events[2]])
        write(3, writer)
    stage.run.auditor.acknowledged(process, [each for four in events for each in four])


@schedule("F21.1", reader(1))
def a_committer_dies_between_two_merges_and_the_stream_is_scaled(stage: Stage) -> Check:
    """The scale would seal both segments, one of which has its part of the transaction, and the other has not."""
    merged: list[str] = []

    def die_at_the_second(call: Call) -> None:
        merged.append(call.segment)
        if len(merged) == 2:
            stage.kill("author")

    def scale(process: Process) -> None:
        stage.wait_until(lambda: len(merged) == 2)
        process.client().streams.scale(STREAM, merge=[0, 1])
        _write_others(process)

    stage.before(by("author", merges), die_at_the_second, times=2)
    stage.also("author", partial(_transact, stage), at=0.5)
    stage.also("scaler", scale)

    def check(outcome: Outcome) -> None:
        written = {(key, number): 1 for key in KEYS for number in range(3)}
        assert outcome.auditor.stored == written | {(f"other {key}", 0): 1 for key in KEYS}

    return check


def _write_others(process: Process) -> None:
    with process.client().writer(STREAM) as writer:
        for key in KEYS:
            writer.write(f"other {key}:0".encode(), routing_key=key)


@schedule("F21.2", reader(1))
def segments_are_merged_when_events_are_staged_for_them(stage: Stage) -> Check:
    """And split again: what was staged for one segment belongs to two."""

    def scale() -> None:
        streams = stage.world.processes["scaler"].client().streams
        streams.scale(STREAM, merge=[0, 1])
        streams.scale(STREAM, split=[2])

    stage.also("scaler", lambda process: None)
    stage.also("author", lambda process: _transact(stage, process, before_commit=scale), at=0.5)

    def check(outcome: Outcome) -> None:
        assert outcome.auditor.stored == _all_once(4)

    return check


@schedule("F21.3", reader(1))
def the_answer_to_a_merge_is_lost(stage: Stage) -> Check:
    stage.fault(by("author", merges), "lost answer")
    stage.also("author", partial(_transact, stage), at=0.5)

    def check(outcome: Outcome) -> None:
        assert outcome.auditor.stored == _all_once(4)

    return check


@schedule("F21.4", reader(1))
def a_merge_that_was_given_up_arrives_when_it_is_done(stage: Stage) -> Check:
    """It would come behind what the writer wrote after the transaction."""
    stage.before(by("author", merges), lambda call: stage.send_late(call, lambda: bool(stage.notes)))

    def transact(process: Process) -> None:
        _transact(stage, process)
        stage.notes.append("committed")

    stage.also("author", transact, at=0.5)

    def check(outcome: Outcome) -> None:
        assert outcome.auditor.stored == _all_once(4)

    return check


# ---------------------------------------------------------------------- F23: the store goes back


@schedule("F23.2")
def the_store_goes_back_and_on_with_others(stage: Stage) -> Check:
    """A process that has read what is lost says so, and does not go on with what is there instead."""

    def work(process: Process) -> None:
        archive, held = _archive(stage, process)
        held.update_state(enter("first"))
        length = held.applied_length
        held.update_state(enter("going"))
        archive.go_back_to(length)
        other = archive.open(process)
        for entry in ("other", "after"):  # as long as what is lost
            archive.call(process, other, partial(other.update_state, enter(entry)))
        for call in (held.fetch_updates, held.compact, partial(held.update_state, enter("never"))):
            _note_refusal(stage, partial(archive.call, process, held, call))
        assert held.state.entries.keys() == {"first", "going"}
        assert archive.open(process).state.entries.keys() == {"first", "other", "after"}

    stage.also("one", work, at=0.5)

    def check(outcome: Outcome) -> None:
        assert (
            stage.notes
            == ["the store lost acknowledged data: this entry does not follow the last one that was read"] * 3
        )

    return check


@schedule("F23.3")
def the_store_goes_back_and_on_to_the_same_length(stage: Stage) -> Check:
    """Nobody can tell then. Once a process that has read what is lost writes, all others say so."""

    def work(process: Process) -> None:
        archive, held = _archive(stage, process)
        held.update_state(enter("first"))
        length = held.applied_length
        held.update_state(enter("going"))
        archive.go_back_to(length)
        other = archive.open(process)
        for holder, entry in ((other, "other"), (held, "again")):
            archive.call(process, holder, partial(holder.update_state, enter(entry)))
        for call in (other.fetch_updates, partial(other.update_state, enter("never"))):
            _note_refusal(stage, partial(archive.call, process, other, call))
        _note_refusal(stage, partial(archive.open, process))
        assert other.state.entries.keys() == {"first", "other"}

    stage.also("one", work, at=0.5)

    def check(outcome: Outcome) -> None:
        assert (
            stage.notes
            == ["the store lost acknowledged data: this entry does not follow the last one that was read"] * 3
        )

    return check


@schedule("F23.1")
def the_store_goes_back(stage: Stage) -> Check:
    def work(process: Process) -> None:
        archive, held = _archive(stage, process)
        held.update_state(enter("first"))
        length = held.applied_length
        held.update_state(enter("lost"))
        archive.go_back_to(length)
        for call in (partial(held.update_state, enter("second")), held.fetch_updates):
            _note_refusal(stage, partial(archive.call, process, held, call))

    stage.also("one", work, at=0.5)

    def check(outcome: Outcome) -> None:
        assert stage.notes == ["the store lost acknowledged data: the log is shorter than before"] * 2

    return check


def _archive(stage: Stage, process: Process) -> tuple[Archive, StateSynchronizer[Ledger]]:
    archive = stage.run.archive
    return archive, archive.open(process)


def _note_refusal(stage: Stage, call: Callable[[], object]) -> None:
    try:
        call()
    except CorruptStateError as error:
        stage.notes.append(error.message.partition(";")[0])
