from __future__ import annotations

import collections.abc
import enum
import sys
import types
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from functools import cached_property
from math import isnan, nan
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Generic, Literal, NamedTuple, NewType, TypeVar
from uuid import UUID
from zoneinfo import ZoneInfo

import pydantic.dataclasses
import pytest
from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    Field,
    RootModel,
    computed_field,
    conint,
    field_validator,
    model_serializer,
    model_validator,
)
from typing_extensions import TypeAliasType, TypedDict

from synchronizer import (
    InvalidArgumentError,
    Map,
    Revision,
    State,
    StateSynchronizer,
    UnknownUpdateError,
    Update,
    open_store,
)
from synchronizer.state import StateCodec
from tests.synchronizer.accounts import UPDATES, Account, Add, Drop, Note, opened


class Color(enum.StrEnum):
    RED = "red"


class Point(BaseModel, frozen=True):
    x: int
    label: str | None = None


class Everything(State):
    number: float = 0.0
    data: bytes = b""
    color: Color = Color.RED
    names: frozenset[str] = frozenset()
    points: tuple[Point, ...] = ()
    by_pair: Map[tuple[str, int], Map[str, Point]] = Map()
    anything: Any = None


class Become(Update[Everything], tag="become"):
    fields: dict[str, Any]

    def apply_to(self, state: Everything, revision: Revision) -> Everything:
        return Everything(**self.fields)


class Spoil(Update[Everything], tag="spoil"):
    """Puts in what does not belong there, as a careless apply_to may."""

    what: str

    def apply_to(self, state: Everything, revision: Revision) -> Everything:
        return state.replace(**{**SPOILED, **HARMLESS}[self.what])


HARMLESS: Final[dict[str, dict[str, Any]]] = {"not at all": {"anything": "a text", "names": frozenset({"ann"})}}
SPOILED: Final[dict[str, dict[str, Any]]] = {
    "a list for a tuple": {"points": [Point(x=1)]},
    "a dict for a Map": {"by_pair": {}},
    "an int for a float": {"number": 1},
    "a value of no stored type": {"anything": datetime(2026, 1, 1, tzinfo=UTC)},
    "a list where a tuple comes back": {"anything": [1]},
    "a list inside of a tuple": {"anything": (1, [2])},
    "a string for a number": {"number": "many"},
    "nothing for a Map": {"by_pair": 5},
    "an integer that is too large": {"anything": 1 << 70},
}


def everything(**options: Any) -> StateSynchronizer[Everything]:
    return StateSynchronizer(
        open_store("memory://"), "everything", initial=Everything(), updates=[Become, Spoil], **options
    )


@pytest.mark.parametrize(
    "kind",
    [list, dict[str, int], set[int], tuple[list[int], ...], Map[str, list[int]], list[int] | None]
    + [Mapping[str, int], Counter[str], collections.abc.Set[int], deque, NewType("Sizes", list[int])],
)
def test_a_state_has_no_field_that_could_be_changed_in_place(kind: Any) -> None:
    with pytest.raises(TypeError, match="Careless.items is mutable; use tuple, frozenset or Map"):
        type("Careless", (State,), {"__annotations__": {"items": kind}, "items": None})


def test_what_a_state_holds_does_not_change_either() -> None:
    class Sizes(BaseModel, frozen=True):
        numbers: list[int] = []

    class Box(BaseModel, frozen=True):
        sizes: Sizes = Sizes()

    class Open(BaseModel):
        number: int = 0

    @dataclass
    class OpenData:
        number: int = 0

    for kind, problem in [
        (Map[str, Box], r"Sizes\.numbers is mutable"),
        (tuple[Open, ...], "Open is part of a state, so it must be frozen"),
        (Annotated[OpenData, "some data"], "OpenData is part of a state, so it must be frozen"),
        (SizeDict, r"Careless\.items is mutable"),
    ]:
        with pytest.raises(TypeError, match=problem):
            type("Careless", (State,), {"__annotations__": {"items": kind}})

    @dataclass
    class Local:
        boxes: tuple[Box, ...] = ()  # a name that only pydantic finds

    with pytest.raises(TypeError, match="Local is part of a state, so it must be frozen"):

        class Drawer(State):
            local: Local = Local()

    pair: Any = TypeAliasType("pair", tuple[T, T], type_params=(T,))
    for inside, problem in ((list[int], r"Careless\.items is mutable"), (Open, "Open is part of a state")):
        with pytest.raises(TypeError, match=problem):
            type("Careless", (State,), {"__annotations__": {"items": pair[inside]}})
    with pytest.raises(TypeError, match="Careless is part of a state, so it must be frozen"):

        class Careless(State, frozen=False):
            number: int = 0

    class Careful(State):
        sides: Sides = Sides()
        limits: Annotated[Mapping[str, int], AfterValidator(Map)] = Map()

    assert Careful(limits={"a": 1}).limits == Map({"a": 1})


@pytest.mark.parametrize("kind", [frozenset[Point], Map[Point, int], tuple[frozenset[tuple[Point, int]], ...]])
def test_a_model_is_no_key(kind: Any) -> None:
    """It is written as a dict."""
    for base in State, Update:
        with pytest.raises(TypeError, match=r"Wrong\.items holds models or dataclasses as keys or in a set"):
            type("Wrong", (base,), {"__annotations__": {"items": kind}, "apply_to": lambda *_: None})


def test_a_model_that_is_written_as_one_value_may_be_one() -> None:
    class Name(RootModel[str], frozen=True):
        pass

    class Article(BaseModel, frozen=True):
        code: str

        @model_validator(mode="before")
        @classmethod
        def _read(cls, value: Any) -> Any:
            return {"code": value} if isinstance(value, str) else value

        @model_serializer
        def _write(self) -> str:
            return self.code

    class Names(State):
        all: frozenset[Name] = frozenset()
        stock: Map[Article, int] = Map()

    names = Names(all=frozenset([Name("a"), Name("b")]), stock=Map({Article(code="a"): 1}))
    assert StateCodec(Names, ()).decode_body(StateCodec(Names, ()).encode_initial(names)) == names


def test_what_an_annotation_says_besides_the_type_is_no_type() -> None:
    class Shelf(State):
        items: conint(ge=0) = 0  # type: ignore[valid-type]
        sizes: Map[str, conint(ge=0)] = Map()  # type: ignore[valid-type]
        label: Annotated[str, dict, None] = ""

    class Put(Update[Shelf], tag="put"):
        items: conint(ge=0)  # type: ignore[valid-type]

    assert Shelf(items=1) and Put.tag


class Cart(State):
    prices: tuple[int, ...] = ()
    _double: int = 0

    def model_post_init(self, context: Any) -> None:
        object.__setattr__(self, "_double", 2 * sum(self.prices))

    @cached_property
    def total(self) -> int:
        return sum(self.prices)


def test_what_is_derived_from_a_state_is_derived_again_from_the_next() -> None:
    class Visit(State):
        number: int = 0

        @cached_property
        def next(self) -> int:
            return self.number + 1

    cart = Cart(prices=(1, 2))
    assert (cart.total, cart._double) == (3, 6)
    more = cart.replace(prices=(1, 2, 3))
    assert (more.total, more._double, more.model_fields_set) == (6, 12, {"prices"})
    assert Visit().next == 1
    visit = Visit()
    assert (visit.next, visit.replace(number=5).next, visit.replace(number=5)) == (1, 6, Visit(number=5))


def test_a_computed_field_is_not_written() -> None:
    class Bill(BaseModel, frozen=True):
        net: int

        @computed_field
        def gross(self) -> int:
            return 2 * self.net

    class Bills(State):
        bills: tuple[Bill, ...] = ()

        @computed_field
        def total(self) -> int:
            return sum(each.net for each in self.bills)

    replica = StateSynchronizer(open_store("memory://"), "s", initial=Bills(bills=(Bill(net=1),)), updates=[])
    assert replica.compact()
    again = StateSynchronizer(replica.store, "s", initial=Bills(), updates=[])
    assert (again.state.total, again.state.bills[0].gross) == (1, 2)


class Weekday(enum.Enum):
    MONDAY = 1


class Entry(BaseModel, frozen=True):
    at: datetime
    day: date = date(2026, 1, 2)
    took: timedelta = timedelta(days=1, microseconds=1)
    price: Decimal = Decimal("0.10")
    id: UUID = UUID(int=5)
    place: Path = Path("/tmp")
    weekday: Weekday = Weekday.MONDAY


class Diary(State):
    entries: Map[datetime, Entry] = Map()
    words: frozenset[int | str | tuple[int, int | None]] = frozenset()


class Enter(Update[Diary], tag="enter"):
    entry: Entry

    def apply_to(self, state: Diary, revision: Revision) -> Diary:
        return state.replace(entries=state.entries.set(self.entry.at, self.entry))


@pytest.mark.parametrize(
    "at",
    [datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC), datetime(2026, 1, 2)]
    + [datetime(2026, 10, 25, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"), fold=fold) for fold in (0, 1)],
)
def test_times_decimals_and_the_like_come_back(at: datetime) -> None:
    words = frozenset([1, "a", (1, None), (1, 2)])
    replica = StateSynchronizer(open_store("memory://"), "s", initial=Diary(words=words), updates=[Enter])
    replica.update_state_unconditionally(Enter(entry=Entry(at=at)))
    assert replica.compact()
    again = StateSynchronizer(replica.store, "s", initial=Diary(), updates=[Enter])
    (entry,) = again.state.entries.values()
    assert entry.at.isoformat() == at.isoformat()
    assert entry.model_copy(update={"at": at}) == Entry(at=at)
    assert again.state.words == words


class OldOrder(BaseModel, frozen=True):
    number: int = 1


class NewOrder(OldOrder, frozen=True):
    street: str | None = None


@dataclass(frozen=True)
class OldData:
    number: int = 1


@dataclass(frozen=True)
class NewData(OldData):
    street: str | None = None


@pytest.mark.parametrize(("old_kind", "new_kind"), [(OldOrder, NewOrder), (OldData, NewData)])
def test_a_field_of_a_newer_release_within_a_model_stops_the_older_one(old_kind: Any, new_kind: Any) -> None:
    """It would drop the field, and its snapshots would drop it for all."""

    def release(kind: Any) -> tuple[Any, Any]:
        class Orders(State):
            orders: Map[str, kind] = Map()

        class Put(Update[Orders], tag="put"):
            order: kind

            def apply_to(self, state: Orders, revision: Revision) -> Orders:
                return state.replace(orders=state.orders.set("a", self.order))

        return StateSynchronizer(store, "s", initial=Orders(), updates=[Put]), Put

    store = open_store("memory://")
    old, _ = release(old_kind)
    new, put = release(new_kind)
    new.update_state_unconditionally(put(order=new_kind()))
    assert old.fetch_updates().orders == Map({"a": old_kind()})
    new.update_state_unconditionally(put(order=new_kind(street="Elm Street")))
    with pytest.raises(UnknownUpdateError, match="a newer release wrote these fields") as raised:
        old.fetch_updates()
    assert raised.value.facts["fields"] == ["order.street"]
    assert new.compact()
    with pytest.raises(UnknownUpdateError, match="a newer release wrote these fields"):
        release(old_kind)


def test_a_state_does_not_change() -> None:
    with pytest.raises(Exception, match="frozen"):
        Account().value = 3  # type: ignore[misc]
    with pytest.raises(Exception, match="forbidden"):
        Account(valeu=3)  # type: ignore[call-arg]


def test_replace_gives_another_state_and_refuses_a_field_that_does_not_exist() -> None:
    state = Account(value=1)
    assert state.replace(value=2, note="x") == Account(value=2, note="x")
    assert state == Account(value=1)
    with pytest.raises(InvalidArgumentError, match="no such field") as raised:
        state.replace(valeu=2)
    assert raised.value.facts["fields"] == ["valeu"]
    cart = Cart(prices=(1, 2))
    assert cart.total == 3
    with pytest.raises(InvalidArgumentError, match="no such field"):
        cart.replace(total=5)


def test_a_state_of_every_kind_of_field_comes_back_equal() -> None:
    state = Everything(
        number=1.5,
        data=b"\xff",
        names=frozenset({"b", "a"}),
        points=(Point(x=1), Point(x=2, label="two")),
        by_pair=Map({("a", 1): Map({"p": Point(x=3)})}),
        anything=("a", {"b": (1, 2)}),
    )
    codec = StateCodec(Everything, (Become,))
    assert codec.decode_snapshot(codec.encode_snapshot(state, 7)) == (state, 7)
    assert codec.decode_body(codec.encode_initial(state)) == state


def test_a_state_with_a_number_that_is_none_can_be_compacted() -> None:
    codec = StateCodec(Everything, (Become,))
    state = Everything(number=nan, by_pair=Map({("a", 1): Map({})}), anything=(nan, {"a": nan, "b": 1}))
    read, _ = codec.decode_snapshot(codec.encode_snapshot(state, 7))
    assert read is not None and isnan(read.number) and isnan(dict(read.anything[1])["a"])


def test_equal_sets_are_written_alike() -> None:
    codec = StateCodec(Everything, ())
    names = [f"name-{number}" for number in range(100)]
    assert codec.encode_initial(Everything(names=frozenset(names))) == codec.encode_initial(
        Everything(names=frozenset(reversed(names)))
    )


def test_the_format_of_a_state_is_inherited() -> None:
    class Second(Account, format=2):
        pass

    class Derived(Second):
        pass

    assert (Account.state_format, Second.state_format, Derived.state_format) == (1, 2, 2)


@dataclass(frozen=True)
class SizeData:
    width: int | None = 5


Json = TypeAliasType("Json", "Map[str, Json] | tuple[Json, ...] | int")
NewSize = NewType("NewSize", SizeData)
T = TypeVar("T")


@dataclass(frozen=True)
class BoxData(Generic[T]):
    content: T
    width: int | None = 5


class SizeDict(TypedDict, total=False):
    width: int | None


class SizeTuple(NamedTuple):
    sizes: tuple[SizeData, ...] = ()


class Sides(NamedTuple):
    left: int | None = 5
    right: int | None = 5


@pydantic.dataclasses.dataclass(frozen=True)
class Weight:
    grams: int | None = Field(None, description="without its box")


@dataclass(frozen=True, slots=True)
class GoodSize:
    limits: ClassVar[int | None] = 5
    width: int | None = None
    sides: Sides = Sides()
    depth: int | None = field(default_factory=lambda: None)
    weight: Weight = field(default_factory=lambda: Weight())


@pydantic.dataclasses.dataclass(frozen=True)
class AnnotatedSize:
    width: Annotated[int | None, Field(default=None)]


@dataclass(frozen=True)
class A:
    all: tuple[A | B | C | D | E | F | G | H | J | K, ...] = ()


@dataclass(frozen=True)
class B(A):
    pass


@dataclass(frozen=True)
class C(B):
    pass


@dataclass(frozen=True)
class D(C):
    pass


@dataclass(frozen=True)
class E(D):
    pass


@dataclass(frozen=True)
class F(E):
    pass


@dataclass(frozen=True)
class G(F):
    pass


@dataclass(frozen=True)
class H(G):
    pass


@dataclass(frozen=True)
class J(H):
    pass


@dataclass(frozen=True)
class K(J):
    pass


class TestWhatIsNotWritten:
    def test_unused_optional_fields_are_not(self) -> None:
        codec = StateCodec(Account, (Note,))
        assert b"text" not in codec.encode_updates([Note()])
        assert b"note" not in codec.encode_initial(Account())
        assert codec.decode_body(codec.encode_updates([Note()])) == [Note()]

    def test_so_a_field_that_may_be_none_has_to_default_to_none(self) -> None:
        with pytest.raises(TypeError, match=r"Wrong\.size allows None"):

            class Wrong(Update[Account], tag="wrong"):
                size: int | None = 5

        with pytest.raises(TypeError, match=r"WrongState\.size allows None"):

            class WrongState(State):
                size: int | None = 5

        with pytest.raises(TypeError, match=r"WrongList\.sizes allows None"):

            class WrongList(Update[Account], tag="wrong"):
                sizes: list[int] | None = []

    def test_in_nested_models_too(self) -> None:
        class Size(BaseModel):
            width: int | None = 5

        with pytest.raises(TypeError, match=r"Size\.width allows None"):

            class Resize(Update[Account], tag="resize"):
                sizes: Map[str, tuple[Size, ...]] = Map()

    @pytest.mark.parametrize("record", [SizeData, SizeDict, SizeTuple], ids=lambda record: record.__name__)
    def test_in_dataclasses_and_typed_dicts_too(self, record: Any) -> None:
        with pytest.raises(TypeError, match=r"Size(Data|Dict)\.width allows None"):

            class Resize(Update[Account], tag="resize"):
                sizes: Map[str, Annotated[record, "a size"]] = Map()

    def test_behind_other_names_too(self) -> None:
        with pytest.raises(TypeError, match=r"SizeData\.width allows None"):

            class Resize(Update[Account], tag="resize"):
                size: NewSize

        with pytest.raises(TypeError, match=r"BoxData\.width allows None"):

            class Box(Update[Account], tag="box"):
                box: BoxData[int]

    def test_classes_that_hold_each_other_are_looked_at_once(self) -> None:
        class Draw(Update[Account], tag="draw"):
            shapes: A = A()

        assert Draw.tag == "draw"

    def test_an_alias_may_hold_itself(self) -> None:
        class Write(Update[Account], tag="write"):
            text: Json = 0

        assert Write.tag == "write"

    def test_a_literal_may_be_none(self) -> None:
        with pytest.raises(TypeError, match=r"Paint\.color allows None"):

            class Paint(Update[Account], tag="paint"):
                color: Literal["red", None] = "red"

    def test_a_dataclass_whose_none_is_the_default_is_read_back(self) -> None:
        class Resize(Update[Account], tag="resize"):
            size: GoodSize

            def apply_to(self, state: Account, revision: Revision) -> Account:
                return state

        codec = StateCodec(Account, (Resize,))
        for update in Resize(size=GoodSize()), Resize(size=GoodSize(5, Sides(None, 7))):
            assert codec.decode_body(codec.encode_updates([update])) == [update]

    def test_a_pydantic_dataclass_has_its_default_in_the_annotation(self) -> None:
        class Widen(Update[Account], tag="widen"):
            size: AnnotatedSize | None = None

        assert Widen.tag == "widen"

    @pytest.mark.parametrize("name", ["WaitsForModel", "WaitsForDataclass"])
    def test_in_classes_that_are_defined_later_at_the_first_use(
        self, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        late = types.ModuleType("late")
        monkeypatch.setitem(sys.modules, "late", late)
        exec(CLASSES_IN_ANY_ORDER, late.__dict__)
        with pytest.raises(TypeError, match=r"Later\w+\.width allows None"):
            StateSynchronizer(open_store("memory://"), "s", initial=Account(), updates=[getattr(late, name)])

    def test_a_model_may_hold_itself(self) -> None:
        class Grow(Update[Account], tag="grow"):
            nodes: tuple[Node, ...] = ()

        assert Grow.tag == "grow"

    def test_none_inside_a_collection_is(self) -> None:
        class Fill(Update[Account], tag="fill"):
            sizes: Map[str, int | None] = Map()

            def apply_to(self, state: Account, revision: Revision) -> Account:
                return state

        codec = StateCodec(Account, (Fill,))
        fill = Fill(sizes=Map({"a": None}))
        assert codec.decode_body(codec.encode_updates([fill])) == [fill]


CLASSES_IN_ANY_ORDER = """
from __future__ import annotations
from dataclasses import dataclass
from pydantic import BaseModel
from synchronizer import Update
from tests.synchronizer.accounts import Account

class WaitsForModel(Update[Account], tag="model"):
    size: LaterModel

    def apply_to(self, state, revision):
        return state

class WaitsForDataclass(Update[Account], tag="dataclass"):
    size: LaterDataclass

    def apply_to(self, state, revision):
        return state

class LaterModel(BaseModel):
    width: int | None = 5

@dataclass(frozen=True)
class LaterDataclass:
    width: int | None = 5

WaitsForModel.model_rebuild()
WaitsForDataclass.model_rebuild()
"""


class Node(BaseModel):
    children: tuple[Node, ...] = ()


class Shape(BaseModel, frozen=True):
    name: str = "a shape"


class Circle(Shape):
    radius: int = 1


class Hidden(BaseModel, frozen=True):
    value: str = Field(default="", exclude=True)


class Renamed(BaseModel, frozen=True):
    width: int = Field(default=5, alias="w")


@dataclass(frozen=True)
class Sized(Generic[T]):
    width: T | int = 5


#: A type, a value of it, and one that encoding changes.
COME_BACK_OTHERWISE: list[tuple[Any, Any, Any]] = [
    (Shape, Shape(), Circle(radius=5)),
    (Sized[None], Sized[None](), Sized[None](width=None)),
    (Map[str, Any], Map(), Map({"of any type": Shape()})),
]


class TestUpdateClasses:
    def test_one_without_a_tag_is_refused(self) -> None:
        class Untagged(Update[Account]):
            def apply_to(self, state: Account, revision: Revision) -> Account:
                return state

        with pytest.raises(InvalidArgumentError, match="has no tag"):
            StateCodec(Account, (Untagged,))

    def test_two_of_one_tag_are_refused(self) -> None:
        class Another(Update[Account], tag="add"):
            def apply_to(self, state: Account, revision: Revision) -> Account:
                return state

        with pytest.raises(InvalidArgumentError, match="two updates have the tag 'add'"):
            StateCodec(Account, (Add, Another))
        StateCodec(Account, (Add, Add))

    def test_one_that_the_synchronizer_does_not_know_is_refused(self) -> None:
        replica = StateSynchronizer(open_store("memory://"), "s", initial=Account(), updates=[Add])
        with pytest.raises(InvalidArgumentError, match="not registered") as raised:
            replica.update_state_unconditionally(Add(), Drop(key="a"))
        assert raised.value.facts["update"] == "Drop"
        assert replica.fetch_updates().value == 0

    def test_one_without_apply_to_cannot_be_made(self) -> None:
        class Nothing(Update[Account], tag="nothing"):
            pass

        with pytest.raises(TypeError, match="abstract"):
            Nothing()  # type: ignore[abstract]

    def test_one_that_returns_no_state_is_refused_before_it_is_written(self) -> None:
        class Forget(Update[Account], tag="forget"):
            def apply_to(self, state: Account, revision: Revision) -> Account:
                state.replace(value=1)
                return None  # type: ignore[return-value]

        store = open_store("memory://")
        replica = StateSynchronizer(store, "account", initial=Account(), updates=[Forget])
        length = replica.applied_length
        with pytest.raises(InvalidArgumentError, match="apply_to must return a state"):
            replica.update_state_unconditionally(Forget())
        assert store.info("account").length == length
        assert replica.fetch_updates() == Account()

    def test_what_it_is_given_is_what_was_read_back(self) -> None:
        """A list that the caller goes on changing does not get into the state."""
        replica = everything()
        mutable = ["a"]
        replica.update_state_unconditionally(Become(fields={"anything": mutable}))
        mutable.append("b")
        assert replica.state.anything == ("a",)

    @pytest.mark.parametrize(("kind", "good", "bad"), COME_BACK_OTHERWISE, ids=str)
    def test_what_would_be_read_back_with_another_value_is_refused_before_it_is_written(
        self, kind: Any, good: object, bad: object
    ) -> None:
        class Draw(Update[Account], tag="draw"):
            first: kind
            more: tuple[Map[str, kind], ...] = ()

            def apply_to(self, state: Account, revision: Revision) -> Account:
                return state

        class Drawing(State):
            first: kind

        replica = StateSynchronizer(open_store("memory://"), "s", initial=Account(), updates=[Draw])
        length = replica.applied_length
        with pytest.raises(InvalidArgumentError, match="read back with another value") as raised:
            replica.update_state_unconditionally(Draw(first=bad))
        assert raised.value.facts["field"] == "first"
        with pytest.raises(InvalidArgumentError, match="read back with another value") as raised:
            replica.update_state(lambda state: [Draw(first=good), Draw(first=good, more=(Map({"a": bad}),))])
        assert raised.value.facts["field"] == "more"
        assert replica.store.info("s").length == length
        with pytest.raises(InvalidArgumentError, match="read back with another value"):
            StateSynchronizer(open_store("memory://"), "s", initial=Drawing(first=bad), updates=[])

    def test_a_field_that_is_read_by_another_name_is_refused(self) -> None:
        class Rename(Update[Account], tag="rename"):
            renamed: Renamed

            def apply_to(self, state: Account, revision: Revision) -> Account:
                return state

        replica = StateSynchronizer(open_store("memory://"), "s", initial=Account(), updates=[Rename])
        with pytest.raises(InvalidArgumentError, match=r"does not survive encoding.*renamed\.width"):
            replica.update_state_unconditionally(Rename(renamed=Renamed(w=7)))

    @pytest.mark.parametrize(
        "value", [[1, (2, [nan])], {3, 1}, {"a": [nan, {"b": (nan,)}]}, True, 1, 1.0, Color.RED, nan]
    )
    def test_collections_and_numbers_are_what_they_were(self, value: object) -> None:
        class Note(Update[Account], tag="note"):
            values: dict[str, Any]
            point: Point
            size: Sized[float]
            hidden: Hidden
            secret: str = Field(default="", exclude=True)

            def apply_to(self, state: Account, revision: Revision) -> Account:
                return state

        replica = StateSynchronizer(open_store("memory://"), "s", initial=Account(), updates=[Note])
        replica.update_state_unconditionally(
            Note(values={"a": value}, point=Point(x=1), size=Sized(nan), hidden=Hidden(value="x"), secret="x")
        )

    @pytest.mark.parametrize("value", [datetime(2026, 1, 1, tzinfo=UTC), 1 << 70, object(), "\ud800"])
    def test_a_value_that_cannot_be_stored_is_refused(self, value: object) -> None:
        replica = everything()
        length = replica.applied_length
        with pytest.raises(InvalidArgumentError):
            replica.update_state_unconditionally(Become(fields={"anything": value}))
        assert replica.store.info("everything").length == length
        replica.update_state_unconditionally(Become(fields={"anything": 1}))

    @pytest.mark.parametrize("levels", [450, 505, 2_000, 100_000])  # Python allows some of these levels, or msgpack
    def test_a_value_that_is_nested_too_deeply_is_refused(self, levels: int) -> None:
        deep: Any = nan
        for _ in range(levels):
            deep = [deep]
        replica = everything()
        with suppress(InvalidArgumentError) if levels < 511 else pytest.raises(InvalidArgumentError):
            replica.update_state_unconditionally(Become(fields={"anything": deep}))
        replica.update_state_unconditionally(Become(fields={"anything": 1}))
        assert replica.state.anything == 1

    def test_an_integer_of_more_than_64_bits_is_refused_as_such(self) -> None:
        with pytest.raises(InvalidArgumentError, match="at most 64 bits: bits=20001"):
            everything().update_state_unconditionally(Become(fields={"anything": 1 << 20_000}))

    def test_a_value_of_a_wrong_type_that_got_round_the_checks_is_refused(self) -> None:
        replica = opened(open_store("memory://"))
        with pytest.raises(InvalidArgumentError, match="does not survive"):
            replica.update_state_unconditionally(Add.model_construct(amount="many"))


Length = NewType("Length", int)


class Kinds(State):
    number: int = 0
    perhaps: int | None = None
    limited: Annotated[int, Field(ge=0)] = 0
    word: Literal["a", "b"] | bytes = "a"
    place: Path = Path("/")
    length: Length = Length(0)
    color: Color | None = None
    items: tuple[int, ...] = ()


PUT: Final[dict[str, dict[str, Any]]] = {"fields": {}}
DECLARED: Final = {
    "number": 1,
    "perhaps": 2,
    "limited": 3,
    "word": b"b",
    "length": Length(4),
    "color": Color.RED,
    "items": (5,),
}
NEIGHBOURS: Final = {
    "number": True,
    "perhaps": 2.0,
    "limited": "3",
    "word": 1,
    "place": "/tmp",
    "length": 4.0,
    "color": "blue",
    "items": [5],
}


class Wrapped(int):
    pass


class Level(enum.IntEnum):
    HIGH = 3


class Put(Update[Kinds], tag="put"):
    def apply_to(self, state: Kinds, revision: Revision) -> Kinds:
        return state.replace(**PUT["fields"])


class Marked(State):
    """Its values are of other classes than their annotations."""

    at: AwareDatetime = datetime(2026, 1, 1, tzinfo=UTC)
    place: Path = Path("/")
    days: Annotated[Sequence[int], AfterValidator(tuple)] = ()


class Mark(Update[Marked], tag="mark"):
    day: int

    def apply_to(self, state: Marked, revision: Revision) -> Marked:
        if not self.day:
            broken = Marked.model_construct()
            del broken.__dict__["at"]
            return broken
        return state.replace(at=datetime(2026, 1, self.day, tzinfo=UTC), place=Path(f"/{self.day}"), days=(self.day,))


class TestStatesThatWouldNotComeBack:
    @pytest.mark.parametrize("what", SPOILED)
    def test_an_update_that_makes_one_is_refused(self, what: str) -> None:
        replica = everything()
        length = replica.store.info("everything").length
        for _ in range(2):
            with pytest.raises(InvalidArgumentError):
                replica.update_state_unconditionally(Spoil(what=what))
        assert replica.store.info("everything").length == length
        assert replica.state == Everything()

    @pytest.mark.parametrize("size", [0, 100_000])
    def test_a_value_of_another_class_than_the_fields_is_refused_each_time_at_any_size(self, size: int) -> None:
        replica = everything()
        replica.update_state_unconditionally(Become(fields={"data": bytes(size)}))
        replica.compact()
        for _ in range(2):
            replica.update_state_unconditionally(Spoil(what="not at all"))
            with pytest.raises(InvalidArgumentError, match="update='Spoil' field='number' .*declared='float'"):
                replica.update_state_unconditionally(Spoil(what="a string for a number"))
            with pytest.raises(InvalidArgumentError, match=r"field='points' .*declared='tuple\[.*Point, \.\.\.\]'"):
                replica.update_state_unconditionally(Spoil(what="a list for a tuple"))

    def test_one_of_long_ago_does_not_keep_other_fields_from_being_changed(
        self, careless_release: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        replica = everything()
        replica.update_state_unconditionally(Spoil(what="a string for a number"))
        monkeypatch.undo()
        replica.update_state_unconditionally(Spoil(what="not at all"))
        assert replica.state.number == "many"

    @pytest.mark.parametrize("value", [2**64, -(2**63) - 1, 1 << 20_000, Wrapped(3), Level.HIGH], ids=int.bit_length)
    @pytest.mark.parametrize("size", [1, 100_000])
    def test_an_integer_that_is_not_read_back_is_refused_each_time_at_any_size(
        self, value: int, size: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def put(**fields: Any) -> None:
            monkeypatch.setitem(PUT, "fields", fields)
            replica.update_state_unconditionally(Put())

        replica = StateSynchronizer(open_store("memory://"), "kinds", initial=Kinds(), updates=[Put])
        put(items=(1,) * size)
        replica.compact()
        for number in (2**64 - 1, -(2**63)):
            put(number=number)
            with pytest.raises(InvalidArgumentError, match="update='Put' field='number' value=.* declared='int'"):
                put(number=value)
            assert replica.state.number == number
        assert replica.compact()

    @pytest.mark.parametrize("spoiled", [{"number": 1 << 70}, {"items": (1 << 70,)}])
    def test_an_integer_of_long_ago_refuses_no_update_of_other_fields(
        self, spoiled: dict[str, Any], careless_release: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        replica = StateSynchronizer(
            open_store("memory://"), "kinds", initial=Kinds(), updates=[Put], state_limit_bytes=1000
        )
        monkeypatch.setitem(PUT, "fields", spoiled)
        replica.update_state_unconditionally(Put())
        monkeypatch.undo()
        for length in range(100):  # as much as the state may take, and more
            monkeypatch.setitem(PUT, "fields", {"length": length})
            replica.update_state_unconditionally(Put())
        monkeypatch.setitem(PUT, "fields", {"number": 1, "items": (1,)})
        replica.update_state_unconditionally(Put())
        assert replica.compact()

    def test_the_state_is_looked_through_once_for_each_class_of_updates(self, monkeypatch: pytest.MonkeyPatch) -> None:
        replica = everything()
        replica.update_state_unconditionally(Spoil(what="not at all"))
        monkeypatch.setattr(StateCodec, "decode_snapshot", None)
        for _ in range(3):
            replica.update_state_unconditionally(Spoil(what="not at all"))

    def test_a_large_state_is_not_looked_through(self, monkeypatch: pytest.MonkeyPatch) -> None:
        replica = everything()
        replica.update_state_unconditionally(Become(fields={"data": bytes(100_000)}))
        monkeypatch.setattr(StateCodec, "decode_snapshot", None)
        replica.update_state_unconditionally(Spoil(what="not at all"))

    @pytest.mark.parametrize("values", [DECLARED, NEIGHBOURS])
    def test_classes_are_those_that_a_snapshot_gives_back(
        self, values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        replica = StateSynchronizer(open_store("memory://"), "kinds", initial=Kinds(), updates=[Put])
        replica.update_state_unconditionally(Put())
        for name, value in values.items():
            monkeypatch.setitem(PUT, "fields", {name: value})
            if values is DECLARED:
                with monkeypatch.context() as patch:
                    patch.setattr(StateCodec, "decode_snapshot", None)  # it need not be asked
                    replica.update_state_unconditionally(Put())
            else:
                with pytest.raises(InvalidArgumentError, match=f"field='{name}'"):
                    replica.update_state_unconditionally(Put())
        assert replica.compact()

    def test_a_class_that_a_snapshot_gives_back_is_known_from_then_on(self, monkeypatch: pytest.MonkeyPatch) -> None:
        replica = StateSynchronizer(open_store("memory://"), "marked", initial=Marked(), updates=[Mark])
        replica.update_state_unconditionally(Mark(day=1))
        monkeypatch.setattr(StateCodec, "decode_snapshot", None)
        replica.update_state_unconditionally(Mark(day=2))
        assert replica.state == Marked(at=datetime(2026, 1, 2, tzinfo=UTC), place=Path("/2"), days=(2,))

    def test_a_state_without_one_of_its_fields_is_refused(self) -> None:
        replica = StateSynchronizer(open_store("memory://"), "marked", initial=Marked(), updates=[Mark])
        with pytest.raises(InvalidArgumentError):
            replica.update_state_unconditionally(Mark(day=0))
        replica.update_state_unconditionally(Mark(day=1))

    @pytest.fixture
    def careless_release(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Updates are not checked, as in an earlier release."""
        monkeypatch.setattr(StateCodec, "check_changes", lambda *_, **__: None)

    @pytest.mark.parametrize("what", SPOILED)
    def test_a_snapshot_of_one_is_refused_before_the_mark_moves(self, what: str, careless_release: None) -> None:
        replica = everything(compaction_bytes=None)
        assert replica.compact()
        mark = replica.store.attributes("everything")["mark"]
        snapshots = list(replica.store.list("snapshot/"))
        replica.update_state_unconditionally(Spoil(what=what))
        with pytest.raises(InvalidArgumentError):
            replica.compact()
        assert replica.store.attributes("everything")["mark"] == mark
        assert list(replica.store.list("snapshot/")) == snapshots
        replica.update_state_unconditionally(Become(fields={"data": b"mended"}))
        assert replica.compact()

    @pytest.mark.parametrize("what", SPOILED)
    def test_the_update_whose_compaction_is_refused_succeeds_all_the_same(
        self, what: str, careless_release: None, caplog: pytest.LogCaptureFixture
    ) -> None:
        replica = everything(compaction_bytes=1)
        replica.update_state_unconditionally(Spoil(what=what))
        for _ in range(20):
            replica.update_state(lambda state: [Spoil(what=what)])
        assert "compaction of everything failed" in caplog.text


class Brittle(State):
    number: int = 0

    @field_validator("number")
    @classmethod
    def _divide(cls, number: int) -> int:
        return number if number < 3 else 1 // 0


class Count(Update[Brittle], tag="count"):
    def apply_to(self, state: Brittle, revision: Revision) -> Brittle:
        return state.replace(number=state.number + 1)


def test_an_error_of_the_users_code_in_a_compaction_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """The update that it follows is stored: its caller would repeat it."""
    replica = StateSynchronizer(
        open_store("memory://"), "brittle", initial=Brittle(), updates=[Count], compaction_bytes=1
    )
    for number in range(1, 8):
        assert replica.update_state(lambda state: [Count()]).number == number
    assert "compaction of brittle failed: ZeroDivisionError" in caplog.text
    assert StateSynchronizer(replica.store, "brittle", initial=Brittle(), updates=[Count]).state.number == 7


def test_a_beginning_of_another_class_is_refused() -> None:
    replica = opened(open_store("memory://"))
    replica.delete()
    with pytest.raises(InvalidArgumentError, match="class of the state is not the one"):
        replica.initialize(Everything())  # type: ignore[arg-type]


def test_an_entry_of_an_unknown_kind_names_the_remedy() -> None:
    codec = StateCodec(Account, tuple(UPDATES))
    with pytest.raises(UnknownUpdateError, match="deploy"):
        codec.decode_body(b"\x92\xa1z\x01")
    with pytest.raises(UnknownUpdateError, match="deploy"):
        codec.decode_snapshot(b"\x92\xa1z\x01")


def test_an_update_that_awaits_is_told_to_await_before() -> None:
    with pytest.raises(InvalidArgumentError, match="must be pure; await before you make the update") as refused:

        class Fetch(Update[Cart], tag="fetch"):
            async def apply_to(self, state: Cart, revision: Revision) -> Cart:  # type: ignore[override]
                return state

    assert "asyncio.run" not in str(refused.value)
