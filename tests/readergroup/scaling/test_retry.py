from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from readergroup import DeadLetter, EventPointer, PydanticSerializer, RetryPolicy, SegmentId
from synchronizer import InvalidArgumentError

POINTER = EventPointer(SegmentId("shop/orders/0"), "7fc7541a6680895a", 120)


@given(st.binary())
def test_a_dead_letter_keeps_the_bytes_of_its_event(data: bytes) -> None:
    serializer = PydanticSerializer(DeadLetter)
    letter = DeadLetter(data=data, pointer=POINTER, error="ValueError: no", attempts=5)
    assert letter.data == data
    assert serializer.loads(serializer.dumps(letter)) == letter


def test_dead_letters_that_are_stored_can_be_read() -> None:
    stored = b'{"data":"/wAg","pointer":["shop/orders/0","7fc7541a6680895a",120],"error":"ValueError: no","attempts":5}'
    letter = DeadLetter(data=b"\xff\x00 ", pointer=POINTER, error="ValueError: no", attempts=5)
    assert PydanticSerializer(DeadLetter).dumps(letter) == stored
    assert PydanticSerializer(DeadLetter).loads(stored) == letter


def test_the_pauses_double_up_to_their_limit() -> None:
    retry = RetryPolicy(first_delay_seconds=0.2, max_delay_seconds=1)
    assert [retry.delay_after(attempt) for attempt in (1, 2, 3, 4, 5000)] == [0.2, 0.4, 0.8, 1, 1]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"attempts": 0}, "attempts"),
        ({"first_delay_seconds": -1}, "first_delay_seconds"),
        ({"max_delay_seconds": -1}, "max_delay_seconds"),
        ({"dead_letters": "no stream"}, "scope/name"),
        ({"attempt": 3}, "attempt"),
    ],
)
def test_a_policy_that_cannot_be_right_is_refused(fields: dict[str, object], named: str) -> None:
    with pytest.raises(InvalidArgumentError, match=named):
        RetryPolicy(**fields)  # type: ignore[arg-type]
