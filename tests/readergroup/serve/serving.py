"""A store with a group, and the web view of it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.testclient import TestClient

import readergroup as rg
from readergroup.serve.application import app
from synchronizer import Clock

STREAM = "shop/orders"
GROUP = "billing"
TOKEN = "a-token-that-nobody-guesses"
LOCAL = "http://127.0.0.1:8420"


@contextmanager
def filled(url: str, *, segments: int = 4, events: int = 100, clock: Clock | None = None) -> Iterator[rg.Client]:
    """A client of a store with a stream, a group of it, and events that no reader has read."""
    with rg.connect(url, clock=clock) as client:
        client.streams.create(STREAM, scaling=rg.ScalingPolicy.fixed(segments))
        client.groups.create(GROUP, streams=[STREAM])
        with client.writer(STREAM) as writer:
            for number in range(events):
                writer.write(b"order", routing_key=f"customer-{number}")
        yield client


@contextmanager
def viewed(client: rg.Client, **options: object) -> Iterator[TestClient]:
    """A browser's side of the view, on this machine."""
    with TestClient(app(client, **options), base_url=LOCAL) as browser:  # type: ignore[arg-type]
        yield browser


def set_aside(client: rg.Client, stream: str, count: int, *, error: str = "", data: bytes = b"order") -> None:
    """Dead letters of the first event of the stream, as a pool writes them. Every second one has another error."""
    if not client.streams.exists(stream):
        client.streams.create(stream, scaling=rg.ScalingPolicy.fixed(2))
    (first, *_) = (each for each in client.batch.segment_ranges(STREAM) if each.end > each.start)
    event = next(iter(client.batch.read(first)))
    with client.writer(stream, serializer=rg.PydanticSerializer(rg.DeadLetter)) as writer:
        for number in range(count):
            why = error or ("ValueError: odd" if number % 2 else "KeyError: 'even'")
            letter = rg.DeadLetter(data=data, pointer=event.pointer, error=why, attempts=3)
            writer.write(letter, f"customer-{number}", {"trace": b"t"})


def bearer(token: str = TOKEN) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


@contextmanager
def served(url: str, *arguments: str, token: str | None = None) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The command as a process of its own, on a free port: its address, and the process."""
    environment = {key: value for key, value in os.environ.items() if key != "READERGROUP_SERVE_TOKEN"}
    environment |= {"READERGROUP_URL": url} | ({} if token is None else {"READERGROUP_SERVE_TOKEN": token})
    process = subprocess.Popen(
        [sys.executable, "-m", "readergroup.cli", "serve", "--port", "0", *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        address = process.stdout.readline().split(" ")[0].strip()
        assert address.startswith("http://"), process.communicate()
        yield address, process
    finally:
        process.kill()
        process.communicate()
