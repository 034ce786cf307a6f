"""Values come back as they went in."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

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
