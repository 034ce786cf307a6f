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


@pytest.mark.parametrize("kind", ERRORS)
def test_errors_keep_their_facts_in_each_form(kind: type[rg.ReaderGroupError]) -> None:
    error = kind("the place is gone", start_offset=7, name="shop/orders")
    assert str(error) == "the place is gone: start_offset=7 name='shop/orders'"
    assert repr(error) == f"{kind.__name__}('the place is gone', start_offset=7, name='shop/orders')"
    for each in (pickle.loads(pickle.dumps(error)), eval(repr(error), vars(rg).copy())):
        assert (type(each), repr(each), each.facts) == (kind, repr(error), error.facts)
