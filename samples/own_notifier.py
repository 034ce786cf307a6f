"""Notifications about your own state: a listener receives every hundredth visit, whichever process counted it."""

import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from tempfile import mkdtemp

import readergroup as rg


class Counter(rg.State):
    value: int = 0


class Add(rg.Update[Counter], tag="add"):
    amount: int = 1

    def apply_to(self, state: Counter, revision: rg.Revision) -> Counter:
        return state.replace(value=state.value + self.amount)


class Milestone(rg.Notification):
    value: int


class MilestoneNotifier(rg.PollingNotifier[Counter, Milestone]):
    def detect(self, before: Counter | None, after: Counter, change: rg.Change) -> Iterable[Milestone]:
        reached = after.value // 100
        if reached > (before.value // 100 if before is not None else 0):
            yield Milestone(change=change, value=100 * reached)


def main(folder: Path) -> None:
    with rg.connect(f"sqlite:///{folder / 'shop.db'}") as client:
        visits = client.synchronizer("shop/visits", initial=Counter(), updates=[Add])
        done = threading.Event()

        def on_milestone(milestone: Milestone) -> None:
            print(f"{milestone.value} visits at {milestone.revision}")
            if milestone.value >= 300:
                done.set()

        with MilestoneNotifier(visits) as notifier:
            notifier.register_listener(on_milestone)
            for _ in range(350):
                visits.update_state_unconditionally(Add())
            done.wait(timeout=60)  # listeners run in their own thread


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else mkdtemp()))
