"""The fast path: batches of events from one segment, and their columns as lists."""

import sys
from pathlib import Path
from tempfile import mkdtemp

import readergroup as rg


def main(folder: Path) -> None:
    with rg.connect(f"sqlite:///{folder / 'shop.db'}") as client:
        client.streams.create("shop/clicks", scaling=rg.ScalingPolicy.fixed(4))
        with client.writer("shop/clicks") as writer:
            for number in range(100_000):
                writer.write(b"click %d" % number, routing_key=f"visitor-{number % 50}")
        client.streams.seal("shop/clicks")

        group = client.groups.create("statistics", streams=["shop/clicks"])
        events = total = 0
        with group.reader("reader-1") as reader:
            for batch in reader.batches(max_events=5000):
                events += len(batch)
                total += sum(map(len, batch.raw))
        print(f"{events} events, {total} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else mkdtemp()))
