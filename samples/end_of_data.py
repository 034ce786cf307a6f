"""A batch job over the present events of a stream: the group is bounded by a cut, ends there, and says so."""

import sys
from pathlib import Path
from tempfile import mkdtemp

import readergroup as rg


def main(folder: Path) -> None:
    with rg.connect(f"sqlite:///{folder / 'shop.db'}") as client:
        client.streams.create("shop/orders", scaling=rg.ScalingPolicy.fixed(2))
        with client.writer("shop/orders") as writer:
            for number in range(500):
                writer.write(b"order %d" % number, routing_key=f"customer-{number}")
            writer.flush()
            until = client.streams.info("shop/orders").tail
            writer.write(b"too late for this job", routing_key="customer-1")

        job = client.groups.create("monthly", streams=["shop/orders"], end={"shop/orders": until})
        with job.reader("reader-1") as reader:
            print(f"{sum(1 for _ in reader)} events")
        print("read to", job.end_of_data_notifier.wait(timeout=10).cuts["shop/orders"])


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else mkdtemp()))
