"""Random histories: a listener hears the log, all of it or with gaps that it is told of, whatever goes wrong."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from synchronizer import AppliedUpdate, DeadlineExceededError, Revision, StateSynchronizer, open_store
from synchronizer.testing import FailingStore, InstantClock
from tests.synchronizer.accounts import UPDATES, Account, Add, Replica

steps = st.lists(
    st.one_of(
        st.tuples(st.just("update"), st.integers(1, 3)),
        st.tuples(st.just("compact"), st.just(0)),
        st.tuples(st.just("delete"), st.just(0)),
        st.tuples(st.just("poll"), st.integers(0, 9)),  # with so many operations until the store is away
        st.tuples(st.just("restart"), st.just(0)),
    ),
    max_size=25,
)


def heard_as_in_the_log(heard: list[AppliedUpdate[Account]], written: dict[Revision, AppliedUpdate[Account]]) -> None:
    """Each call is an update of the log with its state, and only a gap stands between two that are not neighbours."""
    order = sorted(written)
    place = -1
    for applied in heard:
        found = order.index(applied.revision)
        if applied.gap:
            assert found > place
            assert applied.state == written[applied.revision].state
        else:
            assert found == place + 1, "an update was left out, or told twice"
            assert applied == written[applied.revision]
        place = found


@given(steps=steps, after=st.integers(0, 3))
def test_what_a_listener_hears_is_the_log(steps: list[tuple[str, int]], after: int) -> None:
    clock = InstantClock()
    with open_store("memory://", clock=clock) as inner:
        written: dict[Revision, AppliedUpdate[Account]] = {}
        heard: list[AppliedUpdate[Account]] = []

        def opened(store: FailingStore, initial: Account | None = None) -> Replica:
            return StateSynchronizer(
                store,
                "account",
                initial=initial,
                state_type=Account,
                updates=UPDATES,
                clock=clock,
                timeout=1.0,
                compaction_bytes=None,
            )

        writer = opened(FailingStore(inner), Account())
        feed = writer.transitions()
        feed.drain()

        def note() -> None:
            for transition in feed.drain():
                written.update((applied.revision, applied) for applied in transition.one_by_one())

        store = FailingStore(inner)
        follower = opened(store)
        follower.on_update(heard.append)
        for what, number in steps:
            match what:
                case "update":
                    writer.initialize(Account())
                    writer.update_state_unconditionally(*[Add(amount=each + 1) for each in range(number)])
                case "compact":
                    writer.compact()
                case "delete":
                    writer.delete()
                case "poll":
                    left = number

                    def before(_: object) -> None:
                        nonlocal left
                        store.unavailable = left <= 0
                        left -= 1

                    store.before = before if number else None
                    try:
                        follower.poll_listeners()
                    except DeadlineExceededError:
                        assert number
                    store.before, store.unavailable = None, False
                case "restart":
                    follower.close()
                    follower = opened(store)
                    follower.on_update(heard.append, after=heard[-1].revision if heard else Revision(0, 0))
            note()
        follower.poll_listeners()
        heard_as_in_the_log(heard, written)
        assert [applied.revision for applied in heard][-1:] == sorted(written)[-1:]
        # And who comes late, with any revision of before, hears the rest.
        late: list[AppliedUpdate[Account]] = []
        revisions = [Revision(0, 0), *sorted(written)]
        start = revisions[min(after, len(revisions) - 1)]
        follower.on_update(late.append, after=start)
        follower.poll_listeners()
        heard_as_in_the_log(late, {revision: each for revision, each in written.items() if revision > start})
        assert [applied.revision for applied in late][-1:] == [each for each in sorted(written) if each > start][-1:]
