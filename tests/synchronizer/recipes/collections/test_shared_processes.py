"""Shared collections in the hands of several processes at once."""

from __future__ import annotations

from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any

from synchronizer import SharedCounter, SharedMap, SharedSet, open_store
from tests.synchronizer.recipes.collections import shared_processes
from tests.synchronizer.stores.processes import receive, running


def start(stack: ExitStack, work: Any, *arguments: object) -> Connection:
    _, connection = stack.enter_context(running(work, *arguments))
    return connection


def test_no_increment_of_several_processes_is_lost(shared_store_url: str) -> None:
    processes, increments = 3, 150
    with ExitStack() as stack:
        counting = [start(stack, shared_processes.count, shared_store_url, increments) for _ in range(processes)]
        for each in counting:
            assert receive(each) == "ready"
        for each in counting:
            each.send("go")
        made: list[int] = sorted(value for each in counting for value in receive(each))  # type: ignore[attr-defined]
    assert made == list(range(1, processes * increments + 1)), "each addition made a value of its own"
    with open_store(shared_store_url) as store:
        assert SharedCounter(store, "visits").value == processes * increments


def test_who_observes_appends_sees_prefixes_of_the_final_list(shared_store_url: str) -> None:
    appends, names = 40, ["a", "b"]
    with open_store(shared_store_url) as store, ExitStack() as stack:
        SharedMap(store, "lists", list[str])["all"] = []
        length = appends * len(names)
        observing = start(stack, shared_processes.observe, shared_store_url, length)
        refreshing = start(stack, shared_processes.refresh, shared_store_url, length)
        appending = [start(stack, shared_processes.append, shared_store_url, name, appends) for name in names]
        for each in (observing, refreshing, *appending):
            assert receive(each) == "ready"
        for each in appending:
            each.send("go")
        assert [receive(each) for each in appending] == ["done"] * len(names)
        final = SharedMap(store, "lists", list[str])["all"]
        for name in names:
            assert [entry for entry in final if entry.startswith(name)] == [f"{name}-{n}" for n in range(appends)]
        (watched, heard), refreshed = receive(observing), receive(refreshing)  # type: ignore[misc]
        for seen in (watched, heard, refreshed):
            assert all(each == final[: len(each)] for each in seen)
            assert [len(each) for each in seen] == sorted({len(each) for each in seen})
        assert heard == [final[: n + 1] for n in range(length)], "a listener hears each append"


def test_each_item_is_taken_by_one_process(shared_store_url: str) -> None:
    with open_store(shared_store_url) as store, ExitStack() as stack:
        SharedSet(store, "work", int).update(range(200))
        taking = [start(stack, shared_processes.take, shared_store_url) for _ in range(2)]
        for each in taking:
            assert receive(each) == "ready"
        for each in taking:
            each.send("go")
        taken = [receive(each) for each in taking]
    assert sorted(item for each in taken for item in each) == list(range(200))  # type: ignore[attr-defined]
