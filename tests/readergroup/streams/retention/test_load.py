"""A stream of bounded size under load: its file stays small, and the reader that keeps up misses nothing."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path

import pytest

import readergroup as rg

STREAM = "shop/orders"
MIB = 2**20


@pytest.mark.timeout(120)
def test_a_file_stays_small_while_ten_times_as_much_is_written(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    most = 4 * MIB
    kept: list[int] = []
    memory: list[int] = []
    with rg.connect(f"sqlite:///{path}") as client:
        client.streams.create(STREAM, scaling=rg.ScalingPolicy.fixed(2), retention=rg.RetentionPolicy(max_bytes=most))
        group = client.groups.create("billing", streams=[STREAM])
        expected = 0
        tracemalloc.start()
        try:
            with client.writer(STREAM) as writer, group.reader() as reader:
                for number in range(100):
                    for _ in range(400):
                        writer.write(b"x" * 1000, routing_key=str(number % 7))
                        expected += 1
                    writer.flush()
                    while expected:
                        expected -= reader.read(timeout=30) is not None
                    state = client.streams.fetch_state(STREAM)
                    lengths = client.streams.segment_lengths(state, state.current)
                    kept.append(sum(lengths.values()) - sum(state.head.values()))
                    memory.append(tracemalloc.get_traced_memory()[0])
        finally:
            tracemalloc.stop()
    assert sum(kept) / len(kept) <= 1.2 * most, kept
    # Free pages that the file keeps, and what is written while a busy machine applies the policy.
    assert os.path.getsize(path) < most + 20 * MIB
    assert max(memory[50:]) < max(memory[10:50]) + 2 * MIB
