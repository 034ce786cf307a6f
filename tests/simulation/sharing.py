"""Lets a thousand simulated processes share what each of them would compute alike.

Applying an entry, decoding a body and planning are pure functions. Replicas of one log that were given the same entries
hold the same state, so one of them computes what comes next and the others are given the same object. What is shared
is keyed by the chain of checksums of the log, or by the very object that it was computed from; everything else of the
product runs in each process for itself.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final
from unittest.mock import patch

from readergroup.group.model import balance
from synchronizer.liveness import lease as leases
from synchronizer.log.replica import Replica
from synchronizer.state import StateCodec

#: So much of what was computed last is kept, by the weight of its cause: the bytes of an entry, or 1.
_KEPT_WEIGHT: Final = 32_000_000
_KEPT_RESULTS: Final = 64


class _Memory:
    """The newest results of pure functions, up to a weight in all."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._weight = 0
        self._held: OrderedDict[Hashable, tuple[Any, int, object]] = OrderedDict()

    def get(self, key: Hashable, compute: Callable[[], Any], weight: int = 1, keep: object = None) -> Any:
        """The result for ``key``; ``keep`` is held as long as it is, so that its identity stays its own."""
        found = self._held.get(key)
        if found is not None:
            self._held.move_to_end(key)
            return found[0]
        result = compute()
        self._held[key] = result, weight, keep
        self._weight += weight
        while self._weight > self._limit and len(self._held) > 1:
            _, (_, old, _) = self._held.popitem(last=False)
            self._weight -= old
        return result


@contextmanager
def shared() -> Iterator[None]:
    """Inside, replicas share what they compute."""
    replicas, bodies, sizes = _Memory(_KEPT_WEIGHT), _Memory(_KEPT_WEIGHT), _Memory(_KEPT_RESULTS)
    snapshots, plans, orders = _Memory(_KEPT_RESULTS), _Memory(40 * _KEPT_RESULTS), _Memory(_KEPT_RESULTS)
    apply, follow, from_snapshot = Replica.apply, Replica.follow, Replica.from_snapshot
    decode_body, size = StateCodec.decode_body, StateCodec.size
    decode_snapshot = StateCodec.decode_snapshot
    plan, by_rank = balance.plan, leases.by_rank

    def place(self: Any, entry: Any) -> Hashable:
        return self.checksum, self.next_offset, entry.checksum, entry.end

    def shared_apply(self: Any, entry: Any, body: Any) -> Any:
        return replicas.get(place(self, entry), lambda: apply(self, entry, body), len(entry.body) + 200)

    def shared_follow(self: Any, entry: Any, codec: Any, segment: str) -> Any:
        return replicas.get(("follow", *place(self, entry)), lambda: follow(self, entry, codec, segment), 1000)

    def shared_from_snapshot(cls: Any, mark: Any, body: bytes, codec: Any) -> Any:
        return snapshots.get(mark.snapshot, lambda: from_snapshot(mark, body, codec))

    def shared_decode_body(self: Any, body: bytes) -> Any:
        return bodies.get((self.state_type, body), lambda: decode_body(self, body), len(body) + 200)

    def shared_decode_snapshot(self: Any, body: bytes) -> Any:
        return snapshots.get((self.state_type, body), lambda: decode_snapshot(self, body))

    def shared_size(self: Any, state: Any) -> Any:
        return sizes.get(id(state), lambda: size(self, state), keep=state)

    def shared_plan(state: Any, **options: Any) -> Any:
        return plans.get((id(state), *options.values()), lambda: plan(state, **options), keep=state)

    def shared_by_rank(readers: Any) -> Any:
        return orders.get(id(readers), lambda: by_rank(readers), keep=readers)

    with ExitStack() as patches:
        for owner, name, function in (
            (Replica, "apply", shared_apply),
            (Replica, "follow", shared_follow),
            (Replica, "from_snapshot", classmethod(shared_from_snapshot)),
            (StateCodec, "decode_body", shared_decode_body),
            (StateCodec, "decode_snapshot", shared_decode_snapshot),
            (StateCodec, "size", shared_size),
            (balance, "plan", shared_plan),
            (leases, "by_rank", shared_by_rank),
        ):
            patches.enter_context(patch.object(owner, name, function))
        yield
