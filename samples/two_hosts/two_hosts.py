"""Two hosts read one group. The link of one is cut, and the other takes over. The link is restored, and both read.

    python two_hosts.py postgresql://user@127.0.0.1/db
    python two_hosts.py nats://127.0.0.1:4222 --without-namespaces

On Linux, with the command `ip` and as root, the hosts are network namespaces. Each has one link, to this machine, and
the sample really takes it down. Otherwise they are two processes whose connections go silent. The server may be
anywhere; a relay in this process passes on the hosts' traffic.
"""

import argparse
import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import readergroup as rg

STREAM = "shop/orders"
GROUP = "billing"
SEGMENTS = 4
READER_TIMEOUT_SECONDS = 2.0
LONG = 60.0


# ---------------------------------------------------------------------- the code of a host


def read(url: str, reader_id: str) -> None:
    """Print the number of each event, until SIGTERM."""
    with rg.connect(url) as client:
        reader = client.groups.get(GROUP).reader(reader_id, serializer=rg.JsonSerializer())
        signal.signal(signal.SIGTERM, lambda *_: reader.stop())
        with reader:
            for event in reader:
                print(json.dumps(event.data), flush=True)


# ---------------------------------------------------------------------- hosts and their links


class Relay:
    """Passes data from a port of ``address`` to the server, and its answers back, while the link is up."""

    def __init__(self, address: str, server: tuple[str, int]) -> None:
        self.address = address
        self.port = 0
        self._server = server
        self._loop = asyncio.new_event_loop()
        self._is_up = asyncio.Event()
        self._is_up.set()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(LONG)

    def cut(self) -> None:
        self._loop.call_soon_threadsafe(self._is_up.clear)

    def restore(self) -> None:
        self._loop.call_soon_threadsafe(self._is_up.set)

    async def _listen(self) -> None:
        listening = await asyncio.start_server(self._accept, self.address, 0)
        self.port = listening.sockets[0].getsockname()[1]

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            server_reader, server_writer = await asyncio.open_connection(*self._server)
            await asyncio.gather(self._pass(reader, server_writer), self._pass(server_reader, writer))

    async def _pass(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65536):
                await self._is_up.wait()
                target.write(data)
                await target.drain()
        target.close()


class Host:
    """One process that reads, behind a link that can be cut."""

    def __init__(self, name: str, number: int, url: str, running: ExitStack, *, in_namespace: bool) -> None:
        self.name = name
        self.numbers: Counter[int] = Counter()
        self._link = running.enter_context(namespace(name, number)) if in_namespace else None
        where, server = split(url)
        self._relay = Relay(self._link.address if self._link else "127.0.0.1", server)
        here = f"{where[0]}{self._relay.address}:{self._relay.port}{where[1]}"
        command = [sys.executable, os.path.abspath(__file__), here, "--read-as", name]
        if self._link:
            command = ["ip", "netns", "exec", self._link.namespace, *command]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        running.callback(self._end)
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def cut(self) -> None:
        (self._link or self._relay).cut()

    def restore(self) -> None:
        (self._link or self._relay).restore()

    def stop(self) -> None:
        """Let the reader leave the group."""
        self._process.terminate()
        self._thread.join(LONG)

    def _listen(self) -> None:
        assert self._process.stdout
        for line in self._process.stdout:
            self.numbers[json.loads(line)] += 1

    def _end(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._thread.join(LONG)


class Link:
    """A pair of network devices, one of them in a namespace."""

    def __init__(self, namespace: str, device: str, address: str) -> None:
        self.namespace = namespace
        self.device = device
        self.address = address

    def cut(self) -> None:
        ip("link", "set", "dev", self.device, "down")

    def restore(self) -> None:
        ip("link", "set", "dev", self.device, "up")


@contextmanager
def namespace(name: str, number: int) -> Iterator[Link]:
    unique = f"{name}-{os.getpid()}"
    device = f"v{number}-{os.getpid()}"  # fifteen characters at most
    network = f"10.213.{os.getpid() % 250}.{4 * number}"
    here, there = (re.sub(r"\d+$", str(4 * number + end), network) for end in (1, 2))
    ip("netns", "add", unique)
    try:
        ip("link", "add", device, "type", "veth", "peer", "name", "uplink", "netns", unique)
        ip("address", "add", f"{here}/30", "dev", device)
        ip("link", "set", "dev", device, "up")
        ip("-n", unique, "address", "add", f"{there}/30", "dev", "uplink")
        ip("-n", unique, "link", "set", "dev", "uplink", "up")
        ip("-n", unique, "link", "set", "dev", "lo", "up")
        yield Link(unique, device, here)
    finally:
        ip("netns", "delete", unique)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def can_make_namespaces() -> bool:
    try:
        with namespace("try", 60):
            return True
    except (OSError, subprocess.CalledProcessError):
        return False


def split(url: str) -> tuple[tuple[str, str], tuple[str, int]]:
    """Return the parts of the address before and after its host, and the host with its port."""
    found = re.fullmatch(r"(\w+://(?:[^@/]*@)?)([^/:?,]+)(?::(\d+))?([/?].*)?", url)
    if not found:
        sys.exit("give the address of one server: postgresql://user@host/db or nats://host:4222")
    before, host, port, after = found.groups()
    default = 4222 if before.startswith("nats") else 5432
    return (before, after or ""), (host, int(port or default))


# ---------------------------------------------------------------------- the sample


def main(url: str, *, in_namespaces: bool) -> None:
    print("two hosts:", "network namespaces" if in_namespaces else "two processes")
    with ExitStack() as running:
        client = running.enter_context(rg.connect(url))
        client.streams.create(STREAM, scaling=rg.ScalingPolicy.fixed(SEGMENTS))
        group = client.groups.create(GROUP, streams=[STREAM], reader_timeout_seconds=READER_TIMEOUT_SECONDS)
        north = Host("north", 0, url, running, in_namespace=in_namespaces)
        south = Host("south", 1, url, running, in_namespace=in_namespaces)
        orders = running.enter_context(Orders(client))

        until(lambda: owned(group) == {"north": 2, "south": 2})
        until(lambda: north.numbers and south.numbers)
        print("each reads two of four segments")

        began = time.monotonic()
        north.cut()
        until(lambda: owned(group) == {"south": 4})
        print(f"the link of north was cut; south has all segments after {time.monotonic() - began:.1f} s")

        began = time.monotonic()
        north.restore()
        until(lambda: owned(group) == {"north": 2, "south": 2})
        print(f"the link was restored; each has two again after {time.monotonic() - began:.1f} s")

        written = orders.stop()
        until(lambda: len(north.numbers | south.numbers) == written)
        north.stop()
        south.stop()
        twice = sum((north.numbers + south.numbers).values()) - written
        print(f"{written} orders written, {len(north.numbers | south.numbers)} read, {twice} of them twice")


class Orders:
    """Writes orders all the time, from this machine."""

    def __init__(self, client: rg.Client) -> None:
        self._client = client
        self._is_enough = threading.Event()
        self._written = 0
        self._thread = threading.Thread(target=self._write)

    def __enter__(self) -> "Orders":
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def stop(self) -> int:
        """Stop, and return the number of orders."""
        self._is_enough.set()
        self._thread.join(LONG)
        return self._written

    def _write(self) -> None:
        with self._client.writer(STREAM, serializer=rg.JsonSerializer()) as writer:
            while not self._is_enough.wait(0.01):
                writer.write(self._written, routing_key=f"customer-{self._written % 50}")
                self._written += 1


def owned(group: rg.ReaderGroup) -> dict[str, int]:
    return {reader: len(segments) for reader, segments in group.distribution().readers.items()}


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + LONG
    while not condition():
        if time.monotonic() > deadline:
            sys.exit(f"the expected state was not reached within {LONG:.0f} s")
        time.sleep(0.05)


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("url", help="of a server with an empty store")
    arguments.add_argument("--without-namespaces", action="store_true", help="two processes, also as root")
    arguments.add_argument("--read-as", help=argparse.SUPPRESS)
    given = arguments.parse_args()
    if given.read_as:
        read(given.url, given.read_as)
    else:
        main(given.url, in_namespaces=not given.without_namespaces and can_make_namespaces())
