"""A pool that dies before and after each of its calls of the store, while another one goes on."""

from __future__ import annotations

from collections.abc import Iterable

from .run import run
from .scenario import Actor, Mishap, Scenario


def deaths_of(pool: Actor, other: Actor, calls: Iterable[int], *, duration: float) -> int:
    """Let ``pool`` die at each of these calls. Nothing may be broken. Return in how many runs it died."""
    died = 0
    for call in calls:
        for moment in ("before", "after"):
            outcome = run(
                Scenario(
                    seed=call,
                    duration=duration,
                    actors=(Actor("writer1", "writer", subject="shop/orders"), pool, other),
                    mishaps=(Mishap(pool.at, "dies", pool.name, calls=call, moment=moment),),
                    accidents=False,
                )
            )
            assert not outcome.failed, outcome.violations
            died += outcome.world.processes[pool.name] in outcome.auditor.killed_at
    return died
