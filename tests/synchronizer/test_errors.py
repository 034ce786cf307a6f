"""Errors as they are logged, and as they come back from another process."""

from __future__ import annotations

import pickle

import pytest

import readergroup as rg

ERRORS = sorted(
    (
        each
        for each in (getattr(rg, name) for name in rg.__all__)
        if isinstance(each, type) and issubclass(each, rg.ReaderGroupError)
    ),
    key=lambda each: each.__name__,
)


class Unprintable:
    def __repr__(self) -> str:
        raise ZeroDivisionError


@pytest.mark.parametrize("value", [-(10**5000), Unprintable(), [Unprintable()]], ids=["int", "object", "list"])
def test_an_error_is_printed_if_one_of_its_facts_cannot_be(value: object) -> None:
    error = rg.InvalidArgumentError("too large", value=value, limit=7)
    shown = f"<unprintable {type(value).__name__}>"
    assert str(error) == f"too large: value={shown} limit=7"
    assert repr(error) == f"InvalidArgumentError('too large', value={shown}, limit=7)"
    with pytest.raises(rg.InvalidArgumentError, match=f"attempts: .*, not {shown}$"):
        rg.RetryPolicy(attempts=value)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ERRORS)
def test_errors_keep_their_facts_in_each_form(kind: type[rg.ReaderGroupError]) -> None:
    error = kind("the place is gone", start_offset=7, name="shop/orders")
    assert str(error) == "the place is gone: start_offset=7 name='shop/orders'"
    assert repr(error) == f"{kind.__name__}('the place is gone', start_offset=7, name='shop/orders')"
    for each in (pickle.loads(pickle.dumps(error)), eval(repr(error), vars(rg).copy())):
        assert (type(each), repr(each), each.facts) == (kind, repr(error), error.facts)
