"""A reader process is killed. Its lease expires, and another reader continues from its last commit."""

import multiprocessing
import os
import signal
import sys
from pathlib import Path
from tempfile import mkdtemp

import readergroup as rg


def read_until_killed(url: str) -> None:
    with rg.connect(url) as client:
        with client.groups.get("billing").reader("doomed") as reader:
            for event in reader:
                if event.data == b"order 300":
                    reader.commit()
                    os.kill(os.getpid(), signal.SIGKILL)


def main(folder: Path) -> None:
    url = f"sqlite:///{folder / 'shop.db'}"
    with rg.connect(url) as client:
        client.streams.create("shop/orders")
        with client.writer("shop/orders") as writer:
            for number in range(1000):
                writer.write(b"order %d" % number, routing_key="alice")
        client.streams.seal("shop/orders")
        group = client.groups.create("billing", streams=["shop/orders"], reader_timeout_seconds=1.0)

        doomed = multiprocessing.get_context("spawn").Process(target=read_until_killed, args=(url,))
        doomed.start()
        doomed.join(60)
        print("the first reader ended with", signal.Signals(-(doomed.exitcode or 0)).name)

        with group.reader("successor") as reader:
            orders = [event.data for event in reader]
        print(f"the second read {len(orders)} orders, from {orders[0].decode()} to {orders[-1].decode()}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else mkdtemp()))
