"""Cuts a failing scenario down: fewer processes, fewer mishaps, while it still breaks the same guarantee."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from .run import Outcome, run
from .scenario import Scenario

#: How many smaller scenarios are tried.
MAX_RUNS = 80


def shrink(failed: Outcome) -> Outcome:
    """The smallest run found that breaks the guarantee that ``failed`` breaks first, with its transcript."""
    guarantee = failed.violations[0].guarantee
    smallest, left = failed.scenario, MAX_RUNS
    progress = True
    while progress and left > 0:
        progress = False
        for candidate in _smaller(smallest):
            left -= 1
            if left < 0:
                break
            outcome = run(candidate)
            if outcome.failed and outcome.violations[0].guarantee == guarantee:
                smallest, progress = candidate, True
                break
    return run(smallest, transcript=True)


def _smaller(scenario: Scenario) -> Iterator[Scenario]:
    """Scenarios with one thing less, the largest steps first."""
    for actor in scenario.actors:
        yield scenario.without(actor)
    for mishap in scenario.mishaps:
        yield scenario.without(mishap)
    if len(scenario.streams) > 1:
        yield replace(scenario, streams=scenario.streams[:1])
    if scenario.segments > 1:
        yield replace(scenario, segments=1)
    if scenario.events > 10:
        yield replace(scenario, events=scenario.events // 2)
    for actor in scenario.actors:
        if actor.clock_rate != 1.0 or actor.clock_offset:
            plain = replace(actor, clock_rate=1.0, clock_offset=0.0)
            yield replace(scenario, actors=tuple(plain if each is actor else each for each in scenario.actors))
