"""A stream is split and merged while it is written. A reader gets the events of each key in order."""

import sys
from collections import defaultdict
from pathlib import Path
from tempfile import mkdtemp

import readergroup as rg


def main(folder: Path) -> None:
    with rg.connect(f"sqlite:///{folder / 'shop.db'}") as client:
        client.streams.create("shop/orders", scaling=rg.ScalingPolicy.fixed(2))
        group = client.groups.create("audit", streams=["shop/orders"])
        with client.writer("shop/orders", serializer=rg.MsgpackSerializer()) as writer:
            for number in range(3000):
                writer.write(number, routing_key=f"key-{number % 7}")
                if number == 1000:
                    client.streams.scale("shop/orders", split=[0])
                if number == 2000:
                    client.streams.scale("shop/orders", merge=[2, 3])
        client.streams.seal("shop/orders")

        seen: dict[str | None, list[int]] = defaultdict(list)
        with group.reader("reader-1", serializer=rg.MsgpackSerializer()) as reader:
            for event in reader:
                seen[event.routing_key].append(event.data)
        in_order = all(numbers == sorted(numbers) for numbers in seen.values())
        print(f"{sum(map(len, seen.values()))} events of {len(seen)} keys, each key in order: {in_order}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else mkdtemp()))
