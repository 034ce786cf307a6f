"""Random histories of an election: pauses, deaths, outages, lost answers, and others that act at any operation."""

from __future__ import annotations

import random
import uuid
from contextlib import ExitStack

from synchronizer import ReaderGroupError
from synchronizer.recipes.coordination.election import LeaderElection
from synchronizer.testing import FailingStore, Operation
from tests.seeds import seeds
from tests.synchronizer.recipes.stepped import TIMEOUT, World

CANDIDATES = 4
STEPS = 300


class History:
    """What happens in it follows from the seed."""

    def __init__(self, seed: int, closing: ExitStack) -> None:
        self.rng = random.Random(seed)
        self.world = World(f"memory://{uuid.uuid4()}", closing)
        self.candidates: list[LeaderElection] = []
        self.stores: dict[LeaderElection, FailingStore] = {}
        self.acting: set[LeaderElection] = set()  # in one of its threads
        self.paused: set[LeaderElection] = set()
        self.greatest_token = 0
        self.terms: set[int] = set()
        for number in range(CANDIDATES):
            self.start(f"c{number}")

    def start(self, candidate_id: str) -> None:
        store = self.world.store()
        election = LeaderElection(
            store,
            "ship",
            candidate_id,
            member_timeout_seconds=TIMEOUT,
            timeout=1.0,
            clock=self.world.clock,
            threads=False,
        )
        store.before = lambda operation: self.interrupt(operation, election)
        self.stores[election] = store
        self.candidates.append(election)

    def interrupt(self, operation: Operation, election: LeaderElection) -> None:
        """Before an operation of a candidate time passes, and others do something."""
        if self.rng.random() < 0.05:
            self.world.clock.advance(self.rng.choice([0.1, 1.0, 3.0]))
        if self.rng.random() < 0.1:
            self.act()
        store = self.stores[election]
        if self.rng.random() < 0.03 and operation.verb == "append" and not store.unavailable:  # else they add up
            self.rng.choice([store.lose_answers, store.lose_requests])()
        self.check()

    def act(self) -> None:
        idle = [each for each in self.candidates if each not in self.acting | self.paused]
        if not idle:
            return
        election = self.rng.choice(idle)
        self.acting.add(election)
        try:
            actions = [election._participant._made_keepers.renewing.step, election._participant.work, election.step]
            others = [lambda: election.campaign(wait=False), lambda: election.campaign(wait=False), election.resign]
            self.rng.choice([*actions, *others])()
        except ReaderGroupError:
            pass  # the store was away, or too slow
        finally:
            self.acting.discard(election)

    def step(self) -> None:
        self.world.clock.advance(self.rng.choice([0.0, 0.1, 0.5, 2.0]))
        election, other = self.rng.sample(self.candidates, 2)
        match self.rng.choices(["pause", "cut off", "die", "go on"], [4, 4, 2, 90])[0]:
            case "pause":
                self.paused.add(election)
            case "cut off":
                self.stores[election].unavailable = True
            case "die":
                self.candidates.remove(election)
                self.start(election.candidate_id)
            case "go on" if self.rng.random() < 0.1:
                self.paused.discard(other)
                self.stores[other].unavailable = False
        self.act()
        for each in self.candidates:
            if each not in self.paused and self.rng.random() < 0.7:
                self.acting.add(each)
                each.step()
                self.acting.discard(each)
        self.check()

    def check(self) -> None:
        """S7: whoever may act as the leader now is the only one, and nobody with a greater token was before."""
        leaders = [each for each in self.candidates if each.is_leader]
        assert len(leaders) <= 1
        for leader in leaders:
            token = leader.fencing_token
            assert token >= self.greatest_token
            self.greatest_token = token
            self.terms.add(token)

    def settle(self) -> None:
        """L1: when all goes well again, somebody leads, and everybody says so."""
        self.paused.clear()
        for store in self.stores.values():
            store.before = None
            store.unavailable = False
        for election in self.candidates:
            self.world.add(election)
        self.world.pass_time(1)  # whoever was deposed hears of it
        for election in self.candidates:
            election.campaign(wait=False)
        self.world.pass_time(2 * TIMEOUT + 2, step=0.5)
        assert len([each for each in self.candidates if each.is_leader]) == 1
        assert len({each.leader() for each in self.candidates}) == 1
        assert len(self.world.state("election/ship").members) == CANDIDATES


@seeds(4, 12)
def test_s7_in_no_history_there_are_two_leaders_or_a_token_that_is_smaller(seed: int) -> None:
    with ExitStack() as closing:
        history = History(seed, closing)
        for _ in range(STEPS):
            history.step()
        history.settle()
        assert len(history.terms) > 5  # else it shows little
