"""Tells listeners what changed in a shared state: each change once, in order, without waiting for a slow listener."""

from .notification import PRESENT_VALUE, SEVERAL_CHANGES, Change, Notification, NotificationKey
from .notifier import PollingNotifier
from .system import Listener, NotificationSystem, Subscription

__all__ = [
    "Change",
    "Listener",
    "Notification",
    "NotificationKey",
    "NotificationSystem",
    "PRESENT_VALUE",
    "PollingNotifier",
    "SEVERAL_CHANGES",
    "Subscription",
]


def __dir__() -> list[str]:
    """The public names, without the modules that hold them, for completion in an interpreter."""
    return __all__
