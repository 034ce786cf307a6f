"""A second client in a process of a simulation, which comes and goes while the first one works."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import readergroup as rg

from .ledger import open_ledger

if TYPE_CHECKING:
    from .actors import Application


def come_and_go(application: Application, group: str) -> None:
    """Open a second client, let it work a little and close it, again and again until all is calm."""
    process, run = application.process, application.run
    rng = random.Random(f"{run.scenario.seed}/{process.name}/second client")  # the first one's chances stay its own
    number = 0
    while not (run.calm or application.finished):
        number += 1
        process.sleep(rng.random() * rng.choice((0.05, 0.5, 2.0)))
        pause = partial(process.sleep, rng.random() * rng.choice((0.01, 0.3)))
        try:
            with process.second_client(timeout=5.0) as client:
                process.world.say(process.name, "opens a second client")
                match rng.choice(("join", "enter", "look")):
                    case "join":
                        _join(client.groups.get(group), f"{process.name}-{number}", pause)
                    case "enter":
                        application.enter(open_ledger(client), f"{process.name}/second/{number}")
                    case "look":
                        _look(application, client, group, pause)
        except rg.ReaderGroupError as error:
            process.world.say(process.name, f"closes its second client after {error}")


def _join(group: rg.ReaderGroup, reader_id: str, pause: Callable[[], None]) -> None:
    """Join with a reader that reads nothing, so that others hand segments over to it and take them back."""
    with group.reader(reader_id):
        pause()


def _look(application: Application, client: rg.Client, group: str, pause: Callable[[], None]) -> None:
    found = client.groups.get(group)
    for call in (found.lag, found.online_readers, partial(client.streams.info, application.run.scenario.streams[0])):
        application.timed("look", 5.0, call)
        pause()
