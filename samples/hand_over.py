"""A second reader joins: half of the segments move to it, each between two events, and callbacks report it."""

import sys
from pathlib import Path
from tempfile import mkdtemp

import readergroup as rg


def main(folder: Path) -> None:
    with rg.connect(f"sqlite:///{folder / 'shop.db'}") as client:
        client.streams.create("shop/orders", scaling=rg.ScalingPolicy.fixed(4))
        group = client.groups.create("billing", streams=["shop/orders"])
        with client.writer("shop/orders") as writer:
            for number in range(1000):
                writer.write(b"order %d" % number, routing_key=f"customer-{number}")

        with group.reader(
            "reader-1",
            on_assign=lambda segment: print(f"reader-1 is assigned {segment}"),
            on_release=lambda segment: print(f"reader-1 releases {segment}"),
        ) as first:
            first.read_batch(100)
            print(f"reader-1 has {len(first.assigned_segments)} segments")
            with group.reader("reader-2", on_assign=lambda segment: print(f"reader-2 is assigned {segment}")) as second:
                while len(first.assigned_segments) > 2:
                    first.read_batch(100, timeout=0.1)
                second.read_batch(100)
                print(f"reader-2 has {len(second.assigned_segments)} segments")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else mkdtemp()))
