"""A worker under asyncio.run: SIGTERM lets it finish the events in hand, and the next start repeats none."""

import asyncio
import signal
import sys
from pathlib import Path
from tempfile import mkdtemp

import readergroup as rg
from readergroup import aio


async def work(folder: Path) -> None:
    mailed = folder / "mailed"
    async with aio.connect(f"sqlite:///{folder / 'shop.db'}") as client:
        await client.streams.create("shop/orders", scaling=rg.ScalingPolicy.fixed(2))
        group = await client.groups.create("mailing", streams=["shop/orders"])

        async def mail(event: rg.Event[dict[str, int]]) -> None:
            await asyncio.sleep(0.02)  # a mail server answers
            with mailed.open("a") as file:
                file.write(f"{event.data['order']}\n")

        async with group.pool(mail, serializer=rg.JsonSerializer(), concurrency=8) as pool:
            loop = asyncio.get_running_loop()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, pool.stop)
            await pool.join()  # until SIGTERM or the end of the data


async def write(folder: Path) -> None:
    async with aio.connect(f"sqlite:///{folder / 'shop.db'}") as client:
        await client.streams.create("shop/orders", scaling=rg.ScalingPolicy.fixed(2))
        async with client.writer("shop/orders", serializer=rg.JsonSerializer()) as writer:
            for number in range(200):
                await writer.write({"order": number}, routing_key=f"customer-{number % 20}")
        await client.streams.seal("shop/orders")


async def start_and_terminate(folder: Path) -> None:
    """Start this file as a worker, send it SIGTERM in the middle, and start it again."""
    await write(folder)
    mailed = folder / "mailed"
    for is_terminated in (True, False):
        worker = await asyncio.create_subprocess_exec(sys.executable, __file__, str(folder), "work")
        while is_terminated and worker.returncode is None and not mailed.exists():
            await asyncio.sleep(0.01)
        if is_terminated:
            worker.terminate()
        print(f"worker {worker.pid} ended with status {await worker.wait()}, {len(numbers(mailed))} mails so far")
    print(f"{len(numbers(mailed))} mails, each once: {sorted(numbers(mailed)) == list(range(200))}")


def numbers(file: Path) -> list[int]:
    return [int(line) for line in file.read_text().split()]


if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else mkdtemp())
    asyncio.run(work(folder) if sys.argv[2:] == ["work"] else start_and_terminate(folder))
