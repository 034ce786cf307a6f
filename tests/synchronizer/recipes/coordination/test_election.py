"""Who is the leader, and who knows that it is, on a clock that is moved by hand."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from synchronizer import (
    ClosedError,
    Deadline,
    DeadlineExceededError,
    InvalidArgumentError,
    LeaseLostError,
    OutcomeUnknownError,
    StateSynchronizer,
    StoreUnavailableError,
    SystemClock,
)
from synchronizer.recipes.coordination.election import LeaderElection
from synchronizer.recipes.coordination.members import UPDATES, Members
from synchronizer.testing import FailingStore, Operation
from tests.synchronizer.recipes.stepped import TIMEOUT, World, a_world
from tests.waiting import until

pytestmark = pytest.mark.stores(round_robin=True)


class Candidate(LeaderElection):
    """Its store fails on demand, and it writes down what its listeners hear."""

    def __init__(self, world: World, candidate_id: str) -> None:
        self.failing: FailingStore = world.store()
        super().__init__(
            self.failing, "ship", candidate_id, member_timeout_seconds=TIMEOUT, clock=world.clock, threads=False
        )
        self.heard: list[int | None] = []
        self.on_elected(self.heard.append)
        self.on_lost(lambda: self.heard.append(None))


@pytest.fixture
def world(store_url: str) -> Iterator[World]:
    with a_world(store_url) as world:
        yield world


def candidate(world: World, candidate_id: str, *, campaigns: bool = True) -> Candidate:
    found = world.add(Candidate(world, candidate_id))
    if campaigns:
        found.campaign(wait=False)
    return found


def leaders(*candidates: Candidate) -> list[str]:
    """Those that say of themselves that they are the leader."""
    return [each.candidate_id for each in candidates if each.is_leader]


def test_the_first_candidate_is_the_leader_at_once_and_the_others_follow_in_order(world: World) -> None:
    a, b, c = (candidate(world, name) for name in "abc")
    tokens = [a.fencing_token]
    assert leaders(a, b, c) == ["a"]
    assert {each.leader() for each in (a, b, c)} == {"a"}
    for before, after in ((a, b), (b, c)):
        before.resign()
        world.step()
        assert leaders(a, b, c) == [after.candidate_id]
        tokens.append(after.fencing_token)
    assert tokens == sorted(set(tokens))
    c.resign()
    assert c.leader() is None


def test_a_leader_that_has_resigned_says_so_before_the_store_does(world: World) -> None:
    a = candidate(world, "a")
    a.failing.unavailable = True
    with pytest.raises(DeadlineExceededError):
        a.resign(timeout=0)
    with pytest.raises(LeaseLostError):
        a.check()


def test_whoever_is_no_candidate_can_ask_who_leads(world: World) -> None:
    a, outside = candidate(world, "a"), candidate(world, "outside", campaigns=False)
    assert outside.leader() == "a"
    assert not outside.is_leader
    with pytest.raises(LeaseLostError, match="candidate='outside'"):
        _ = outside.fencing_token
    a.resign()
    assert outside.leader() is None


def test_a_dead_leader_is_replaced_within_the_timeout_and_two_seconds(world: World) -> None:
    a, b, c = (candidate(world, name) for name in "abc")
    world.pass_time(30)
    world.kill(a)
    world.pass_time(TIMEOUT / 2)
    assert leaders(a, b, c) == ["a"]  # as far as it can know
    world.pass_time(TIMEOUT / 2 + 2)
    assert leaders(a, b, c) == ["b"]
    assert c.leader() == "b"


def test_the_lease_of_a_leader_is_over_before_anybody_else_is_elected(world: World) -> None:
    a, b = candidate(world, "a"), candidate(world, "b")
    world.pass_time(30)
    world.kill(a)
    gap = 0
    for _ in range(200):
        assert len(leaders(a, b)) <= 1
        gap += not leaders(a, b)
        world.pass_time(0.1, step=0.1)
    assert leaders(a, b) == ["b"] and gap > 10


def test_followers_that_die_and_come_back_do_not_change_the_leader(world: World) -> None:
    a, b = candidate(world, "a"), candidate(world, "b")
    token = a.fencing_token
    for _ in range(3):
        world.kill(b)
        world.pass_time(TIMEOUT + 2)
        assert [each.member for each in world.state("election/ship").members] == ["a"]
        b = candidate(world, "b")
        world.pass_time(1)
        assert leaders(a, b) == ["a"] and a.fencing_token == token
    assert a.heard == [token]


def test_a_leader_that_comes_back_is_a_follower(world: World) -> None:
    a, b = candidate(world, "a"), candidate(world, "b")
    world.kill(a)
    again = candidate(world, "a")
    world.pass_time(TIMEOUT + 2)
    assert leaders(again, b) == ["b"]
    assert [each.member for each in world.state("election/ship").members] == ["b", "a"]
    world.kill(b)
    world.pass_time(TIMEOUT + 2)
    assert leaders(again, b) == ["a"]


def test_a_leader_that_was_paused_finds_that_it_was_deposed_and_is_no_candidate(world: World) -> None:
    a, b = candidate(world, "a"), candidate(world, "b")
    world.step()
    world.kill(a)
    world.pass_time(TIMEOUT + 2)
    with pytest.raises(LeaseLostError):
        a.check()
    world.add(a)
    world.pass_time(1)
    b.resign()
    world.pass_time(1)
    assert leaders(a, b) == [] and a.leader() is None
    assert a.campaign(wait=False)
    assert [token is None for token in a.heard] == [False, True]
    world.pass_time(1)
    assert [token is None for token in a.heard] == [False, True, False]
    assert a.heard[2] == a.fencing_token


def test_a_follower_that_was_paused_gets_back_in_line(world: World) -> None:
    a, b, c = (candidate(world, name) for name in "abc")
    world.kill(b)
    world.pass_time(TIMEOUT + 2)
    world.add(b)
    world.pass_time(1)
    assert [each.member for each in world.state("election/ship").members] == ["a", "c", "b"]
    assert leaders(a, b, c) == ["a"]


def test_a_follower_gets_back_in_line_also_if_its_renewal_is_the_first_to_tell_it(world: World) -> None:
    candidate(world, "a")
    with LeaderElection(world.store(), "ship", "b") as b:
        b.campaign(wait=False)
        lease = b._participant._lease
        assert lease is not None
        lease.lose()  # as the thread that renews does
        b.synchronizer.wait_for(lambda state: len(state.members) == 3, timeout=60)


def test_two_candidates_of_one_id_are_two(world: World) -> None:
    first, second = candidate(world, "a"), candidate(world, "a")
    assert (first.is_leader, second.is_leader) == (True, False)
    first.resign()
    world.step()
    assert (first.is_leader, second.is_leader) == (False, True)


def test_tokens_grow_over_the_deletion_of_the_election(world: World) -> None:
    tokens = []
    for _ in range(3):
        a = candidate(world, "a")
        tokens.append(a.fencing_token)
        synchronizer = StateSynchronizer(
            world.store(), "election/ship", state_type=Members, updates=UPDATES, clock=world.clock
        )
        synchronizer.delete()
        a.step()
        with pytest.raises(LeaseLostError):
            a.check()
        world.kill(a)
    assert tokens == sorted(set(tokens))


def test_a_candidate_campaigns_again_after_its_election_was_deleted(world: World) -> None:
    a = candidate(world, "a")
    token = a.fencing_token
    StateSynchronizer(world.store(), "election/ship", state_type=Members, updates=UPDATES, clock=world.clock).delete()
    world.step()
    b = candidate(world, "b", campaigns=False)
    a.campaign(wait=False)
    assert leaders(a, b) == ["a"] and a.fencing_token > token


def test_who_has_left_leaves_no_lease_behind(world: World) -> None:
    a, b, c = (candidate(world, name) for name in "abc")
    b.resign()
    world.kill(c)
    world.pass_time(TIMEOUT + 2)
    lease = world.state("election/ship").members[0].lease
    assert list(a.failing.attributes("election/ship", "lease/")) == [f"lease/{lease}"]


def test_f16_a_term_counts_from_the_sending_of_what_began_it(world: World) -> None:
    a = candidate(world, "a", campaigns=False)
    sent_at = world.clock.monotonic()
    # The answer takes its time.
    a.failing.after = lambda operation: world.clock.advance(3.0) if operation.verb == "append" else None
    a.campaign(wait=False)
    a.failing.after = None
    world.clock.advance(sent_at + 0.8 * TIMEOUT - world.clock.monotonic() - 0.1)
    a.check()
    world.clock.advance(0.2)
    with pytest.raises(LeaseLostError):
        a.check()


def test_a_leader_that_was_deposed_cannot_renew_its_lease(world: World) -> None:
    a, b = candidate(world, "a"), candidate(world, "b")
    world.kill(a)
    world.pass_time(TIMEOUT + 2)
    a._participant._made_keepers.renewing.step()  # before it has heard of anything
    assert leaders(a, b) == ["b"]


# ---------------------------------------------------------------------- the store


def test_f9_an_outage_of_the_store_deposes_nobody(world: World) -> None:
    a, b, c = (candidate(world, name) for name in "abc")
    world.pass_time(5)
    token = a.fencing_token
    for each in (a, b, c):
        each.failing.unavailable = True
    world.pass_time(3 * TIMEOUT)
    assert leaders(a, b, c) == []
    with pytest.raises(LeaseLostError):
        a.check()
    for each in (b, c, a):
        each.failing.unavailable = False
    world.pass_time(1)
    assert leaders(a, b, c) == ["a"] and a.fencing_token == token
    assert a.heard == [token, None, token]
    assert [each.member for each in world.state("election/ship").members] == ["a", "b", "c"]


def test_a_leader_that_is_cut_off_says_so_before_the_next_one_is_elected(world: World) -> None:
    a, b = candidate(world, "a"), candidate(world, "b")
    world.pass_time(5)
    a.failing.unavailable = True
    for _ in range(130):
        world.pass_time(0.1, step=0.1)
        assert len(leaders(a, b)) <= 1
    assert leaders(a, b) == ["b"]
    assert a.heard == [a.heard[0], None]


def test_a_lease_that_is_renewed_while_it_is_judged_is_kept(world: World) -> None:
    """The removal compares with the value that was observed, in the step that removes."""
    a, b = candidate(world, "a"), candidate(world, "b")
    world.pass_time(5)
    world.kill(a)
    saved = []

    def renew_at_the_last_moment(operation: Operation) -> None:
        if operation.verb == "append" and b.failing.operations[-2].verb == "attributes":  # else it is a renewal
            b.failing.before = None
            a.step()
            saved.append(a.is_leader)

    b.failing.before = renew_at_the_last_moment
    world.pass_time(TIMEOUT + 2)
    assert saved == [True]
    assert b.leader() == "a"


@pytest.mark.stores
def test_lost_answers_make_no_second_candidate_and_depose_nobody(world: World) -> None:
    a, b = candidate(world, "a", campaigns=False), candidate(world, "b", campaigns=False)
    for each in (a, b):
        each.failing.lose_answers(1)
        each.campaign(wait=False)
        each.failing.lose_requests(1)
    world.pass_time(TIMEOUT)
    assert leaders(a, b) == ["a"]
    assert [each.member for each in world.state("election/ship").members] == ["a", "b"]
    a.failing.lose_answers(1)
    a.resign()
    world.step()
    assert leaders(a, b) == ["b"]


# ---------------------------------------------------------------------- threads

LONG = 60.0


@pytest.mark.parametrize("then", ["campaign", "resign"])
def test_a_campaign_that_nobody_heard_of_stands_in_nobodys_way(world: World, then: str) -> None:
    a = candidate(world, "a", campaigns=False)
    a.failing.lose_answers()
    a.failing.after = lambda operation: setattr(a.failing, "unavailable", operation.verb == "append")
    with pytest.raises(OutcomeUnknownError):
        a.campaign(wait=False, timeout=1.0)
    assert len(world.state("election/ship").members) == 1
    a.failing.after, a.failing.unavailable = None, False
    if then == "campaign":
        a.campaign(wait=False)
        a.check()
    else:
        a.resign()
    members = world.state("election/ship").members
    assert [each.incarnation for each in members] == ([a.fencing_token] if then == "campaign" else [])
    assert len(a.failing.attributes("election/ship", "lease/")) == len(members)


def running(
    world: World, candidate_id: str, store: FailingStore | None = None, *, timeout_seconds: float = 600.0
) -> LeaderElection:
    """A candidate with threads, on the machine's clock."""
    store = store or world.store(SystemClock())
    return LeaderElection(store, "ship", candidate_id, member_timeout_seconds=timeout_seconds)


class Campaign:
    """A thread that waits to be elected."""

    def __init__(self, election: LeaderElection) -> None:
        self.answers: list[bool] = []
        self._thread = threading.Thread(target=lambda: self.answers.append(election.campaign()))
        self._thread.start()
        election.synchronizer.wait_for(
            lambda state: any(each.member == election.candidate_id for each in state.members), timeout=LONG
        )

    def ended(self) -> list[bool]:
        self._thread.join(LONG)
        return self.answers


def test_a_campaign_waits_until_it_is_elected_and_no_longer_than_it_has_time(world: World) -> None:
    with running(world, "a") as a, running(world, "b") as b:
        assert a.campaign(timeout=LONG)
        with pytest.raises(DeadlineExceededError, match="another candidate is the leader"):
            b.campaign(timeout=0.1)
        assert [each.member for each in a.synchronizer.fetch_updates().members] == ["a"]
        campaign = Campaign(b)
        assert campaign.answers == []
        a.resign()
        assert campaign.ended() == [True] and b.leader() == "b"


def test_resigning_and_closing_end_a_campaign_that_waits(world: World) -> None:
    with running(world, "a") as a, running(world, "b") as b, running(world, "c") as c:
        a.campaign(timeout=LONG)
        campaigns = [Campaign(b), Campaign(c)]
        b.resign()
        c.close()
        assert [campaign.ended() for campaign in campaigns] == [[False], [False]]
        with pytest.raises(ClosedError):
            c.campaign(timeout=LONG)
        assert [each.member for each in a.synchronizer.fetch_updates().members] == ["a"]


def test_a_campaign_whose_election_is_closed_while_it_looks_ends_without_an_error(world: World) -> None:
    with running(world, "a") as a, running(world, "b") as b:
        assert a.campaign() and not b.campaign(wait=False)
        participant, looks = b._participant, []

        def look() -> bool:
            if looks:
                return not participant.wanted
            looks.append("before the close")
            b.close()
            participant._end(ClosedError("as the threads of the election learn"))
            return False

        assert participant.wait_until(look, Deadline(SystemClock(), LONG))


@pytest.mark.parametrize("end", [LeaderElection.resign, LeaderElection.close])
def test_resigning_and_closing_do_not_wait_for_a_campaign_that_waits_for_the_store(
    world: World, end: Callable[[LeaderElection], None]
) -> None:
    store = world.store(SystemClock())
    asked, goes_on = threading.Event(), threading.Event()

    def hang(operation: Operation) -> None:
        if operation.verb == "append" and threading.current_thread() is campaign:
            asked.set()
            assert goes_on.wait(LONG)

    election = running(world, "a", store, timeout_seconds=0.6)
    campaign = threading.Thread(target=lambda: election.campaign(timeout=LONG))
    store.before = hang
    campaign.start()
    assert asked.wait(LONG)
    end(election)
    goes_on.set()
    campaign.join(LONG)
    with running(world, "b") as other:
        assert other.campaign(timeout=LONG)
    election.close()


def test_listeners_hear_of_a_lease_that_runs_out_while_the_store_is_away(world: World) -> None:
    store = world.store(SystemClock())
    heard: list[int | None] = []
    with running(world, "a", store, timeout_seconds=0.6) as a:
        a.on_elected(heard.append)
        a.on_lost(lambda: heard.append(None))
        a.campaign(timeout=LONG)
        # A busy machine may pause for as long as the lease lasts, and then the listeners hear of it as well.
        until(lambda: heard and heard[-1] is not None, "the election")
        token = heard[0]
        store.unavailable = True
        until(lambda: heard[-1] is None, "the loss")
        losses = heard.count(None)
        store.unavailable = False
        until(lambda: heard[-1] == token, "the return")
    assert heard == [token, None] * (len(heard) // 2) and heard.count(None) > losses


def test_observers_see_each_leader_that_lasts(world: World) -> None:
    with running(world, "a") as a, running(world, "b") as b, running(world, "observer") as observer:
        a.campaign(timeout=LONG)
        b.campaign(wait=False)
        leaders = observer.observe()
        assert next(leaders) == "a"
        a.resign()
        assert next(leaders) == "b"
        b.resign()
        assert next(leaders) is None
        observer.close()
        assert list(leaders) == []


def test_a_follower_that_cannot_get_back_in_line_now_tries_again_soon(world: World) -> None:
    a, b = candidate(world, "a"), candidate(world, "b")
    world.kill(b)
    world.pass_time(TIMEOUT + 2)

    def take_nothing(operation: Operation) -> None:
        if operation.verb == "append":
            raise StoreUnavailableError("it takes nothing now")

    b.failing.before = take_nothing
    b.step()
    due = b.step()
    assert world.clock.monotonic() < due <= world.clock.monotonic() + 1
    b.failing.before = None
    b.step()
    assert [each.member for each in world.state("election/ship").members] == ["a", "b"]
    assert leaders(a, b) == ["a"]


def test_a_listener_that_registers_in_a_term_hears_of_its_end_though_no_thread_has_told_of_its_beginning(
    world: World,
) -> None:
    a = candidate(world, "a", campaigns=False)
    a.campaign(wait=False)
    lost: list[bool] = []
    a.on_lost(lambda: lost.append(a.is_leader))
    a.resign()
    world.step()
    assert lost == [False]
    world.step()
    assert lost == [False]


def test_a_listener_that_exits_stops_no_other(world: World) -> None:
    a = candidate(world, "a", campaigns=False)
    heard: list[int] = []
    a.on_elected(sys.exit)
    a.on_elected(heard.append)
    a.campaign(wait=False)
    world.step()
    assert heard == [a.fencing_token]


def test_a_closed_store_ends_the_waiting_and_the_term(world: World) -> None:
    def real(candidate_id: str) -> tuple[FailingStore, LeaderElection]:
        store = world.store(SystemClock())
        return store, running(world, candidate_id, store)

    (store_of_a, a), (store_of_b, b) = real("a"), real("b")
    a.campaign()
    lost = threading.Event()
    a.on_lost(lost.set)
    ended: list[BaseException] = []

    def campaign() -> None:
        with pytest.raises(ClosedError) as found:
            b.campaign()
        ended.append(found.value)

    waiting = threading.Thread(target=campaign)
    waiting.start()
    a.synchronizer.wait_for(lambda state: len(state.members) == 2)
    store_of_b.close()
    waiting.join(LONG)
    assert ended
    store_of_a.close()
    assert lost.wait(LONG)
    a.close()
    b.close()


def test_a_coroutine_function_is_no_listener(world: World) -> None:
    async def listener(*_: object) -> None: ...

    a = candidate(world, "a", campaigns=False)
    for register in a.on_elected, a.on_lost:
        with pytest.raises(InvalidArgumentError, match="plain function"):
            register(listener)


def test_renewals_that_go_on_failing_are_logged_once(world: World, caplog: pytest.LogCaptureFixture) -> None:
    a = candidate(world, "a")
    a.failing.fail_appends(1000)
    world.pass_time(TIMEOUT / 2)
    assert len([record for record in caplog.records if "election/ship" in record.getMessage()]) == 1
    assert a.failing.count("append") > 5
