"""Tells listeners what changed in a shared state: each change once, in order, without waiting for a slow listener."""

from typing import TYPE_CHECKING

from synchronizer.lazy_exports import lazy_exports

# For type checkers and editors. At run time a name loads its module when it is first used, as _MODULES says.
if TYPE_CHECKING:
    from .notification import OBSERVATION, PRESENT_VALUE, SEVERAL_CHANGES, Change, Notification, NotificationKey
    from .notifier import PollingNotifier
    from .system import Listener, NotificationSystem, Subscription

__all__ = [
    "Change",
    "Listener",
    "Notification",
    "NotificationKey",
    "NotificationSystem",
    "OBSERVATION",
    "PRESENT_VALUE",
    "PollingNotifier",
    "SEVERAL_CHANGES",
    "Subscription",
]


_MODULES = {
    ".notification": "Change Notification NotificationKey OBSERVATION PRESENT_VALUE SEVERAL_CHANGES",
    ".notifier": "PollingNotifier",
    ".system": "Listener NotificationSystem Subscription",
}

if not TYPE_CHECKING:  # type checkers then refuse names that do not exist
    __getattr__ = lazy_exports(__name__, _MODULES)


def __dir__() -> list[str]:
    """The public names, without the modules that hold them, for completion in an interpreter."""
    return __all__
