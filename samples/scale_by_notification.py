"""The application scales its own readers: a listener receives the number of segments, and starts as many threads."""

import sys
import threading
from collections import Counter
from pathlib import Path
from tempfile import mkdtemp

import readergroup as rg


class Readers:
    """A thread per segment."""

    def __init__(self, group: rg.ReaderGroup) -> None:
        self.group = group
        self.threads: list[threading.Thread] = []
        self.events: Counter[str] = Counter()

    def resize(self, notification: rg.SegmentNotification) -> None:
        print(f"{notification.number_of_segments} segments at revision {notification.revision}")
        while len(self.threads) < notification.number_of_segments:
            thread = threading.Thread(target=self.read, args=(f"reader-{len(self.threads) + 1}",))
            self.threads.append(thread)
            thread.start()

    def read(self, reader_id: str) -> None:
        with self.group.reader(reader_id) as reader:
            for batch in reader.batches():
                self.events[reader_id] += len(batch)


def main(folder: Path) -> None:
    with rg.connect(f"sqlite:///{folder / 'shop.db'}") as client:
        client.streams.create("shop/orders")
        group = client.groups.create("billing", streams=["shop/orders"])
        readers = Readers(group)
        group.segment_notifier.register_listener(readers.resize)
        ended = threading.Event()
        group.end_of_data_notifier.register_listener(lambda notification: ended.set())

        with client.writer("shop/orders") as writer:
            for number in range(50_000):
                writer.write(b"order %d" % number, routing_key=f"customer-{number % 100}")
                if number == 20_000:
                    client.streams.scale("shop/orders", split=[0])
        client.streams.seal("shop/orders")
        if not ended.wait(60):
            raise SystemExit("the end of the data was not reached")
        for thread in readers.threads:
            thread.join()
        print(f"{readers.events.total()} events read by {len(readers.threads)} readers")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else mkdtemp()))
