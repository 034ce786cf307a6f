"""Guarantee S8 on schedules that nobody thought of: each change is told to each listener once, in order, or is covered
by one notification with a gap."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from synchronizer import ManualClock, open_store
from tests.notifications.counting import Add, Counted, CountNotifier, Heard, counter

STEPS = st.lists(
    st.sampled_from(["change", "change elsewhere", "poll", "register", "unregister", "compact", "unregister all"]),
    max_size=60,
)


@given(STEPS)
def test_each_change_is_told_to_each_listener_once_in_order_or_covered_by_a_gap(steps: list[str]) -> None:
    with open_store("memory://") as store:
        here, elsewhere = counter(store, clock=ManualClock()), counter(store)
        listening: list[Heard] = []
        gone: list[Heard] = []
        with CountNotifier(here) as notifier:
            for step in steps:
                match step:
                    case "change":
                        here.update_state_unconditionally(Add())
                    case "change elsewhere":
                        elsewhere.update_state_unconditionally(Add())
                    case "compact":
                        elsewhere.compact()
                    case "poll":
                        notifier.poll()
                    case "register":
                        listening.append(Heard())
                        notifier.register_listener(listening[-1])
                    case "unregister" if listening:
                        gone.append(listening.pop(0))
                        notifier.unregister_listener(gone[-1])
                    case "unregister all":
                        gone += listening
                        listening.clear()
                        notifier.unregister_all_listeners()
            notifier.poll()
        newest = elsewhere.fetch_updates().value
        for heard in listening + gone:
            check(heard.notifications)
        for heard in listening:
            assert heard.values[-1] == newest


def check(told: list[Counted]) -> None:
    assert not told[0].gap
    for before, after in zip(told, told[1:], strict=False):
        assert before.revision < after.revision
        if after.gap:
            assert after.value > before.value + 1
        else:
            assert after.value == before.value + 1
