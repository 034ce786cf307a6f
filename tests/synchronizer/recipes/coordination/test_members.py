"""The state of members: its transitions for any history, and its stored forms: `tests/wire/members-*` and others."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from synchronizer import InvalidArgumentError, Revision, Update
from synchronizer.recipes.coordination.members import (
    BROKEN,
    UPDATES,
    Break,
    Join,
    Leave,
    Member,
    Members,
    empty_members,
)
from synchronizer.state import StateCodec
from tests.golden import check_history, golden

CODEC = StateCodec(Members, UPDATES)

EVERY_UPDATE: list[Update[Members]] = [
    Join(member="a", lease="5f"),
    Join(member="a", lease="5f", timeout_seconds=2.5),
    Leave(member="a", lease="5f", cause="left"),
    Leave(member="a", lease="5f", cause="dead"),
    Leave(member="a", lease="5f", cause="replaced"),
    Break(),
]
STATE = Members(
    timeout_seconds=10.0,
    members=(Member(member="a", lease="5f", incarnation=41), Member(member="b", lease="60", incarnation=97)),
)


OF_A_SEMAPHORE = STATE.replace(places=3)
OF_A_BARRIER = Members(
    timeout_seconds=10.0,
    parties=2,
    members=tuple(
        Member(member="a", lease=f"{number}", incarnation=number, place=place)
        for number, place in enumerate((0, 1, BROKEN, None))
    ),
)


def test_updates_are_written_and_read_as_in_the_first_release() -> None:
    today = CODEC.encode_updates(EVERY_UPDATE)
    stored = golden("members-updates-v1.msgpack", today)
    assert stored == today
    assert CODEC.decode_body(stored) == EVERY_UPDATE


@pytest.mark.parametrize(
    ("kind", "state"), [("members", STATE), ("semaphore", OF_A_SEMAPHORE), ("barrier", OF_A_BARRIER)]
)
def test_a_state_is_written_and_read_as_in_the_first_release(kind: str, state: Members) -> None:
    today = CODEC.encode_snapshot(state, 7)
    stored = golden(f"{kind}-snapshot-v1.msgpack", today)
    assert stored == today
    assert CODEC.decode_snapshot(stored) == (state, 7)


#: Updates in the order of the log. What update number n makes, counted from 0, has the token 10 * n + 1.
HISTORY: list[Update[Members]] = [
    Join(member="a", lease="1", timeout_seconds=2.5),
    Join(member="b", lease="2", timeout_seconds=7.5),
    Leave(member="a", lease="1", cause="left"),
    Join(member="c", lease="3"),
    Join(member="d", lease="4"),
    Break(),
    Leave(member="b", lease="2", cause="dead"),
]


@pytest.mark.parametrize("parties", [None, 2])
def test_updates_change_members_as_in_the_first_release(parties: int | None) -> None:
    kind = "members" if parties is None else "barrier"
    last = check_history(f"{kind}-history-v1.msgpack", CODEC, empty_members(10.0, parties=parties), HISTORY)
    assert [each.member for each in last.members] == ["c", "d"] and last.timeout_seconds == 2.5


class History(RuleBasedStateMachine):
    """Members come and go in any order; the one whose turn it is to lead is the one that has been there longest."""

    def __init__(self) -> None:
        super().__init__()
        self.state = empty_members(10.0)
        self.offset = 0
        self.model: list[tuple[str, str, int]] = []  # who is there, in the order of coming
        self.tokens: list[int] = []  # of all who ever were the first

    def apply(self, update: Join | Leave) -> None:
        self.offset += 50
        self.state = update.apply_to(self.state, Revision(self.offset, 0))

    @rule(member=st.sampled_from("abc"), timeout_seconds=st.none() | st.floats(0.5, 60))
    def join(self, member: str, timeout_seconds: float | None) -> None:
        before, alone = self.state.timeout_seconds, not self.model
        lease = f"{self.offset:x}"
        self.apply(Join(member=member, lease=lease, timeout_seconds=timeout_seconds))
        self.model.append((member, lease, Revision(self.offset, 0).token))
        assert self.state.timeout_seconds == (timeout_seconds if alone and timeout_seconds is not None else before)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), cause=st.sampled_from(["left", "dead", "replaced"]))
    def leave(self, data: st.DataObject, cause: str) -> None:
        gone = data.draw(st.sampled_from(self.model))
        self.model.remove(gone)
        self.apply(Leave.model_validate({"member": gone[0], "lease": gone[1], "cause": cause}))
        with pytest.raises(InvalidArgumentError, match="not present"):
            Leave(member=gone[0], lease=gone[1], cause="dead").apply_to(self.state, Revision(0, 0))

    @invariant()
    def is_in_the_order_of_coming(self) -> None:
        assert [(each.member, each.lease, each.incarnation) for each in self.state.members] == self.model
        assert CODEC.decode_snapshot(CODEC.encode_snapshot(self.state, 0))[0] == self.state

    @invariant()
    def s7_the_tokens_of_the_first_only_grow(self) -> None:
        first = self.state.first
        if first is not None and first.incarnation not in self.tokens[-1:]:
            assert all(first.incarnation > token for token in self.tokens)
            self.tokens.append(first.incarnation)


TestHistory = History.TestCase
TestHistory.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)
