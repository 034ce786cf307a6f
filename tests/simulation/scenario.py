"""What happens in a run, as data: who starts when, and what befalls whom.

A scenario is made from a seed by `generate`, or written by hand. It can be printed, replayed and cut down, because
nothing else decides what happens: every actor draws its choices from the seed and its own name.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Final

READER_KINDS: Final = ("iterate", "read", "batch", "commit")
#: As the target of a mishap that waits for a phase: whoever does it.
DOER: Final = "*"
PHASES: Final = (
    "join",
    "id taken over",
    "hand-over",
    "takeover",
    "scale",
    "completion",
    "sealing",
    "end of data",
    "compaction",
    "reload",
    "truncation",
    "write",
    "handling",
    "in line",
    "in doubt",
)
#: A checkpoint is one more, where there are any.
ALL_PHASES: Final = (*PHASES, "checkpoint")
#: Those who take checkpoints and reset the group to them: where there are any, readers keep what they have at those.
KEEPERS_OF_CHECKPOINTS: Final = ("checkpointer", "resetter")
MESSAGES: Final = (
    "unavailable",
    "lost request",
    "late request",
    "lost answer",
    "late answer",
    "short read",
    "missed wake-up",
    "false wake-up",
)

LOSSES: Final = ("lost request", "late request", "lost answer")


@dataclass(frozen=True)
class Actor:
    """A process that starts ``at`` a time and does what its kind does."""

    name: str
    kind: str
    at: float = 0.0
    #: The reader id, or the stream that it works on.
    subject: str = ""
    #: How it reads.
    style: str = "iterate"
    #: How long it takes over an event, or between two steps.
    pause: float = 0.01
    clock_rate: float = 1.0
    clock_offset: float = 0.0
    listens: bool = False
    raises: bool = False
    #: Its process opens and closes a second client all the time.
    comes_and_goes: bool = False
    #: It starts, from ``at`` on, when this phase begins.
    during: str = ""

    def __str__(self) -> str:
        facts = [self.kind, self.subject] if self.kind != "reader" else [f"reader {self.subject}", self.style]
        when = f", when there is a {self.during}" if self.during else ""
        beside = ", beside second clients" if self.comes_and_goes else ""
        return f"{self.at:6.2f}  {self.name} starts: {' '.join(filter(None, facts))}{beside}{when}"


@dataclass(frozen=True)
class Mishap:
    """Something that befalls the process ``target`` ("": the store) ``at`` a time."""

    at: float
    kind: str
    target: str = ""
    seconds: float = 0.0
    rate: float = 0.0
    faults: tuple[str, ...] = ()
    #: Of "dies": at which call of the store from then on, and before it is carried out or after. Of "goes back": how
    #: many entries are lost.
    calls: int = 0
    moment: str = "before"
    #: It waits, from ``at`` on, until this phase begins.
    during: str = ""

    def __str__(self) -> str:
        facts = {"seconds": self.seconds, "rate": self.rate, "faults": ", ".join(self.faults), "calls": self.calls}
        told = " ".join(
            f"{name}={value:.3g}" if isinstance(value, float) else f"{name}={value}"
            for name, value in facts.items()
            if value
        )
        when = f", when there is a {self.during}" if self.during else ""
        return f"{self.at:6.2f}  {self.kind} {self.target or 'the store'} {told}{when}"


@dataclass(frozen=True)
class Scenario:
    """All that decides a run."""

    seed: int
    duration: float = 8.0
    timeout: float = 2.0
    streams: tuple[str, ...] = ("shop/orders",)
    segments: int = 2
    actors: tuple[Actor, ...] = ()
    mishaps: tuple[Mishap, ...] = ()
    position_interval: float = 0.5
    max_processing: float | None = None
    events: int = field(default=60)
    #: The store appends to several segments in one step, and copies inside itself: transactions are merged so.
    copies: bool = False
    #: How often checkpoints are taken by themselves. None: never.
    checkpoint_interval: float | None = None
    #: Handlers take long, or raise, now and then.
    accidents: bool = True
    #: Readers keep what they have processed at checkpoints; they do where there are others who take them.
    keeps: bool = False
    #: The group balances by load, and measures often.
    by_load: bool = False

    @property
    def keeps_checkpoints(self) -> bool:
        return self.keeps or any(actor.kind in KEEPERS_OF_CHECKPOINTS for actor in self.actors)

    def without(self, each: Actor | Mishap) -> Scenario:
        if isinstance(each, Mishap):
            return replace(self, mishaps=tuple(other for other in self.mishaps if other is not each))
        return replace(
            self,
            actors=tuple(other for other in self.actors if other is not each),
            mishaps=tuple(other for other in self.mishaps if other.target != each.name),
        )

    def __str__(self) -> str:
        happens = sorted([*self.actors, *self.mishaps], key=lambda each: each.at)
        head = (
            f"seed {self.seed}: {self.segments} segments in each of {', '.join(self.streams)}; "
            f"timeout {self.timeout} s; {self.duration} s, then calm"
        )
        return "\n".join([head, *map(str, happens)])


def generate(seed: int) -> Scenario:
    """The scenario of a seed."""
    rng = random.Random(f"scenario/{seed}")
    duration = rng.choice((3.0, 4.0, 6.0, 10.0))
    timeout = rng.choice((1.5, 2.0, 3.0))
    # What happens last has some time for its effect, before all faults end.
    times = _Times(rng, duration - timeout)
    streams = ("shop/orders",) if rng.random() < 0.8 else ("shop/orders", "shop/returns")
    in_doubt = rng.random() < 0.15
    actors = tuple(_actors(rng, times, streams, in_doubt))
    happens = [*_placed(rng, _mishaps(rng, times, actors, timeout)), *_aimed(rng, actors)]
    if in_doubt:
        happens += _losses(rng, actors)
    mishaps = tuple(sorted(happens, key=lambda each: each.at))
    scenario = Scenario(
        seed=seed,
        duration=duration,
        timeout=timeout,
        streams=streams,
        segments=rng.choice((1, 2, 2, 3, 4)),
        actors=actors,
        mishaps=mishaps,
        position_interval=rng.choice((0.2, 0.5, 1.0)),
        max_processing=rng.choice((None, None, None, 1.0)),
        events=rng.choice((20, 40, 80, 160)),
    )
    # From another source of chance, so that the runs without checkpoints are what they were before there were any.
    chance = random.Random(f"checkpoints/{seed}")
    if chance.random() < 0.25:
        scenario = _with_checkpoints(scenario, chance)
    chance = random.Random(f"transactions/{seed}")
    if chance.random() < 0.125:
        scenario = _with_transactions(scenario, chance)
    chance = random.Random(f"durable/{seed}")
    if chance.random() < 0.125:
        scenario = _with_durable_listeners(scenario, chance)
    chance = random.Random(f"recorders/{seed}")
    if chance.random() < 0.05:
        scenario = _with_recorders(scenario, chance)
    chance = random.Random(f"together/{seed}")
    if chance.random() < 0.15:
        scenario = _with_concurrent_pools(scenario, chance)
    if random.Random(f"load/{seed}").random() < 0.15:
        scenario = replace(scenario, by_load=True)
    chance = random.Random(f"configuring/{seed}")
    if chance.random() < 0.15:
        scenario = _with_configurers(scenario, chance)
    chance = random.Random(f"retrying/{seed}")
    if chance.random() < 0.05:
        scenario = _with_retriers(scenario, chance)
    chance = random.Random(f"two clients/{seed}")
    if chance.random() < 0.1:
        scenario = _with_second_clients(scenario, chance)
    chance = random.Random(f"archive/{seed}")
    return _with_archive(scenario, chance) if chance.random() < 0.05 else scenario


def _with_second_clients(scenario: Scenario, rng: random.Random) -> Scenario:
    """The same, with second clients in some processes that work for long."""
    lasting = ("reader", "writer", "listener", "clerk", "pool", "concurrent")
    actors = [
        replace(actor, comes_and_goes=True) if actor.kind in lasting and rng.random() < 0.6 else actor
        for actor in scenario.actors
    ]
    return replace(scenario, actors=tuple(actors))


def _with_recorders(scenario: Scenario, rng: random.Random) -> Scenario:
    """The same, with some who record notifications and die over it, with compactions, and one who comes late."""
    last = scenario.duration - scenario.timeout
    early = [(f"recorder{number}", rng.uniform(0, last / 4)) for number in range(1, rng.choice((2, 3, 4)))]
    late = ("recorder late", rng.uniform(last / 2, last))
    recorders = [
        Actor(name, "recorder", at=at, clock_rate=rng.choice((1.0, 0.99, 1.01)), clock_offset=rng.uniform(0, 100))
        for name, at in (*early, late)
    ]
    compactors = [
        Actor(f"compactor{number}r", "compactor", at=rng.uniform(last / 4, last))
        for number in range(rng.choice((1, 2)))
    ]
    if rng.random() < 0.5:  # nobody records from then on, until one comes
        gone_at = rng.uniform(last / 4, last / 2)
        return _with(scenario, (*recorders, *compactors), [Mishap(gone_at, "kill", name) for name, _ in early])
    mishaps = []
    for name, came_at in early:
        at = rng.uniform(came_at, last)
        mishap = rng.choice(("kill", "kill", "dies", "stop", "trouble", ""))
        if mishap == "dies":
            moment = rng.choice(("before", "after"))
            mishaps.append(Mishap(at, mishap, name, calls=rng.randint(1, 10), moment=moment))
        elif mishap == "trouble":
            mishaps.append(Mishap(at, mishap, name, seconds=rng.uniform(1.0, 3.0), rate=0.5, faults=LOSSES))
        elif mishap:
            mishaps.append(Mishap(at, mishap, name, seconds=rng.choice((0.3, 1.0, 4.0))))
    return _with(scenario, (*recorders, *compactors), mishaps)


def _with_archive(scenario: Scenario, rng: random.Random) -> Scenario:
    """The same, beside a state that goes back, with some who had seen what is lost, and others who had not."""
    goes_back_at = rng.uniform(0.4, 0.9) * scenario.duration
    archivists = [
        Actor(
            f"archivist{number}",
            "archivist",
            at=0.0 if number < 3 else rng.uniform(0, scenario.duration),
            pause=rng.choice((0.05, 0.2, 0.5)),
            clock_offset=rng.uniform(0, 100),
        )
        for number in range(1, rng.choice((3, 4, 5)))
    ]
    mishaps = [Mishap(goes_back_at, "goes back", calls=rng.choice((1, 1, 1, 5)))]
    # One is often stopped right before, with what only it has seen, while others go on.
    stopped_at, seconds = goes_back_at - rng.random() * 0.1, rng.choice((0.1, 0.2, 0.3, 1.0))
    mishaps.append(Mishap(stopped_at, "stop", archivists[0].name, seconds=seconds))
    for actor in archivists[1:]:
        mishap = rng.choice(("stop", "cut off", "trouble", "kill", "", "", ""))
        at = max(actor.at, goes_back_at + rng.uniform(-0.5, 0.2))
        if mishap:
            seconds = rng.choice((0.1, 0.5, 1.0, 2.0))
            mishaps.append(Mishap(at, mishap, actor.name, seconds=seconds, rate=0.5, faults=LOSSES))
    return _with(scenario, archivists, mishaps)


def _with(scenario: Scenario, actors: Iterable[Actor], mishaps: Iterable[Mishap]) -> Scenario:
    return replace(
        scenario,
        actors=(*scenario.actors, *actors),
        mishaps=tuple(sorted((*scenario.mishaps, *mishaps), key=lambda each: each.at)),
    )


def _befalling(actor: Actor, kind: str, at: float, timeout: float, rng: random.Random) -> Iterator[Mishap]:
    """What befalls somebody who works all the time; nothing if the kind is empty."""
    if kind == "dies":
        moment = rng.choice(("before", "after"))
        yield Mishap(at, kind, actor.name, calls=rng.randint(1, 30), moment=moment)
    elif kind == "trouble":
        yield Mishap(at, kind, actor.name, seconds=rng.uniform(1.0, 3.0), rate=0.5, faults=LOSSES)
    elif kind:
        yield Mishap(at, kind, actor.name, seconds=rng.choice((0.3, 1.2 * timeout, 2 * timeout)))


def _with_durable_listeners(scenario: Scenario, rng: random.Random) -> Scenario:
    """The same, with some who listen under one name, and mishaps over their calls; and a compaction or two."""
    last = scenario.duration - scenario.timeout
    listeners = [
        Actor(
            f"durable{number}",
            "durable",
            at=rng.choice((0.0, rng.uniform(0, last / 2))),
            clock_rate=rng.choice((1.0, 0.99, 1.01)),
            clock_offset=rng.uniform(0, 100),
            raises=rng.random() < 0.2,
        )
        for number in range(1, rng.choice((2, 3, 4)))
    ]
    compactors = [
        Actor(f"compactor{number}d", "compactor", at=rng.uniform(0, last)) for number in range(rng.choice((0, 1, 2)))
    ]
    mishaps = []
    for actor in listeners:
        at = actor.at + rng.random() * rng.choice((0.3, 2.0, last / 2))  # soon it is in a call
        kind = rng.choice(("dies", "kill", "kill", "stop", "stop", "trouble", "cut off", ""))
        mishaps += _befalling(actor, kind, at, scenario.timeout, rng)
    return replace(
        scenario,
        actors=(*scenario.actors, *listeners, *compactors),
        mishaps=tuple(sorted((*scenario.mishaps, *mishaps), key=lambda each: each.at)),
    )


def _with_transactions(scenario: Scenario, rng: random.Random) -> Scenario:
    """The same, with some who write in transactions, one of whom may die over a commit, and a scale or two."""
    last = scenario.duration - scenario.timeout
    kinds = ["transactor"] * rng.choice((1, 1, 2)) + ["scaler"] * rng.choice((0, 1, 2))
    actors = [
        Actor(
            f"{kind}{number}t",
            kind,
            at=rng.uniform(0, last / 2),
            subject=rng.choice(scenario.streams),
            clock_offset=rng.uniform(0, 100),
        )
        for number, kind in enumerate(kinds, 1)
    ]
    mishaps = []
    for actor in actors:
        at = actor.at + rng.random() * 1.5
        mishap = rng.choice(("dies", "dies", "trouble", "stop", ""))
        if mishap == "dies":
            mishaps.append(
                Mishap(at, mishap, actor.name, calls=rng.randint(1, 40), moment=rng.choice(("before", "after")))
            )
        elif mishap == "trouble":
            mishaps.append(Mishap(at, mishap, actor.name, seconds=rng.uniform(1.0, 3.0), rate=0.5, faults=LOSSES))
        elif mishap == "stop":
            mishaps.append(Mishap(at, mishap, actor.name, seconds=rng.choice((0.3, 1.0, 4.0))))
    return replace(
        scenario,
        copies=rng.random() < 0.5,
        actors=(*scenario.actors, *actors),
        mishaps=tuple(sorted((*scenario.mishaps, *mishaps), key=lambda each: each.at)),
    )


def _with_concurrent_pools(scenario: Scenario, rng: random.Random) -> Scenario:
    """The same, with pools that handle many events at once in place of most readers, and more events."""
    actors = [
        replace(actor, kind="concurrent", style=rng.choice(("async", "async", "thread")))
        if actor.kind == "reader" and rng.random() < 0.8
        else actor
        for actor in scenario.actors
    ]
    return replace(scenario, actors=tuple(actors), events=2 * scenario.events)


def _with_retriers(scenario: Scenario, rng: random.Random) -> Scenario:
    """The same, with pools that retry events later, and die over it.

    Not where somebody deletes a stream, or truncates it at a position of the other group.
    """
    if any(actor.kind in ("founder", "keeper") for actor in scenario.actors):
        return scenario
    last = scenario.duration - scenario.timeout
    clocks_agree = rng.random() < 0.5
    actors = [
        Actor(
            f"retrier{number}",
            "retrier",
            at=rng.choice((0.0, rng.uniform(0, last / 2))),
            pause=rng.choice((0.01, 0.05, 0.2)),
            clock_rate=1.0 if clocks_agree else rng.choice((1.0, 0.99, 1.01)),
            clock_offset=0.0 if clocks_agree else rng.choice((0.0, rng.uniform(0, 100))),
        )
        for number in range(1, rng.choice((2, 3, 4)))
    ]
    mishaps = []
    for actor in actors:
        at = rng.uniform(actor.at, last)
        kind = rng.choice(("dies", "kill", "stop", "stop", "trouble", "cut off", ""))
        mishaps += _befalling(actor, kind, at, scenario.timeout, rng)
    return _with(scenario, actors, mishaps)


def _with_configurers(scenario: Scenario, rng: random.Random) -> Scenario:
    """The same on two streams, with some who take a stream out of the group and add it again, and die over it.

    Not where there are checkpoints or pools that handle many events at once, which the auditor follows by stream.
    """
    if scenario.keeps_checkpoints or any(actor.kind == "concurrent" for actor in scenario.actors):
        return scenario
    last = scenario.duration - scenario.timeout
    actors = [
        Actor(
            f"configurer{number}",
            "configurer",
            at=rng.uniform(0, last / 2),
            pause=rng.choice((0.05, 0.3, 1.0)),
            clock_offset=rng.uniform(0, 100),
            during=rng.choice(("", "", "hand-over", "takeover", "scale", "join")),
        )
        for number in range(1, rng.choice((2, 2, 3)))
    ]
    writer = Actor("writer of returns", "writer", subject="shop/returns", pause=0.05)
    mishaps = []
    for actor in actors:
        mishap = rng.choice(("dies", "trouble", "stop", "", ""))
        at = actor.at + rng.random() * 1.5
        if mishap == "dies":
            moment = rng.choice(("before", "after"))
            mishaps.append(Mishap(at, mishap, actor.name, calls=rng.randint(1, 20), moment=moment))
        elif mishap:
            mishaps.append(Mishap(at, mishap, actor.name, seconds=rng.uniform(0.5, 3.0), rate=0.5, faults=LOSSES))
    return _with(replace(scenario, streams=("shop/orders", "shop/returns")), (*actors, writer), mishaps)


def _with_checkpoints(scenario: Scenario, rng: random.Random) -> Scenario:
    """The same, with some who take checkpoints, perhaps one who resets the group, and mishaps in between."""
    kinds = ["checkpointer"] * rng.choice((1, 1, 2)) + ["resetter"] * rng.choice((0, 1, 1))
    last = scenario.duration - scenario.timeout
    actors = [
        Actor(
            f"{kind}{number}",
            kind,
            at=rng.uniform(0, last / 2),
            clock_offset=rng.uniform(0, 100),
            pause=rng.choice((0.05, 0.3, 1.0)),
            during=rng.choice(("", "", "hand-over", "takeover", "scale", "completion", "join")),
        )
        for number, kind in enumerate(kinds, 1)
    ]
    mishaps = []
    for _ in range(rng.choice((0, 1, 2, 4))):
        target = rng.choice([actor.name for actor in scenario.actors if actor.kind == "reader"])
        kind = rng.choice(("kill", "stop", "cut off", "dies", "slow"))
        mishap = Mishap(rng.uniform(0, last), kind, target, seconds=rng.choice((0.3, 1.0, 1.2 * scenario.timeout)))
        if kind == "dies":
            mishap = replace(mishap, calls=rng.randint(1, 5), moment=rng.choice(("before", "after")))
        elif kind == "slow":
            mishap = replace(mishap, rate=rng.choice((10.0, 100.0)))
        mishaps.append(replace(mishap, during="checkpoint"))
    return replace(
        scenario,
        actors=(*scenario.actors, *actors),
        mishaps=tuple(sorted([*scenario.mishaps, *mishaps], key=lambda each: each.at)),
        checkpoint_interval=rng.choice((None, None, 0.5, 2.0)),
    )


class _Times:
    """When things happen: at any time, or close together, where they meet each other half done."""

    def __init__(self, rng: random.Random, duration: float) -> None:
        self._rng = rng
        self._duration = duration
        self._busy = [rng.uniform(0, duration) for _ in range(rng.choice((1, 2, 3)))]

    def draw(self, start: float | None = None) -> float:
        """A time for something to happen; with ``start``, to who started then, and often soon after that."""
        rng = self._rng
        earliest = start or 0.0
        busy = [at for at in self._busy if at >= earliest]
        chance = rng.random()
        if busy and chance < 0.4:
            return rng.choice(busy) + rng.random() * rng.choice((0.01, 0.1, 0.5))
        if start is not None and chance < 0.7:
            return earliest + rng.random() * rng.choice((0.02, 0.2, 2.0))
        return rng.uniform(earliest, max(earliest, self._duration))


def _actors(rng: random.Random, times: _Times, streams: tuple[str, ...], in_doubt: bool) -> Iterator[Actor]:
    """The processes; with ``in_doubt``, some of them come when a writer does not know what is stored."""
    number = 0

    def actor(kind: str, *, subject: str = "", at: float | None = None, **options: object) -> Actor:
        nonlocal number
        number += 1
        return Actor(
            name=f"{kind}{number}",
            kind=kind,
            subject=subject,
            at=times.draw() if at is None else at,
            pause=rng.choice((0.002, 0.01, 0.05, 0.2, 0.4)),
            clock_rate=rng.choice((1.0, 1.0, 0.99, 1.01)),
            clock_offset=rng.uniform(0, 100),
            **options,  # type: ignore[arg-type]
        )

    for index in range(rng.choice((2, 2, 3, 3, 4, 5))):
        at = 0.0 if index == 0 or rng.random() < 0.4 else None
        yield actor(
            "reader",
            subject=f"r{rng.randrange(4)}" if index else "r0",
            at=at,
            style=rng.choice(READER_KINDS),
            listens=rng.random() < 0.15,
            raises=rng.random() < 0.15,
        )
    for _ in range(rng.choice((1, 1, 2))):
        yield actor("writer", subject=rng.choice(streams), at=0.0 if rng.random() < 0.7 else None)
    for kind, chances in _OTHERS.items():
        together = times.draw()
        for _ in range(rng.choice(chances)):
            # Those who work on one thing: all at once, or one after the other.
            at = together if kind == "clerk" else None
            during = ""
            if kind in _MEDDLERS and rng.random() < 0.5:
                during = "in doubt" if in_doubt else rng.choice((*PHASES, *3 * ("scale",)))
            yield actor(kind, subject=rng.choice(streams), at=at, during=during)


#: How many of each kind of process there are, at random.
_OTHERS: Final = {
    "scaler": (0, 1, 1, 2, 3),
    "compactor": (0, 0, 1, 2),
    "clerk": (0, 0, 0, 2, 3),
    "keeper": (0, 0, 0, 1),
    "remover": (0, 0, 0, 1),
    "listener": (0, 0, 0, 1),
    "founder": (0, 0, 0, 0, 0, 1),
    "pool": (0, 0, 0, 0, 1),
    "autoscaler": (0, 0, 0, 0, 0, 2),
    "ender": (0, 0, 0, 0, 0, 1),
    "weigher": (0, 0, 0, 0, 1, 2),
    "upgrader": (0, 0, 0, 0, 0, 1),
}


#: Those whose work is to come in between that of others.
_MEDDLERS: Final = ("scaler", "compactor", "keeper", "remover", "founder", "ender")


def _placed(rng: random.Random, mishaps: Iterator[Mishap]) -> Iterator[Mishap]:
    """Half of the mishaps wait for a phase to begin: most are over so soon that no time hits them by chance."""
    for mishap in mishaps:
        if rng.random() < 0.5:
            target = DOER if mishap.target and rng.random() < 0.6 else mishap.target
            yield replace(mishap, during=rng.choice(PHASES), target=target, at=mishap.at * rng.random())
        else:
            yield mishap


def _aimed(rng: random.Random, actors: tuple[Actor, ...]) -> Iterator[Mishap]:
    """What a schedule needs that chance alone seldom brings about: somebody is slow, or stopped, half way."""
    kinds = {actor.kind for actor in actors}
    if rng.random() < (0.5 if "founder" in kinds else 0.1):
        yield Mishap(0.0, "slow", DOER, seconds=rng.choice((0.3, 1.0)), rate=100.0, during="scale")
    if "clerk" in kinds and rng.random() < 0.3:
        yield Mishap(0.0, "stop", DOER, seconds=rng.choice((1.0, 4.0)), during="in line")


def _losses(rng: random.Random, actors: tuple[Actor, ...]) -> Iterator[Mishap]:
    """Half of what writers send, or are answered, is lost for a while."""
    for actor in actors:
        if actor.kind == "writer":
            at = actor.at + rng.random() * 0.5
            yield Mishap(at, "trouble", actor.name, seconds=rng.uniform(1.0, 3.0), rate=0.5, faults=LOSSES)


_MISHAPS: Final = ("full", "kill", "dies", "dies", "slow", "cut off", "stop", "stop", "stop") + (
    "away",
    "away",
    "trouble",
    "trouble",
    "bad network",
    "bad network",
)


def _mishaps(rng: random.Random, times: _Times, actors: tuple[Actor, ...], timeout: float) -> Iterator[Mishap]:
    readers = [actor for actor in actors if actor.kind == "reader"]
    for _ in range(rng.choice((0, 4, 6, 8, 10, 12))):
        target = rng.choice(readers if rng.random() < 0.4 else actors)
        at = times.draw(target.at)
        if target.kind not in ("reader", "listener") and rng.random() < 0.7:
            # Most processes do what they do at once, and are done.
            at = target.at + rng.random() * (1.5 if target.kind == "writer" else 0.01)
        if rng.random() < 0.2:  # just before somebody comes
            at = max(target.at, rng.choice(actors).at - rng.random() * 0.1)
        kind = rng.choice(_MISHAPS)
        if kind == "kill":
            yield Mishap(at, kind, target.name)
        elif kind == "dies":
            yield Mishap(
                at, kind, target.name, calls=rng.randint(1, rng.choice((3, 30))), moment=rng.choice(("before", "after"))
            )
        elif kind == "stop" or kind == "cut off":
            yield Mishap(at, kind, target.name, seconds=rng.choice((0.3, 1.0, 1.2 * timeout, 2 * timeout)))
        elif kind == "full":
            yield Mishap(at, kind, seconds=rng.choice((0.5, 2.0, 5.0)))
        elif kind == "away":
            yield Mishap(at, kind, seconds=rng.choice((0.3, 1.0, 1.2 * timeout, 2 * timeout)))
        elif kind == "slow":
            yield Mishap(at, kind, target.name, seconds=rng.choice((0.5, 2.0)), rate=rng.choice((10.0, 100.0)))
        elif kind == "bad network":
            faults = tuple(rng.sample(MESSAGES, rng.randint(1, 3)))
            yield Mishap(at, kind, seconds=rng.uniform(0.5, 4.0), rate=rng.choice((0.03, 0.1, 0.3)), faults=faults)
        else:
            # Half of the writers' are those after which they do not know what is stored.
            kinds = LOSSES if target.kind == "writer" and rng.random() < 0.5 else MESSAGES
            faults = tuple(rng.sample(kinds, rng.randint(1, min(4, len(kinds)))))
            yield Mishap(
                at, kind, target.name, seconds=rng.uniform(0.5, 4.0), rate=rng.choice((0.1, 0.5, 0.8)), faults=faults
            )
