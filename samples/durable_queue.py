"""A queue that survives kill -9: no added event is lost, and a repeated event is recognised by its offset."""

import multiprocessing
import os
import signal
import sys
from pathlib import Path
from tempfile import mkdtemp

import readergroup as rg

MAIL = "shop/mail"


def send(outbox: Path, killed_at: int = -1) -> None:
    """Send the mail of the queue. The outbox stores the offset of each mail, to send none twice."""
    sent = [int(line.split()[0]) for line in outbox.read_text().splitlines()] if outbox.exists() else []
    last = max(sent, default=-1)

    def handle(event: rg.QueuedEvent) -> None:
        if event.offset <= last:
            return  # a repetition: the process died before it stored its position
        with outbox.open("a") as file:
            file.write(f"{event.offset} {event.data.decode()}\n")
        if event.data == b"mail %d" % killed_at:
            os.kill(os.getpid(), signal.SIGKILL)

    with rg.connect() as client:
        with client.event_processor(MAIL, handle, consumer_timeout_seconds=1.0) as processor:
            processor.drain(timeout=30)
            print("processed", processor.processed_events, "in the second process")


def main(folder: Path) -> None:
    os.environ["READERGROUP_URL"] = f"sqlite:///{folder / 'shop.db'}"
    outbox = folder / "outbox.txt"
    with rg.connect() as client, client.event_queue(MAIL) as queue:
        for number in range(1000):
            queue.add(b"mail %d" % number)  # the event is on disk when this returns

    doomed = multiprocessing.get_context("spawn").Process(target=send, args=(outbox, 300))
    doomed.start()
    doomed.join(60)
    print("the first process ended with", signal.Signals(-(doomed.exitcode or 0)).name)
    send(outbox)

    mail = [line.split(maxsplit=1)[1] for line in outbox.read_text().splitlines()]
    print(len(mail), "mails, each once and in order:", mail == [f"mail {number}" for number in range(1000)])


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else mkdtemp()))
