"""Which processes a schedule has, when each gets which signal, and what befalls the store. One seed makes one plan."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Final, Literal, NamedTuple

from tests.chaos.hosts import NETWORK_FAULTS, Fault, StoreKind

Role = Literal["reader", "writer", "scaler", "sealer"]
#: "term" is SIGTERM, which asks a process to leave; "stop" and "continue" are SIGSTOP and SIGCONT.
Action = Literal["start", "kill", "stop", "continue", "term"]

#: What a process does over and over beside its work: opens another client and closes it, forks, has an interrupt after
#: which it begins its work again, or has no file descriptor left for a moment.
Beside = Literal["second client", "forks", "interrupts", "exhaustion"]

READER_TIMEOUT_SECONDS: Final = 2.0
#: How long signals are sent, before the stream is sealed and read to its end.
SECONDS: Final[dict[StoreKind, float]] = {
    "sqlite": 6.0,
    "postgresql": 9.0,
    "nats": 9.0,
    "nats-cluster": 12.0,
    "url": 6.0,
}
#: What may befall each kind of store, and for how long, in seconds: some shorter than a lease and some longer.
MISHAPS: Final[dict[StoreKind, dict[Fault, tuple[float, float]]]] = {
    "sqlite": {},
    "url": {},
    "postgresql": {
        **dict.fromkeys(NETWORK_FAULTS, (0.3, 3.0)),
        "restarted": (0.0, 2.5),
        "killed": (0.0, 2.5),
        "frozen": (0.3, 3.5),
    },
    "nats": {
        **dict.fromkeys(NETWORK_FAULTS, (0.3, 3.0)),
        "restarted": (0.0, 2.5),
        "killed": (0.0, 2.5),
        "frozen": (0.3, 3.5),
    },
    "nats-cluster": {
        **dict.fromkeys(NETWORK_FAULTS, (0.3, 3.0)),
        "restarted": (0.0, 3.0),
        "killed": (0.0, 3.0),
        "leader killed": (0.0, 10.0),
        "leader frozen": (0.5, 10.0),
        "rolling restart": (0.0, 0.0),
        "all nodes killed": (0.0, 2.0),
    },
}

#: How often each role meets each fault, per ten.
_FAULTS: Final[dict[str, dict[Action, int]]] = {
    "reader": {"kill": 5, "stop": 3, "term": 2},
    "writer": {"kill": 6, "stop": 2, "term": 2},
    "scaler": {"kill": 7, "stop": 2, "term": 1},
}
#: A process is stopped for so long, in seconds: longer than a lease.
_STOPPED_SECONDS: Final = (1.1 * READER_TIMEOUT_SECONDS, 1.7 * READER_TIMEOUT_SECONDS)
#: How long a process is left in peace, and how long where the store has faults, which it is to live through.
_PEACE_SECONDS: Final = (0.3, 2.5)
_LONGER_PEACE_SECONDS: Final = (0.5, 7.0)
_PAUSES_SECONDS: Final = (0.0, 0.0005, 0.002, 0.004)
_SAME_ID: Final = 0.35
_NOT_REPLACED: Final = 0.15
_TWIN: Final = 0.3
#: In so many schedules, readers handle this many events at once.
_CONCURRENT: Final = 0.25
CONCURRENCY: Final = 50
_BESIDE: Final[dict[Beside, float]] = {"second client": 0.3, "forks": 0.3, "interrupts": 0.2, "exhaustion": 0.2}
#: How many of the processes have the network between them and the store that mishaps befall.
_PROXIED: Final = 0.5


class Life(NamedTuple):
    """One process, from its start to its end. Several may have the same id, one after the other."""

    name: str
    role: Role
    id: str
    #: How long a reader takes for most events.
    pause_seconds: float
    seed: int
    beside: tuple[Beside, ...] = ()
    #: How many events a reader handles at once.
    concurrency: int = 1


class Step(NamedTuple):
    at: float
    action: Action
    life: str


class Mishap(NamedTuple):
    """The store, or the way to it, has this fault from ``at`` on, for so many seconds."""

    at: float
    fault: Fault
    seconds: float


@dataclass(frozen=True)
class Plan:
    seed: int
    kind: StoreKind
    #: How long signals are sent.
    seconds: float
    number_of_segments: int
    position_interval_seconds: float
    lives: dict[str, Life]
    #: Seconds count from the beginning of the schedule.
    steps: tuple[Step, ...]
    #: Seconds count from the moment when everything is written; if the stream is sealed meanwhile, from `seconds` on.
    ending: tuple[Step, ...]
    seals_while_writing: bool
    #: One after the other, those of the servers and those of the network.
    mishaps: tuple[Mishap, ...] = ()
    #: The lives that come through the proxy.
    proxied: frozenset[str] = frozenset()

    @property
    def is_concurrent(self) -> bool:
        """Whether its readers handle many events at once."""
        return any(life.concurrency > 1 for life in self.lives.values())

    def __str__(self) -> str:
        """The plan as text, a line for each step."""
        first = (
            f"seed {self.seed} on {self.kind}: {self.number_of_segments} segments, "
            f"positions every {self.position_interval_seconds} s, "
            f"{f'{CONCURRENCY} events at once, ' if self.is_concurrent else ''}"
            f"sealed {'while' if self.seals_while_writing else 'after'} writing"
        )
        lines = [(step.at, f"{step.action:<8}  {step.life}{self._way(step)}") for step in self.steps]
        lines += [(mishap.at, f"{mishap.fault} for {mishap.seconds:.2f} s") for mishap in self.mishaps]
        steps = [f"  {at:6.2f}  {what}" for at, what in sorted(lines)]
        ending = [f"  +{step.at:5.2f}  {step.action:<8}  {step.life}{self._way(step)}" for step in self.ending]
        return "\n".join([first, *steps, "  then", *ending])

    def _way(self, step: Step) -> str:
        if step.action != "start":
            return ""
        beside = "".join(f", {what}" for what in self.lives[step.life].beside)
        return (" through the proxy" if step.life in self.proxied else "") + beside


def plan(seed: int, kind: StoreKind = "sqlite") -> Plan:
    """The plan of this seed for this kind of store."""
    rng = random.Random(seed)
    cast = _Cast(rng, SECONDS[kind], _LONGER_PEACE_SECONDS if MISHAPS[kind] else _PEACE_SECONDS)
    steps: list[Step] = []
    for role, number in (("reader", rng.randint(2, 5)), ("writer", rng.randint(2, 3)), ("scaler", rng.randint(1, 2))):
        for slot in range(number):
            steps += cast.play(role, f"{role[0]}{slot}")  # type: ignore[arg-type]
    steps.sort()
    number_of_segments, position_interval_seconds = rng.randint(2, 6), rng.choice((0.1, 0.3, 1.0))
    ending = tuple(sorted(cast.end(steps)))
    made = Plan(
        seed=seed,
        kind=kind,
        seconds=SECONDS[kind],
        number_of_segments=number_of_segments,
        position_interval_seconds=position_interval_seconds,
        lives=_with_concurrency(
            _with_what_is_beside(cast.lives, random.Random(f"{seed} beside")), random.Random(f"{seed} concurrent")
        ),
        steps=tuple(steps),
        ending=ending,
        seals_while_writing=rng.random() < 0.3,
    )
    if not MISHAPS[kind]:
        return made
    proxied = frozenset(name for name in made.lives if rng.random() < _PROXIED)
    return replace(made, mishaps=tuple(_mishaps(rng, kind)), proxied=proxied)


def seeds(first: int = 0, *, concurrent: bool = False) -> Iterator[int]:
    """The seeds from ``first`` on, or only those whose readers handle many events at once."""
    return (seed for seed in count(first) if not concurrent or plan(seed).is_concurrent)


def _with_what_is_beside(lives: dict[str, Life], rng: random.Random) -> dict[str, Life]:
    return {
        name: life._replace(beside=tuple(what for what, share in _BESIDE.items() if rng.random() < share))
        for name, life in lives.items()
    }


def _with_concurrency(lives: dict[str, Life], rng: random.Random) -> dict[str, Life]:
    if rng.random() >= _CONCURRENT:
        return lives
    return {
        name: life._replace(
            concurrency=CONCURRENCY,
            # No interrupt reaches the thread in which a pool reads.
            beside=tuple(what for what in life.beside if what != "interrupts"),
        )
        if life.role == "reader"
        else life
        for name, life in lives.items()
    }


def _mishaps(rng: random.Random, kind: StoreKind) -> Iterator[Mishap]:
    """Faults with a while between them in which all may be well; half of them of the network."""
    of_network = [fault for fault in MISHAPS[kind] if fault in NETWORK_FAULTS]
    of_servers = [fault for fault in MISHAPS[kind] if fault not in NETWORK_FAULTS]
    at = rng.uniform(0.3, 1.5)
    while at < SECONDS[kind]:
        fault = rng.choice(rng.choice((of_network, of_servers)))
        seconds = rng.uniform(*MISHAPS[kind][fault])
        yield Mishap(at, fault, seconds)
        at += seconds + rng.uniform(0.5, 2.5)


class _Cast:
    """The processes of a plan, as they are thought of."""

    def __init__(self, rng: random.Random, seconds: float, peace_seconds: tuple[float, float]) -> None:
        self.lives: dict[str, Life] = {}
        self._rng = rng
        self._seconds = seconds
        self._peace_seconds = peace_seconds
        self._ids = 0

    def play(self, role: Role, first_id: str) -> Iterator[Step]:
        """The lives of one process and those that come in its place."""
        rng = self._rng
        at = rng.uniform(0.0, 0.4)
        life, step = self._begin(role, first_id, at)
        yield step
        while (at := at + rng.uniform(*self._peace_seconds)) < self._seconds:
            (fault,) = rng.choices(list(_FAULTS[role]), list(_FAULTS[role].values()))
            yield Step(at, fault, life.name)
            if fault == "stop":
                until = at + rng.uniform(*_STOPPED_SECONDS)
                yield Step(until, "continue", life.name)
                if role != "reader" or rng.random() >= _TWIN:
                    at = until
                    continue
                # Somebody else comes under the id of the one that stands still, who then has to stay out.
                at, next_id = rng.uniform(at, until), life.id
            else:
                if rng.random() < _NOT_REPLACED:
                    return
                at += rng.uniform(0.0, 1.0)
                next_id = life.id if rng.random() < _SAME_ID else self._new_id(role)
            life, step = self._begin(role, next_id, at)
            yield step

    def end(self, steps: list[Step]) -> Iterator[Step]:
        """The stream is sealed, perhaps by a process that dies over it, and a last reader comes."""
        rng = self._rng
        last, step = self._begin("reader", "last", 0.0, pauses=(0.0,))
        yield step
        sealer, step = self._begin("sealer", "sealer", 0.1)
        yield step
        if rng.random() < 0.4:
            yield Step(0.1 + rng.uniform(0.0, 0.1), "kill", sealer.name)
            yield self._begin("sealer", "sealer", 0.25)[1]
        if rng.random() < 0.5:
            ended = {step.life for step in steps if step.action in ("kill", "term")}
            # One whose id another took over stays out.
            newest = {life.id: name for name, life in self.lives.items() if life.role == "reader"}
            readers = [name for name in newest.values() if name not in ended]
            at, killed = rng.uniform(0.1, 0.8), rng.choice(readers)
            if len(readers) > 1:
                yield Step(at, "kill", killed)
            if len(readers) > 1 and killed == last.name:
                # Each of the others may be out: an earlier process of the same id may join after it, if it is slow.
                yield self._begin("reader", "after", at, pauses=(0.0,))[1]

    def _begin(
        self, role: Role, id_: str, at: float, *, pauses: Sequence[float] = _PAUSES_SECONDS
    ) -> tuple[Life, Step]:
        name = f"{role}-{len(self.lives)}-{id_}"
        self.lives[name] = Life(name, role, id_, self._rng.choice(pauses), self._rng.getrandbits(32))
        return self.lives[name], Step(at, "start", name)

    def _new_id(self, role: Role) -> str:
        self._ids += 1
        return f"{role[0]}new{self._ids}"
