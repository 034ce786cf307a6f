"""What is stored of dead letters is written and read as in the first release."""

from __future__ import annotations

from readergroup.dead_letters.statuses import LETTER_UPDATES, ForgetLetters, LetterStatuses, MarkLetters
from synchronizer import Map, Revision
from synchronizer.state import StateCodec
from tests.golden import check_history

PLACE = "shop/dead/0:bad65db65dda1210"
REVISION = Revision(0, 0)


def test_statuses_are_written_and_read_as_in_the_first_release() -> None:
    updates = [
        MarkLetters(status="replayed", spans=Map({PLACE: (0, 100, 300, 400)})),
        MarkLetters(status="discarded", spans=Map({PLACE: (200, 300)})),
        MarkLetters(status="replayed", spans=Map({PLACE: (100, 200), "shop/dead/1:bad65db65dda1210": (0, 10)})),
        ForgetLetters(starts=Map({PLACE: 150, "shop/dead/1:bad65db65dda1210": None})),
    ]
    codec = StateCodec(LetterStatuses, LETTER_UPDATES)
    last = check_history("dead-letters-history-v1.msgpack", codec, LetterStatuses(), updates)
    assert dict(last.replayed) == {PLACE: (150, 200, 300, 400)}
    assert dict(last.discarded) == {PLACE: (200, 300)}


def test_each_letter_has_one_status_and_neighbours_are_one_span() -> None:
    state = LetterStatuses()
    for start in range(0, 100, 10):
        status = "discarded" if start == 40 else "replayed"
        state = MarkLetters(status=status, spans=Map({PLACE: (start, start + 10)})).apply_to(state, REVISION)
    assert dict(state.replayed) == {PLACE: (0, 40, 50, 100)}
    found = [state.status_of(PLACE, offset) for offset in (0, 39, 40, 49, 50, 99, 100)]
    assert found == ["replayed"] * 2 + ["discarded"] * 2 + ["replayed"] * 2 + ["pending"]
    assert state.status_of("shop/dead/2:x", 0) == "pending"
