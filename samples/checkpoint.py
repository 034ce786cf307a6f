"""Two processes count in memory and one of them dies. A reset to a checkpoint lets each order count exactly once."""

import multiprocessing
import os
import signal
import sys
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import mkdtemp

import readergroup as rg


def count(url: str, folder: Path, reader_id: str, orders: int, may_fail: bool) -> None:
    """Continue to count orders, until the end of the data or an event that ends the process."""

    def save(name: str) -> None:
        (folder / f"{name}.{reader_id}").write_text(str(orders))

    with rg.connect(url) as client:
        with client.groups.get("totals").reader(reader_id, on_checkpoint=save) as reader:
            for event in reader:
                if event.data == b"an order":
                    orders += 1
                elif may_fail:
                    os.kill(os.getpid(), signal.SIGKILL)
    save("end")


def start(url: str, folder: Path, counts: dict[str, int], *, may_fail: bool) -> list[BaseProcess]:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=count, args=(url, folder, name, counts[name], may_fail)) for name in counts]
    for process in processes:
        process.start()
    return list(processes)


def saved(folder: Path, checkpoint: str) -> dict[str, int]:
    return {file.suffix[1:]: int(file.read_text()) for file in folder.glob(f"{checkpoint}.*")}


def write(client: rg.Client, *events: bytes) -> None:
    with client.writer("shop/orders") as writer:
        for number, event in enumerate(events):
            writer.write(event, routing_key=f"customer {number % 20}")


def main(folder: Path) -> None:
    url = f"sqlite:///{folder / 'shop.db'}"
    with rg.connect(url) as client:
        client.streams.create("shop/orders", scaling=rg.ScalingPolicy.fixed(4))
        group = client.groups.create("totals", streams=["shop/orders"], reader_timeout_seconds=1.0)
        write(client, *[b"an order"] * 1000)
        processes = start(url, folder, {"one": 0, "other": 0}, may_fail=True)
        group.synchronizer.wait_for(lambda state: len(state.readers) == 2, timeout=60)
        checkpoint = group.checkpoint("nightly", timeout=60)

        write(client, *[b"an order"] * 500, b"the end of a process", *[b"an order"] * 500)
        while not (notification := group.reader_notifier.wait(timeout=60)).dead:
            pass
        print("declared dead:", *notification.dead)
        for process in processes:  # the counts of the other process since the checkpoint are discarded too
            process.kill()
            process.join(60)

        client.streams.seal("shop/orders")
        group.reset(checkpoint)
        for process in start(url, folder, saved(folder, "nightly"), may_fail=False):
            process.join(60)
        print(f"{sum(saved(folder, 'end').values())} orders, each counted once")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else mkdtemp()))
