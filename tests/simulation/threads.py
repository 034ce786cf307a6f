"""Threads that a simulation runs one at a time, on a clock of its own: the same seed gives the same run.

`Simulation` is the scheduler: it holds virtual time and decides, with a seeded generator, which of the threads that can
run goes on. A thread gives way only where a real one would block: at a lock, a condition, an event, a join, or in the
simulated store. `Threading` has the names of the module ``threading`` that the product uses, so that the product's own
threads and locks run in here unchanged.
"""

from __future__ import annotations

import heapq
import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, TypeVar

from greenlet import GreenletExit, getcurrent, greenlet

R = TypeVar("R")

#: How many switches between threads a run may take, if nothing else is said, before it counts as one that never comes
#: to rest.
MAX_SWITCHES: Final = 2_000_000


class NeverAtRest(Exception):
    """The threads go on without end."""


class Owner(Protocol):
    """The process that a thread belongs to."""

    name: str
    alive: bool
    stopped: bool


class SimThread:
    """One thread of a process."""

    def __init__(self, simulation: Simulation, owner: Owner, number: int, name: str, run: Callable[[], object]) -> None:
        self.owner = owner
        self.number = number
        self.name = name
        self.done = False
        self.error: BaseException | None = None
        self.woken = False
        self.sleeping = 0  # which sleep this is, so that a timer of an earlier one has no effect
        self.blocked = False
        self.joiners: list[SimThread] = []
        self._simulation = simulation
        self._run = run
        self.greenlet = greenlet(self._main, parent=simulation.main)

    def _main(self) -> None:
        try:
            self._run()
        except GreenletExit:
            pass
        except BaseException as error:
            self.error = error
        finally:
            self.done = True
            for joiner in self.joiners:
                self._simulation.wake(joiner)
        if self.error is not None and self.owner.alive:
            self._simulation.failed(self, self.error)


class Simulation:
    """Virtual time, and the threads that live in it."""

    def __init__(self, seed: int, *, max_switches: int = MAX_SWITCHES) -> None:
        self.rng = random.Random(seed)
        self.max_switches = max_switches
        self.now = 0.0
        self.main = getcurrent()
        self.current: SimThread | None = None
        self.switches = 0
        self.errors: list[tuple[SimThread, BaseException]] = []
        self._numbers = 0
        self._ready: list[SimThread] = []
        self._timers: list[tuple[float, int, SimThread | None, int, Callable[[], None] | None]] = []
        self._timer_numbers = 0
        self._held: dict[Owner, list[SimThread]] = {}  # could run, but their process is stopped
        self._threads: dict[Owner, list[SimThread]] = {}
        self._doomed: list[Owner] = []

    # ------------------------------------------------------------------ threads

    def spawn(self, owner: Owner, name: str, run: Callable[[], object]) -> SimThread:
        """Start a thread of ``owner``."""
        self._numbers += 1
        thread = SimThread(self, owner, self._numbers, name, run)
        threads = self._threads.setdefault(owner, [])
        if len(threads) > 20:
            threads[:] = [each for each in threads if not each.done]
        threads.append(thread)
        self._ready.append(thread)
        return thread

    def failed(self, thread: SimThread, error: BaseException) -> None:
        self.errors.append((thread, error))

    def kill(self, owner: Owner) -> None:
        """End the process at this very point: none of its threads does anything again."""
        owner.alive = False
        self._doomed.append(owner)
        if self.current is not None and self.current.owner is owner:
            raise GreenletExit

    def stop(self, owner: Owner) -> None:
        """Let none of the process's threads run until `go_on`."""
        owner.stopped = True

    def go_on(self, owner: Owner) -> None:
        owner.stopped = False
        self._ready += self._held.pop(owner, [])

    # ------------------------------------------------------------------ blocking

    def block(self, timeout: float | None = None) -> bool:
        """Let others run until this thread is woken; False if ``timeout`` seconds passed before."""
        thread = self._running()
        thread.sleeping += 1
        thread.woken, thread.blocked = False, True
        if timeout is not None:
            self._set_timer(self.now + max(0.0, timeout), thread, thread.sleeping)
        self._give_way(thread)
        return thread.woken

    def sleep(self, seconds: float) -> None:
        """Let ``seconds`` pass for this thread."""
        thread = self._running()
        at = self.now + seconds
        nobody_else = not self._ready and not self._doomed and not thread.owner.stopped
        if nobody_else and (not self._timers or self._timers[0][0] > at):
            self.now = at
            return
        thread.sleeping += 1
        thread.woken, thread.blocked = False, True
        self._set_timer(at, thread, thread.sleeping)
        self._give_way(thread)

    def yield_now(self) -> None:
        """Let others that can run go first, perhaps."""
        thread = self._running()
        self._ready.append(thread)
        self._give_way(thread)

    def wake(self, thread: SimThread) -> bool:
        """Let a blocked thread run again; False if it is not blocked, perhaps because its time is up already."""
        if not thread.blocked or thread.done:
            return False
        thread.blocked, thread.woken = False, True
        self._ready.append(thread)
        return True

    def call_at(self, at: float, call: Callable[[], None]) -> None:
        """Call something at a time, in no thread. It must not block."""
        self._timer_numbers += 1
        heapq.heappush(self._timers, (max(at, self.now), self._timer_numbers, None, 0, call))

    def _set_timer(self, at: float, thread: SimThread, sleeping: int) -> None:
        self._timer_numbers += 1
        heapq.heappush(self._timers, (at, self._timer_numbers, thread, sleeping, None))

    def _running(self) -> SimThread:
        thread = self.current
        assert thread is not None, "only a thread of the simulation blocks"
        if not thread.owner.alive:
            raise GreenletExit
        return thread

    def _give_way(self, thread: SimThread) -> None:
        self.main.switch()
        if not thread.owner.alive:
            raise GreenletExit

    # ------------------------------------------------------------------ running

    def run(self, until: Callable[[], bool]) -> bool:
        """Run the threads until ``until`` holds, asked after each step; False if nothing can happen any more."""
        while not until():
            self._reap()
            if self._ready:
                index = self.rng.randrange(len(self._ready)) if len(self._ready) > 1 else 0
                ready = self._ready
                ready[index], ready[-1] = ready[-1], ready[index]
                self._resume(ready.pop())
            elif not self._pass_time():
                return False
        return True

    def _pass_time(self) -> bool:
        """Go on to the next timer; False if there is none."""
        while self._timers:
            at, _, thread, sleeping, call = heapq.heappop(self._timers)
            if thread is not None and (thread.done or thread.sleeping != sleeping or not thread.blocked):
                continue
            self.now = max(self.now, at)
            if call is not None:
                call()
            elif thread is not None:
                thread.blocked = False
                self._ready.append(thread)
            return True
        return False

    def _resume(self, thread: SimThread) -> None:
        if thread.done or not thread.owner.alive:
            return
        if thread.owner.stopped:
            self._held.setdefault(thread.owner, []).append(thread)
            return
        self.switches += 1
        if self.switches > self.max_switches:
            raise NeverAtRest(f"{self.switches} switches and no end, at {self.now:.3f} s")
        self.current = thread
        try:
            thread.greenlet.switch()
        finally:
            self.current = None

    def _reap(self) -> None:
        """Unwind the threads of processes that were killed. What they do in that reaches nobody."""
        while self._doomed:
            owner = self._doomed.pop()
            self._held.pop(owner, None)
            for thread in self._threads.pop(owner, []):
                if not thread.done:
                    self.current = thread
                    if thread.greenlet:  # it has begun
                        thread.greenlet.throw(GreenletExit)
                    thread.done = True
                    self.current = None

    def end(self) -> None:
        """Unwind every thread that is left, so that nothing of this simulation outlives it."""
        for owner in list(self._threads):
            owner.alive = False
            self._doomed.append(owner)
        self._reap()


class Lock:
    """``threading.Lock``: whoever waits longest gets it next."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._locked = False
        self._waiters: deque[SimThread] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if not self._locked:
            self._locked = True
            return True
        if not blocking:
            return False
        thread = self._simulation._running()
        self._waiters.append(thread)
        if self._simulation.block(None if timeout < 0 else timeout):
            return True  # it was handed over
        if thread in self._waiters:
            self._waiters.remove(thread)
        return False

    def release(self) -> None:
        if not self._locked:
            raise RuntimeError("release unlocked lock")
        while self._waiters:
            if self._simulation.wake(self._waiters.popleft()):
                return
        self._locked = False

    def locked(self) -> bool:
        return self._locked

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *exc_info: object) -> None:
        self.release()


class RLock:
    """``threading.RLock``."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._lock = Lock(simulation)
        self._holder: SimThread | None = None
        self._count = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        me = self._simulation.current
        if self._holder is me and self._count:
            self._count += 1
            return True
        if not self._lock.acquire(blocking, timeout):
            return False
        self._holder, self._count = me, 1
        return True

    def release(self) -> None:
        self._count -= 1
        if not self._count:
            self._holder = None
            self._lock.release()

    def give_up(self) -> int:
        """Release it however often it was taken; returns that, for `take_back`."""
        count, self._count, self._holder = self._count, 0, None
        self._lock.release()
        return count

    def take_back(self, count: int) -> None:
        self._lock.acquire()
        self._holder, self._count = self._simulation.current, count

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *exc_info: object) -> None:
        self.release()


class Condition:
    """``threading.Condition``."""

    def __init__(self, simulation: Simulation, lock: Lock | RLock | None = None) -> None:
        self._simulation = simulation
        self._lock = lock or RLock(simulation)
        self._waiters: deque[SimThread] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        return self._lock.acquire(blocking, timeout)

    def release(self) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        thread = self._simulation._running()
        self._waiters.append(thread)
        if isinstance(self._lock, RLock):
            count = self._lock.give_up()
        else:
            count = 0
            self._lock.release()
        try:
            return self._simulation.block(timeout)
        finally:
            if thread in self._waiters:
                self._waiters.remove(thread)
            if thread.owner.alive:
                if isinstance(self._lock, RLock):
                    self._lock.take_back(count)
                else:
                    self._lock.acquire()

    def wait_for(self, predicate: Callable[[], R], timeout: float | None = None) -> R:
        end = None if timeout is None else self._simulation.now + timeout
        result = predicate()
        while not result:
            left = None if end is None else end - self._simulation.now
            if left is not None and left <= 0:
                break
            self.wait(left)
            result = predicate()
        return result

    def notify(self, n: int = 1) -> None:
        for _ in range(min(n, len(self._waiters))):
            self._simulation.wake(self._waiters.popleft())

    def notify_all(self) -> None:
        self.notify(len(self._waiters))

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *exc_info: object) -> None:
        thread = self._simulation.current
        if thread is None or thread.owner.alive:
            self._lock.release()


class Event:
    """``threading.Event``."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._set = False
        self._waiters: list[SimThread] = []

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            self._simulation.wake(waiter)

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        if self._set or (timeout is not None and timeout <= 0):
            return self._set
        thread = self._simulation._running()
        self._waiters.append(thread)
        if not self._simulation.block(timeout) and thread in self._waiters:
            self._waiters.remove(thread)
        return self._set


class Thread:
    """``threading.Thread``: belongs to the process of the thread that starts it."""

    def __init__(
        self,
        simulation: Simulation,
        target: Callable[..., object],
        args: Sequence[Any] = (),
        name: str = "thread",
        daemon: bool = False,
    ) -> None:
        self.name = name
        self._simulation = simulation
        self._run = lambda: target(*args)
        self._thread: SimThread | None = None

    def start(self) -> None:
        parent = self._simulation._running()
        self._thread = self._simulation.spawn(parent.owner, self.name, self._run)

    def join(self, timeout: float | None = None) -> None:
        assert self._thread is not None
        if not self._thread.done:
            self._thread.joiners.append(self._simulation._running())
            self._simulation.block(timeout)

    def is_alive(self) -> bool:
        return self._thread is not None and not self._thread.done

    @property
    def ident(self) -> int | None:
        return None if self._thread is None else self._thread.number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Thread) and self._thread is not None and self._thread is other._thread

    def __hash__(self) -> int:
        return hash(self.ident)


class Threading:
    """What the product uses of the module ``threading``, in a simulation."""

    TIMEOUT_MAX = threading.TIMEOUT_MAX

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation

    def Lock(self) -> Lock:
        return Lock(self._simulation)

    def RLock(self) -> RLock:
        return RLock(self._simulation)

    def Condition(self, lock: Lock | RLock | None = None) -> Condition:
        return Condition(self._simulation, lock)

    def Event(self) -> Event:
        return Event(self._simulation)

    def Thread(
        self,
        *,
        target: Callable[..., object],
        args: Sequence[Any] = (),
        name: str = "thread",
        daemon: bool = False,
    ) -> Thread:
        return Thread(self._simulation, target, args, name, daemon)

    def get_ident(self) -> int:
        thread = self._simulation.current
        return 0 if thread is None else thread.number

    def main_thread(self) -> Thread:
        """One that no thread of a simulation is: signals are none of its business."""
        return Thread(self._simulation, lambda: None)

    def current_thread(self) -> Thread:
        found = Thread(self._simulation, lambda: None)
        found._thread = self._simulation.current
        return found
