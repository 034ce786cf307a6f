"""Write events to a stream and read them with a reader group."""

import sys
from pathlib import Path
from tempfile import mkdtemp

import readergroup as rg


def main(folder: Path) -> None:
    with rg.connect(f"sqlite:///{folder / 'shop.db'}") as client:
        client.streams.create("shop/orders", scaling=rg.ScalingPolicy.fixed(4))
        with client.writer("shop/orders", serializer=rg.JsonSerializer()) as writer:
            for number in range(10):
                writer.write({"id": number}, routing_key=f"customer-{number % 3}")
        client.streams.seal("shop/orders")  # no more events will come, so reading ends

        group = client.groups.create("billing", streams=["shop/orders"])
        with group.reader("reader-1", serializer=rg.JsonSerializer()) as reader:
            for event in reader:
                print(event.segment, event.routing_key, event.data)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else mkdtemp()))
