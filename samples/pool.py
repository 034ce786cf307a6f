"""A pool of worker processes retries failed events. After the last attempt, an event becomes a dead letter."""

import sys
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import readergroup as rg


def charge(event: rg.Event[Any]) -> None:
    if event.data["total"] < 0:
        raise ValueError("a negative total")


def main(folder: Path) -> None:
    with rg.connect(f"sqlite:///{folder / 'shop.db'}") as client:
        client.streams.create("shop/orders", scaling=rg.ScalingPolicy.fixed(4))
        client.streams.create("shop/orders-dead")
        with client.writer("shop/orders", serializer=rg.JsonSerializer()) as writer:
            for number in range(200):
                total = -1 if number == 77 else number
                writer.write({"id": number, "total": total}, routing_key=f"customer-{number % 9}")
        client.streams.seal("shop/orders")

        group = client.groups.create("billing", streams=["shop/orders"])
        pool = group.pool(
            charge,
            readers=rg.ReaderScalingPolicy(min_readers=1, max_readers=2, target_lag_seconds=5, cooldown_seconds=30),
            workers="process",
            retry=rg.RetryPolicy(attempts=3, first_delay_seconds=0.05, dead_letters="shop/orders-dead"),
            serializer=rg.JsonSerializer(),
        )
        pool.run()  # until the end of the data, SIGTERM or SIGINT

        client.streams.seal("shop/orders-dead")
        dead = client.groups.create("dead", streams=["shop/orders-dead"])
        with dead.reader("reader-1", serializer=rg.PydanticSerializer(rg.DeadLetter)) as reader:
            letters = [event.data for event in reader]
        for letter in letters:
            print(f"{letter.data.decode()} {letter.error} after {letter.attempts} attempts")
        print(f"{len(letters)} order set aside")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else mkdtemp()))
