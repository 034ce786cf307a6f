"""Tells listeners what changed in a shared state: each change once, in order, without waiting for a slow listener."""

from .background import BackgroundPolling as BackgroundPolling
from .notification import PRESENT_VALUE as PRESENT_VALUE
from .notification import SEVERAL_CHANGES as SEVERAL_CHANGES
from .notification import Change as Change
from .notification import Notification as Notification
from .notification import NotificationKey as NotificationKey
from .notifier import PollingNotifier as PollingNotifier
from .system import Listener as Listener
from .system import NotificationSystem as NotificationSystem
from .system import Subscription as Subscription
