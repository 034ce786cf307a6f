"""Events as pydantic models: the serializer types the writer and the reader."""

import sys
from pathlib import Path
from tempfile import mkdtemp

from pydantic import BaseModel, ValidationError

import readergroup as rg


class Order(BaseModel):
    id: int
    total: float


def main(folder: Path) -> None:
    orders = rg.PydanticSerializer(Order)
    with rg.connect(f"sqlite:///{folder / 'shop.db'}") as client:
        client.streams.create("shop/orders")
        with client.writer("shop/orders", serializer=orders) as writer:
            writer.write(Order(id=1, total=9.5), routing_key="alice")
        with client.writer("shop/orders") as raw_writer:
            raw_writer.write(b"not an order", routing_key="alice")
        client.streams.seal("shop/orders")

        group = client.groups.create("billing", streams=["shop/orders"])
        with group.reader("reader-1", serializer=orders) as reader:
            for event in reader:
                try:
                    print("order", event.data.id, event.data.total)
                except ValidationError:  # decoding fails where the data is used; the reader continues
                    print("damaged", event.raw)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else mkdtemp()))
