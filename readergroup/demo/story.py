"""Collects the happenings of a run, for the screen while it runs and for the picture afterwards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from notifications import Notification

from ..group.notifiers import EndOfDataNotification, ReaderNotification, SegmentNotification


@dataclass(frozen=True)
class Happening:
    """A step of the demo, or its consequence. The picture marks it."""

    at: float
    title: str
    reader: str | None = None


@dataclass(frozen=True)
class Sample:
    """The numbers of lines written and read at one moment."""

    at: float
    written: int
    read: int


@dataclass
class Story:
    """The story of a run. Times are seconds since its start. ``tell`` gets each sentence at once, in any thread."""

    now: Callable[[], float]
    tell: Callable[[str], None]
    happenings: list[Happening] = field(default_factory=list)
    notifications: list[tuple[float, Notification]] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)  # of readers, for people

    def name(self, reader: str) -> str:
        """Return a short name for a reader: "reader 1" is the first to appear."""
        return self.names.setdefault(reader, f"reader {len(self.names) + 1}")

    def happened(self, title: str, sentence: str, *, reader: str | None = None) -> None:
        self.happenings.append(Happening(self.now(), title, reader))
        self.say(sentence)

    def say(self, sentence: str) -> None:
        self.tell(f"{self.now():5.1f} s  {sentence}")

    def hear(self, notification: Notification) -> None:
        """Listen to the group's notifiers."""
        self.notifications.append((self.now(), notification))
        match notification:
            case SegmentNotification():
                number = notification.number_of_segments
                self.say(f"notification: {number} segment{'' if number == 1 else 's'} to read")
            case ReaderNotification():
                for reader in sorted(notification.joined, key=self.name):
                    self.say(f"notification: {self.name(reader)} joined")
                for reader in sorted(notification.left, key=self.name):
                    dead = reader in notification.dead
                    self.say(f"notification: {self.name(reader)} {'was declared dead' if dead else 'left'}")
            case EndOfDataNotification():
                self.say("notification: end of data")
