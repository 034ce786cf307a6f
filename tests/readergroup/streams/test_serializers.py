"""Values come back as they went in."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, RootModel, ValidationError

import readergroup as rg
from readergroup.streams.serializers import BytesSerializer, JsonSerializer, MsgpackSerializer, PydanticSerializer
from synchronizer import InvalidArgumentError

VALUES = [None, 1, -1.5, "ü\ud800", [1, "two"], {"id": 1, "name": "Ä"}]


@pytest.mark.parametrize("serializer", [JsonSerializer(), MsgpackSerializer()])
@pytest.mark.parametrize("value", VALUES, ids=ascii)
def test_values_come_back(serializer: JsonSerializer | MsgpackSerializer, value: Any) -> None:
    assert serializer.loads(serializer.dumps(value)) == value


def test_json_is_compact_utf_8() -> None:
    assert JsonSerializer().dumps({"a": ["ü", 1]}) == '{"a":["ü",1]}'.encode()


def test_bytes_stay_what_they_are_and_nothing_else_is_taken_for_bytes() -> None:
    assert BytesSerializer().loads(BytesSerializer().dumps(b"as is")) == b"as is"
    with pytest.raises(InvalidArgumentError, match="give it a serializer"):
        BytesSerializer().dumps("text")  # type: ignore[arg-type]


class Order(BaseModel):
    id: int
    name: str = ""


def test_models_come_back_and_what_is_none_is_refused() -> None:
    serializer = PydanticSerializer(Order)
    assert serializer.loads(serializer.dumps(Order(id=1, name="ü"))) == Order(id=1, name="ü")
    with pytest.raises(ValidationError):
        serializer.loads(b'{"id":"x"}')


class Measured(BaseModel):
    value: float | None = None
    values: list[float] = []
    by_name: dict[str, Any] = {}
    inner: Measured | None = None
    text: str = "null"


class MeasuredAsText(Measured):
    model_config = ConfigDict(ser_json_inf_nan="strings")
    value: float = 0.0


class MeasuredAsConstant(Measured):
    model_config = ConfigDict(ser_json_inf_nan="constants")
    value: float = 0.0


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")], ids=str)
def test_a_number_that_pydantic_would_write_as_null_is_refused_where_it_is_written(number: float) -> None:
    serializer = PydanticSerializer(Measured)
    for bad in (
        Measured(value=number),
        Measured(values=[1.0, number]),
        Measured(by_name={"none": None, "list": [None, {"number": number}]}),
        Measured(inner=Measured(value=number)),
        MeasuredAsText(inner=Measured(value=number)),
    ):
        with pytest.raises(InvalidArgumentError, match="NaN or infinite.* set ser_json_inf_nan"):
            serializer.dumps(bad)
    with pytest.raises(InvalidArgumentError, match="NaN or infinite"):
        PydanticSerializer(RootModel[float]).dumps(RootModel[float](number))


def test_what_is_none_and_what_the_config_of_a_model_writes_otherwise_comes_back() -> None:
    serializer = PydanticSerializer(Measured)
    for good in (
        Measured(),
        Measured(value=1.5),
        Measured(by_name={"none": None, "list": [None, {"none": None, "null": "null"}], "set": {1}}),
        Measured(inner=Measured()),
    ):
        read = serializer.loads(serializer.dumps(good))
        assert read.model_dump(mode="json") == good.model_dump(mode="json")
    for model in (MeasuredAsText, MeasuredAsConstant):
        written = PydanticSerializer(model)
        for number in (float("nan"), float("inf"), -float("inf")):
            read = written.loads(written.dumps(model(value=number, by_name={"none": None, "list": [None]})))
            assert str(read.value) == str(number)


class OtherOrder(BaseModel):
    number: int


class SpecialOrder(Order):
    why: str = ""


def test_a_model_of_another_class_is_refused_where_it_is_written() -> None:
    serializer = PydanticSerializer(Order)
    for other in (OtherOrder(number=1), {"id": 1}, None):
        with pytest.raises(InvalidArgumentError, match="takes='Order' type="):
            serializer.dumps(other)  # type: ignore[arg-type]
    assert serializer.loads(serializer.dumps(SpecialOrder(id=1))) == Order(id=1)
    for no_model in (Order(id=1), dict, "Order"):
        with pytest.raises(InvalidArgumentError, match="needs a model class"):
            PydanticSerializer(no_model)  # type: ignore[type-var]


@pytest.mark.parametrize(
    "value", [float("nan"), [float("inf")], {"a": -float("inf")}, {1, 2}, Order, b"bytes"], ids=str
)
def test_what_is_no_json_is_refused_where_it_is_written(value: object) -> None:
    with pytest.raises(InvalidArgumentError, match="cannot be written as JSON"):
        JsonSerializer().dumps(value)


@pytest.mark.parametrize("value", [2**64, Order, {1, 2}], ids=str)
def test_what_is_no_msgpack_is_refused_where_it_is_written(value: object) -> None:
    with pytest.raises(InvalidArgumentError, match="cannot be written as msgpack"):
        MsgpackSerializer().dumps(value)


@pytest.mark.parametrize(
    ("bad", "found"), [(JsonSerializer, "the class JsonSerializer"), (Order, "the class Order"), ("json", "str")]
)
def test_what_is_no_serializer_is_refused_where_it_is_passed(bad: Any, found: str) -> None:
    with rg.connect("memory://") as client:
        client.streams.create("shop/orders")
        with client.writer("shop/orders") as writer:
            writer.write(b"event")
        group = client.groups.create("billing", streams=["shop/orders"])
        (segments,) = client.batch.segment_ranges("shop/orders")
        for use in (
            lambda: client.writer("shop/orders", serializer=bad),
            lambda: group.reader(serializer=bad),
            lambda: group.pool(print, serializer=bad),
            lambda: client.batch.read(segments, serializer=bad),
        ):
            with pytest.raises(InvalidArgumentError, match=f"^serializer must be .* an instance.*: found='{found}'"):
                use()
