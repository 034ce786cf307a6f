from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self

import pytest
from pydantic import AliasChoices, BaseModel, Field, model_validator

from synchronizer import InvalidArgumentError, SharedConfig, ValueChange
from synchronizer.recipes.collections.shared_config import ConfigEntries
from synchronizer.testing import FailingStore
from tests.synchronizer.accounts import just_before
from tests.waiting import until

pytestmark = pytest.mark.stores(round_robin=True)


class Shop(BaseModel):
    opens_at: int = Field(9, ge=0, le=24)
    closes_at: int = Field(18, ge=0, le=24)
    greeting: str = "hello"
    holidays: list[str] = []
    owner: str | None = None

    @model_validator(mode="after")
    def opens_before_it_closes(self) -> Self:
        if self.opens_at >= self.closes_at:
            raise ValueError("a shop opens before it closes")
        return self


class ShopOfTheNextRelease(Shop):
    discount: float = 0.0


Two = tuple[SharedConfig[Shop], SharedConfig[Shop]]


@pytest.fixture
def two(store: FailingStore) -> Iterator[Two]:
    """The configuration as two processes have it."""
    with SharedConfig(store, "shop", Shop) as one, SharedConfig(store.inner, "shop", Shop) as other:
        yield one, other


def test_what_was_not_put_has_its_default(two: Two) -> None:
    config, _ = two
    assert config.value == Shop()
    config.put("greeting", "good day")
    config.update({"opens_at": 8}, closes_at=20, holidays=["1 May"])
    assert config.value == Shop(greeting="good day", opens_at=8, closes_at=20, holidays=["1 May"])
    assert config.remove("greeting")
    assert not config.remove("greeting")
    assert config.value.greeting == "hello"
    config.clear()
    assert config.value == Shop()


def test_the_copy_is_the_readers_own_and_stays_until_it_is_refreshed(two: Two, store: FailingStore) -> None:
    one, other = two
    other.put("owner", "Ada")
    one.value.owner = "Bob"
    one.value.holidays.append("never")
    before = len(store.operations)
    assert one.value == Shop()
    assert len(store.operations) == before
    one.refresh()
    assert one.value == Shop(owner="Ada")


def test_conditions_are_decided_on_the_newest_state(two: Two) -> None:
    one, other = two
    assert one.replace("opens_at", 8, expected=9), "the default, which nobody has put, is the value"
    assert not other.replace("opens_at", 7, expected=9)
    assert other.value.opens_at == 8, "a refusal brings the copy up to date"
    other.put("owner", "Ada")
    assert not one.put_if_absent("owner", "Bob")
    assert one.value.owner == "Ada"
    assert not one.remove("owner", expected="Bob")
    assert one.remove("owner", expected="Ada")
    assert not other.remove("owner", expected=None), "it has its default, and nothing to remove"
    assert other.put_if_absent("owner", "Bob")


def test_fields_that_belong_together_are_never_seen_apart(two: Two) -> None:
    one, other = two
    seen = other.synchronizer.transitions()
    one.update(opens_at=20, closes_at=24)
    other.refresh()
    assert len([each for each in seen.drain() if each.updates]) == 1
    assert (other.value.opens_at, other.value.closes_at) == (20, 24)


@pytest.mark.stores("memory")
@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("opens_at", "9", "valid integer.*field='opens_at'"),
        ("opens_at", -1, "greater than or equal to 0"),
        ("opens_at", 18, "a shop opens before it closes"),
        ("closes", 18, "no such field: model='Shop' field='closes'"),
        ("holidays", ["1 May", 2], "1: Input should be a valid string"),
    ],
)
def test_what_is_not_valid_is_refused_before_it_is_written(field: str, value: Any, says: str, two: Two) -> None:
    config, _ = two
    for call in (
        lambda: config.put(field, value),
        lambda: config.update({"owner": "Ada", field: value}),
        lambda: config.put_if_absent(field, value),
        lambda: config.replace(field, value, getattr(Shop(), field, None)),
    ):
        with pytest.raises(InvalidArgumentError, match=says):
            call()
    config.refresh()
    assert config.value == Shop()


def test_it_is_decided_on_the_newest_state_whether_a_change_is_valid(two: Two) -> None:
    one, other = two
    other.put("opens_at", 12)
    with pytest.raises(InvalidArgumentError, match="opens before it closes"):
        one.put("closes_at", 11)
    one.put("closes_at", 13)
    with pytest.raises(InvalidArgumentError, match="opens before it closes"):
        other.put("opens_at", 14)
    other.update(opens_at=19, closes_at=20)
    with pytest.raises(InvalidArgumentError, match="opens before it closes"):
        one.remove("closes_at")


def test_it_is_decided_again_when_another_process_was_faster(two: Two, store: FailingStore) -> None:
    one, other = two
    just_before(store, "append", lambda: other.put("opens_at", 12))
    with pytest.raises(InvalidArgumentError, match="opens before it closes"):
        one.put("closes_at", 11)
    assert one.value == Shop(opens_at=12)
    just_before(store, "append", lambda: other.update(opens_at=6, closes_at=12))
    assert not one.replace("closes_at", 20, expected=18)
    assert one.value == Shop(opens_at=6, closes_at=12)


def test_each_field_needs_a_default(store: FailingStore) -> None:
    class Address(BaseModel):
        street: str

    with pytest.raises(InvalidArgumentError, match=r"a default.*model='Address' fields=\['street'\]"):
        SharedConfig(store, "address", Address)


def test_releases_with_different_fields_share_it(two: Two, store: FailingStore) -> None:
    old, _ = two
    new = SharedConfig(store, "shop", ShopOfTheNextRelease)
    new.update(discount=0.1, owner="Ada")
    old.refresh()
    assert old.value == Shop(owner="Ada")
    old.put("owner", "Bob")
    new.refresh()
    assert new.value == ShopOfTheNextRelease(discount=0.1, owner="Bob")


def test_fields_with_an_alias_are_put_by_their_name(store: FailingStore) -> None:
    class Aliased(BaseModel):
        opens_at: int = Field(9, alias="opensAt")
        closes_at: int = Field(18, validation_alias="closesAt")

    config = SharedConfig(store, "aliased", Aliased)
    config.update(opens_at=8, closes_at=20)
    assert (config.value.opens_at, config.value.closes_at) == (8, 20)

    class Ambiguous(BaseModel):
        opens_at: int = Field(9, validation_alias=AliasChoices("opensAt", "opens"))

    with pytest.raises(InvalidArgumentError, match="at most one alias: field='opens_at'"):
        SharedConfig(store, "ambiguous", Ambiguous)


def test_a_field_that_was_put_wrong_by_other_means_is_told_and_mended(two: Two, store: FailingStore) -> None:
    config, _ = two
    entries = ConfigEntries(store, "shop")
    entries["opens_at"] = "early"
    config.refresh()
    with pytest.raises(InvalidArgumentError, match="put or remove it.*field='opens_at'"):
        _ = config.value
    config.put("opens_at", 10)
    assert config.value == Shop(opens_at=10)


def test_listeners_hear_the_configuration_before_and_after(two: Two) -> None:
    one, other = two
    of_all: list[tuple[str, str | None]] = []
    of_owners: list[tuple[str | None, str | None]] = []
    one.register_listener(lambda change: of_all.append((change.after.greeting, change.after.owner)))

    def listener(change: ValueChange[Shop]) -> None:
        of_owners.append((change.before.owner, change.after.owner))

    one.register_listener(listener, field="owner")
    with pytest.raises(InvalidArgumentError, match="no such field"):
        one.register_listener(listener, field="owners")
    other.put("greeting", "hi")
    other.put("owner", "Ada")
    one.clear()
    until(lambda: len(of_all) == 3 and len(of_owners) == 2, "all changes")
    assert of_all == [("hi", None), ("hi", "Ada"), ("hello", None)]
    assert of_owners == [(None, "Ada"), ("Ada", None)]


def test_no_name_is_no_name(store: FailingStore) -> None:
    with pytest.raises(InvalidArgumentError, match="the last one must not be"):
        SharedConfig(store, "", Shop)


def test_a_listener_hears_on_when_a_field_was_put_wrong_and_right(
    two: Two, store: FailingStore, caplog: pytest.LogCaptureFixture
) -> None:
    config, _ = two
    heard: list[tuple[int, int]] = []
    config.register_listener(lambda change: heard.append((change.before.opens_at, change.after.opens_at)))
    entries = ConfigEntries(store, "shop")
    entries["opens_at"] = "early"
    entries["opens_at"] = 10
    until(lambda: heard == [(9, 10)], "from the last that was valid to the next")
    assert "field='opens_at'" in caplog.text and "Traceback" not in caplog.text


def test_what_could_not_be_called_in_a_thread_is_no_listener(two: Two) -> None:
    async def listener(change: object) -> None: ...

    nothing: Any = None
    for wrong in (listener, nothing):
        with pytest.raises(InvalidArgumentError, match="plain function|must be a function"):
            two[0].register_listener(wrong)
        with pytest.raises(InvalidArgumentError, match="plain function|must be a function"):
            two[0].synchronizer.on_update(wrong)


def test_a_listener_that_raises_is_named(two: Two, caplog: pytest.LogCaptureFixture) -> None:
    def careless(change: object) -> None:
        raise ValueError("mine")

    two[0].register_listener(careless)
    two[1].put("opens_at", 10)
    until(lambda: "careless at" in caplog.text, "the name in the log")


def test_watching_gives_the_newest(two: Two) -> None:
    one, other = two
    watched = one.watch()
    assert next(watched) == Shop()
    other.put("owner", "Ada")
    assert next(watched) == Shop(owner="Ada")
