from __future__ import annotations

import threading
from multiprocessing.connection import Connection

import pytest

import readergroup as rg
from readergroup.scaling import autoscale
from readergroup.scaling.autoscale import ROLE, Told
from synchronizer import Clock
from synchronizer.liveness.exclusive_role import ExclusiveRole, RoleValue
from tests.clean_processes import CLEAN
from tests.readergroup.scaling.handlers import Fault, write
from tests.waiting import PATIENCE_SECONDS, until

STREAM = "shop/orders"
POLICY = rg.ReaderScalingPolicy(min_readers=1, max_readers=8, target_lag_seconds=1000, cooldown_seconds=1000)
READER_TIMEOUT_SECONDS = 2.0


class Calls:
    """A callback that remembers what it was told."""

    def __init__(self) -> None:
        self.decisions: list[rg.ScalingDecision] = []
        self.fail = 0

    def __call__(self, decision: rg.ScalingDecision) -> None:
        self.decisions.append(decision)
        if self.fail:
            self.fail -= 1
            raise Fault

    @property
    def told(self) -> list[int]:
        return [decision.desired_readers for decision in self.decisions]


@pytest.fixture
def group(client: rg.Client) -> rg.ReaderGroup:
    client.streams.create(STREAM, scaling=rg.ScalingPolicy.fixed(2))
    return create_group(client)


def create_group(client: rg.Client) -> rg.ReaderGroup:
    return client.groups.create("billing", streams=[STREAM], reader_timeout_seconds=READER_TIMEOUT_SECONDS)


# ---------------------------------------------------------------------- what is told


@pytest.mark.stores(round_robin=True)
def test_the_number_is_told_at_first_and_when_a_notification_changes_it(
    client: rg.Client, group: rg.ReaderGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autoscale, "LOOK_SECONDS", 1000)
    calls = Calls()
    write(client, STREAM, ["waiting"])
    group.autoscale(POLICY)(calls)
    until(lambda: calls.told == [1])
    client.streams.scale(STREAM, split=[0, 1])
    until(lambda: calls.told == [1, 3])
    assert calls.decisions[1].reason == "segments grew from 2 to 4"
    assert calls.decisions[1].current_readers == 0
    assert calls.decisions[0].revision < calls.decisions[1].revision <= group.synchronizer.revision


@pytest.mark.stores(round_robin=True)
def test_lag_is_told_of_without_a_notification(client: rg.Client, group: rg.ReaderGroup) -> None:
    calls = Calls()
    policy = rg.ReaderScalingPolicy(max_readers=2, target_lag_seconds=0.5, cooldown_seconds=0)
    group.autoscale(policy)(calls)
    until(lambda: calls.told == [1])
    write(client, STREAM, ["waiting"])
    until(lambda: calls.told == [1, 2])
    assert "behind, over 0.5 s" in calls.decisions[1].reason


def test_the_same_can_be_asked_for(client: rg.Client, group: rg.ReaderGroup) -> None:
    write(client, STREAM, ["waiting"])
    assert group.scaling_decision(POLICY).desired_readers == 1
    client.streams.scale(STREAM, split=[0])
    decision = group.scaling_decision(POLICY)
    assert (decision.desired_readers, decision.current_readers) == (2, 0)
    with group.reader("r1"):
        assert group.scaling_decision(POLICY).current_readers == 1


def test_a_callback_that_raised_is_called_again(client: rg.Client, group: rg.ReaderGroup) -> None:
    calls = Calls()
    calls.fail = 2
    group.autoscale(POLICY)(calls)
    until(lambda: len(calls.told) == 3)
    assert calls.told == [1, 1, 1]
    write(client, STREAM, ["waiting"])
    client.streams.scale(STREAM, split=[0])
    until(lambda: len(calls.told) == 4)
    assert calls.told == [1, 1, 1, 2]


def test_the_decorated_function_can_still_be_called(group: rg.ReaderGroup) -> None:
    told: list[int] = []

    @group.autoscale(POLICY)
    def resize(decision: rg.ScalingDecision) -> None:
        told.append(decision.desired_readers)

    until(lambda: told == [1])
    resize.close()
    resize(rg.ScalingDecision(desired_readers=5, current_readers=0, reason="by hand", revision=rg.Revision(0, 0)))
    assert told == [1, 5]


def test_after_close_nothing_is_told_any_more(client: rg.Client, group: rg.ReaderGroup) -> None:
    calls, others = Calls(), Calls()
    write(client, STREAM, ["waiting"])
    autoscaling = group.autoscale(POLICY)(calls)
    until(lambda: calls.told == [1])
    autoscaling.close()
    autoscaling.close()
    client.streams.scale(STREAM, split=[0])
    group.autoscale(POLICY.model_copy(update={"min_readers": 4}))(others)
    until(lambda: others.told == [4])
    assert calls.told == [1]


def test_closing_the_client_ends_it(url: str, group: rg.ReaderGroup) -> None:
    calls = Calls()
    with rg.connect(url) as other:
        autoscaling = other.groups.get("billing").autoscale(POLICY)(calls)
        until(lambda: calls.told == [1])
    assert not autoscaling._keeper._thread


# ---------------------------------------------------------------------- one at a time


@pytest.mark.stores(round_robin=True)
def test_of_two_only_one_is_called_and_the_other_goes_on_where_it_ended(
    client: rg.Client, group: rg.ReaderGroup, url: str
) -> None:
    group.configure(reader_timeout_seconds=1000)  # the other has not long to wait where the role is given up
    first, second = Calls(), Calls()
    write(client, STREAM, ["waiting"])
    with rg.connect(url) as other:
        autoscaling = group.autoscale(POLICY)(first)
        until(lambda: first.told == [1])
        other.groups.get("billing").autoscale(POLICY)(second)
        client.streams.scale(STREAM, split=[0])
        until(lambda: first.told == [1, 2])
        assert second.told == []
        autoscaling.close()
        # What the first was told is known and not told again; nor is growth missed while nobody holds the role.
        client.streams.scale(STREAM, split=[1])
        until(lambda: second.told)
        assert second.told == [3]
        assert first.told == [1, 2]


def test_a_call_that_takes_long_keeps_its_role(group: rg.ReaderGroup, url: str) -> None:
    """Longer than a holder that has died would keep it."""
    group.configure(reader_timeout_seconds=4.0)
    entered, let_go = threading.Event(), threading.Event()
    second = Calls()

    def slow(decision: rg.ScalingDecision) -> None:
        entered.set()
        let_go.wait(PATIENCE_SECONDS)

    with rg.connect(url) as other:
        autoscaling = group.autoscale(POLICY)(slow)
        assert entered.wait(PATIENCE_SECONDS)
        other.groups.get("billing").autoscale(POLICY)(second)
        clock = group.synchronizer.clock
        began = clock.monotonic()
        until(lambda: clock.monotonic() - began > 6.0)
        assert second.told == []
        let_go.set()
        autoscaling.close()


def autoscale_in_a_process(url: str, pipe: Connection) -> None:
    """Runs in a process of its own, and tells what it is told."""
    with rg.connect(url) as client:
        client.groups.get("billing").autoscale(POLICY)(lambda decision: pipe.send(decision.desired_readers))
        pipe.send("registered")
        pipe.recv()


@pytest.mark.stores(round_robin=True)
def test_of_two_processes_the_other_takes_over_when_the_one_that_is_called_is_killed(
    client: rg.Client, group: rg.ReaderGroup, url: str
) -> None:
    group.configure(reader_timeout_seconds=600)  # a slow process keeps the role
    pipes, processes = [], []
    write(client, STREAM, ["waiting"])
    try:
        for expected in (["registered", 1], ["registered"]):
            here, there = CLEAN.Pipe()
            process = CLEAN.Process(target=autoscale_in_a_process, args=(url, there), daemon=True)
            process.start()
            pipes.append(here)
            processes.append(process)
            assert sorted((receive(here) for _ in expected), key=str, reverse=True) == expected
        client.streams.scale(STREAM, split=[0])
        assert receive(pipes[0]) == 2
        until(lambda: told(group) == 2)
        processes[0].kill()
        group.configure(reader_timeout_seconds=4.0)
        client.streams.scale(STREAM, split=[1])
        assert receive(pipes[1]) == 3
        assert not pipes[1].poll(0)
    finally:
        for process in processes:
            process.kill()
            process.join()


def receive(pipe: Connection) -> object:
    assert pipe.poll(PATIENCE_SECONDS), "nothing came in time"
    return pipe.recv()


# ---------------------------------------------------------------------- the role


def role(group: rg.ReaderGroup, clock: Clock) -> ExclusiveRole:
    return ExclusiveRole(group.synchronizer.store, group.synchronizer.segment, ROLE, clock)


def stored(group: rg.ReaderGroup) -> RoleValue:
    return RoleValue.decode(group.synchronizer.store.attributes(group.synchronizer.segment).get(ROLE))


def told(group: rg.ReaderGroup) -> int | None:
    return Told(*stored(group).payload).number


def test_the_holder_of_a_deleted_group_gives_up_its_role_and_what_was_told_is_forgotten(
    client: rg.Client, group: rg.ReaderGroup
) -> None:
    calls = Calls()
    group.autoscale(POLICY)(calls)
    until(lambda: calls.told == [1])
    until(lambda: told(group) == 1)
    client.groups.delete("billing")
    until(lambda: not stored(group).holder_id)
    assert told(group) is None


def test_autoscaling_goes_on_when_the_group_leaves_a_stream_that_was_created_again(
    client: rg.Client, group: rg.ReaderGroup, caplog: pytest.LogCaptureFixture
) -> None:
    calls = Calls()
    group.autoscale(rg.ReaderScalingPolicy(max_readers=2, target_lag_seconds=0.5, cooldown_seconds=0))(calls)
    until(lambda: calls.told == [1])
    client.streams.delete(STREAM)
    client.streams.create(STREAM)
    until(lambda: "created again" in caplog.text)
    client.streams.create("shop/other", scaling=rg.ScalingPolicy.fixed(2))
    write(client, "shop/other", ["waiting"])
    group.configure(streams=["shop/other"])
    until(lambda: calls.told == [1, 2])


def test_what_a_group_was_told_while_it_was_deleted_is_not_remembered_for_the_next_one(
    client: rg.Client, group: rg.ReaderGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Calls()
    take = ExclusiveRole.take
    taken: list[bool] = []

    def delete_and_take(self: ExclusiveRole, timeout_seconds: float) -> bool:
        if not calls.told or not list(client.groups.list()):
            return take(self, timeout_seconds)
        client.groups.delete("billing")
        taken.append(take(self, timeout_seconds + 1))  # another timeout: it is renewed now
        return taken[-1]

    monkeypatch.setattr(ExclusiveRole, "take", delete_and_take)
    group.autoscale(POLICY)(calls)
    until(lambda: taken and not stored(group).holder_id)
    assert told(group) is None


def test_what_was_told_to_a_group_that_is_deleted_is_forgotten_also_when_nobody_had_heard_of_it(
    client: rg.Client, group: rg.ReaderGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Calls()
    record = ExclusiveRole.record

    def delete_and_record(self: ExclusiveRole, *payload: object) -> bool:
        if not list(client.groups.list()):
            return record(self, *payload)
        client.groups.delete("billing")
        self.take(60)  # as if it was deleted before the call, and this did not know
        return record(self, *payload)

    monkeypatch.setattr(ExclusiveRole, "record", delete_and_record)
    group.autoscale(POLICY)(calls)
    until(lambda: not list(client.groups.list()), "the deletion")
    until(lambda: not stored(group).holder_id, "the end of the autoscaling")
    assert told(group) is None


def test_a_holder_that_has_not_heard_that_its_group_is_another_one_is_still_the_only_one(
    client: rg.Client, group: rg.ReaderGroup
) -> None:
    clock = rg.ManualClock()
    first, second = role(group, clock), role(group, clock)
    assert first.take(9)
    assert first.record(5, 2)
    client.groups.delete("billing")
    client.groups.create("billing", streams=[STREAM])
    assert first.valid_until > clock.monotonic()
    assert not second.take(9)
    for _ in range(4):
        clock.advance(1)
        assert first.take(9)
    assert first.value.payload == ()
    assert not second.take(9)
