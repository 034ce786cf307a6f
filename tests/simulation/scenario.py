"""What happens in a run, as data: who starts when, and what befalls whom.

A scenario is made from a seed by `generate`, or written by hand. It can be printed, replayed and cut down, because
nothing else decides what happens: every actor draws its choices from the seed and its own name.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Final

READER_KINDS: Final = ("iterate", "read", "batch", "commit")
MESSAGES: Final = (
    "unavailable",
    "lost request",
    "late request",
    "lost answer",
    "short read",
    "missed wake-up",
    "false wake-up",
)


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

    def __str__(self) -> str:
        facts = [self.kind, self.subject] if self.kind != "reader" else [f"reader {self.subject}", self.style]
        return f"{self.at:6.2f}  {self.name} starts: {' '.join(filter(None, facts))}"


@dataclass(frozen=True)
class Mishap:
    """Something that befalls the process ``target`` ("": the store) ``at`` a time."""

    at: float
    kind: str
    target: str = ""
    seconds: float = 0.0
    rate: float = 0.0
    faults: tuple[str, ...] = ()
    #: Of "dies": at which call of the store from then on, and before it is carried out or after.
    calls: int = 0
    moment: str = "before"

    def __str__(self) -> str:
        facts = {"seconds": self.seconds, "rate": self.rate, "faults": ", ".join(self.faults), "calls": self.calls}
        told = " ".join(
            f"{name}={value:.3g}" if isinstance(value, float) else f"{name}={value}"
            for name, value in facts.items()
            if value
        )
        return f"{self.at:6.2f}  {self.kind} {self.target or 'the store'} {told}"


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
    duration = rng.choice((4.0, 6.0, 8.0, 12.0))
    streams = ("shop/orders",) if rng.random() < 0.8 else ("shop/orders", "shop/returns")
    actors = tuple(_actors(rng, duration, streams))
    mishaps = tuple(sorted(_mishaps(rng, duration, actors), key=lambda each: each.at))
    return Scenario(
        seed=seed,
        duration=duration,
        timeout=rng.choice((1.5, 2.0, 3.0)),
        streams=streams,
        segments=rng.choice((1, 2, 2, 3, 4)),
        actors=actors,
        mishaps=mishaps,
        position_interval=rng.choice((0.2, 0.5, 1.0)),
        max_processing=rng.choice((None, None, None, 1.0)),
        events=rng.choice((20, 40, 80)),
    )


def _actors(rng: random.Random, duration: float, streams: tuple[str, ...]) -> Iterator[Actor]:
    number = 0

    def actor(kind: str, *, subject: str = "", at: float | None = None, **options: object) -> Actor:
        nonlocal number
        number += 1
        return Actor(
            name=f"{kind}{number}",
            kind=kind,
            subject=subject,
            at=rng.uniform(0, duration) if at is None else at,
            pause=rng.choice((0.002, 0.01, 0.05, 0.2)),
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
        for _ in range(rng.choice(chances)):
            yield actor(kind, subject=rng.choice(streams))


#: How many of each kind of process there are, at random.
_OTHERS: Final = {
    "scaler": (0, 1, 1, 2, 3),
    "compactor": (0, 0, 1, 1),
    "clerk": (0, 0, 0, 2),
    "keeper": (0, 0, 0, 1),
    "remover": (0, 0, 0, 1),
    "listener": (0, 0, 0, 1),
}


def _mishaps(rng: random.Random, duration: float, actors: tuple[Actor, ...]) -> Iterator[Mishap]:
    for _ in range(rng.choice((0, 2, 3, 4, 6, 8))):
        target = rng.choice(actors)
        at = rng.uniform(target.at, duration)
        kind = rng.choice(("kill", "dies", "dies", "stop", "stop", "cut off", "away", "trouble", "trouble", "slow"))
        if kind == "kill":
            yield Mishap(at, kind, target.name)
        elif kind == "dies":
            yield Mishap(
                at, kind, target.name, calls=rng.randint(1, rng.choice((3, 30))), moment=rng.choice(("before", "after"))
            )
        elif kind == "stop" or kind == "cut off":
            yield Mishap(at, kind, target.name, seconds=rng.choice((0.3, 1.0, 3.0, 5.0)))
        elif kind == "away":
            yield Mishap(at, kind, seconds=rng.choice((0.3, 1.0, 4.0)))
        elif kind == "slow":
            yield Mishap(at, kind, target.name, seconds=rng.choice((0.5, 2.0)), rate=rng.choice((10.0, 100.0)))
        else:
            faults = tuple(rng.sample(MESSAGES, rng.randint(1, 4)))
            yield Mishap(
                at, kind, target.name, seconds=rng.uniform(0.5, 4.0), rate=rng.choice((0.1, 0.5)), faults=faults
            )
