"""What the other processes of these tests do: each opens the store anew."""

from __future__ import annotations

import threading
from multiprocessing.connection import Connection

from synchronizer import DeadlineExceededError, EntryChange, SharedCounter, SharedMap, SharedSet, open_store
from tests.waiting import PATIENCE_SECONDS


def count(connection: Connection, url: str, increments: int) -> None:
    """Add so often, and tell what each addition made."""
    with open_store(url) as store, SharedCounter(store, "visits") as counter:
        connection.send("ready")
        connection.recv()
        connection.send([counter.add() for _ in range(increments)])


def append(connection: Connection, url: str, name: str, appends: int) -> None:
    """Append to the shared list, each time to what was there."""
    with open_store(url) as store, SharedMap(store, "lists", list[str]) as lists:
        connection.send("ready")
        connection.recv()
        for number in range(appends):
            while not lists.replace("all", [*(present := lists["all"]), f"{name}-{number}"], expected=present):
                pass  # refused, so that the copy is the newest now
        connection.send("done")


def observe(connection: Connection, url: str, length: int) -> None:
    """Tell each list that was seen until it is so long: by refreshing, by watching and by listening."""
    with open_store(url) as store, SharedMap(store, "lists", list[str]) as heard_lists:
        heard: list[list[str]] = []
        complete = threading.Event()

        def listener(change: EntryChange[list[str]]) -> None:
            assert change.after is not None
            heard.append(change.after)
            if len(change.after) == length:
                complete.set()

        heard_lists.register_listener(listener, key="all")
        connection.send("ready")
        with SharedMap(store, "lists", list[str]) as lists:
            watched = []
            for entries in lists.watch():
                watched.append(entries["all"])
                if len(watched[-1]) == length:
                    break
        if not complete.wait(PATIENCE_SECONDS):
            raise DeadlineExceededError("the listener did not hear of the last append")
        connection.send((watched, heard))


def refresh(connection: Connection, url: str, length: int) -> None:
    """Tell each list that was seen by refreshing, until it is so long."""
    with open_store(url) as store, SharedMap(store, "lists", list[str]) as lists:
        connection.send("ready")
        seen = [lists["all"]]
        while len(seen[-1]) < length:
            lists.refresh()
            if lists["all"] != seen[-1]:
                seen.append(lists["all"])
        connection.send(seen)


def take(connection: Connection, url: str) -> None:
    """Take items out of the set until there are none, and tell which."""
    with open_store(url) as store, SharedSet(store, "work", int) as work:
        connection.send("ready")
        connection.recv()
        taken = []
        try:
            while True:
                taken.append(work.pop())
        except KeyError:
            connection.send(taken)
