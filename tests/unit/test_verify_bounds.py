"""What one message and one push may cost to compare, and what cannot be compared."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from layerpush.core.wire import Completed, PartSums, Registration
from layerpush.core.write import Segment, Write
from layerpush.decode import checks
from layerpush.decode.checks import Checks
from layerpush.prefill import samples
from layerpush.prefill.samples import Sample, Sampler
from layerpush.telemetry.metrics.recorder import Recorder
from layerpush.telemetry.trace_records import LoadRecord
from layerpush.transport.kv_parts import CHECKSUM, KvParts, LayerKv, Place

TOKENS, BLOCKS = 16, 8
WANTED = Registration(
    request_id="r", decode_engine_id="D", decode_host="127.0.0.1", decode_port=5601, decode_tp_size=1,
    local_block_ids=(tuple(range(1, BLOCKS)),), layerpush=1, verifies=CHECKSUM,
)  # fmt: skip
LINK: Any = SimpleNamespace(routes=[SimpleNamespace(remote_rank=rank) for rank in (0, 1)])
PLACES = [(TOKENS * number, Place(number, 0, TOKENS)) for number in range(BLOCKS)]


class Counted(KvParts):
    """Counts the parts that it reads."""

    read = 0

    def checksums(self, name: str, heads: range, places: Any) -> bytes:
        self.read += len(places)
        return super().checksums(name, heads, places)


def kv() -> Counted:
    """Of one layer, of which every rank has all heads. A block has 512 bytes."""
    cache = torch.arange(BLOCKS * 2 * TOKENS * 8, dtype=torch.int16).view(BLOCKS, 2, TOKENS, 8)
    return Counted({"a": LayerKv(cache, 0)}, 0, 1)


def completed(layer: str = "a", end: int = 4 * TOKENS, value: bytes = bytes(4)) -> Completed:
    row = PartSums(layer, 0, 2, 0, end, TOKENS, value * (end // TOKENS))
    return Completed("r", 1, (BLOCKS - 1) * TOKENS, (row,))


def record() -> LoadRecord:
    return LoadRecord(request_id="r", engine_id="D")


def difference(parts: KvParts, message: Completed, load: LoadRecord | None = None) -> str | None:
    return Checks(parts, Recorder()).difference(WANTED, message.tokens, message.sums, load or record())


def test_another_checksum_is_a_difference() -> None:
    load = record()
    found = difference(kv(), completed(), load)
    assert found is not None
    assert "layer a, tokens 0 to 15, block 1" in found
    assert load.verified_parts == 4
    assert load.verify_s > 0


@pytest.mark.parametrize("message", [completed("b"), completed(end=BLOCKS * TOKENS)], ids=["layer", "tokens"])
def test_a_load_goes_on_if_it_cannot_be_compared(message: Completed) -> None:
    assert difference(kv(), message) is None


def test_a_load_goes_on_if_its_memory_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: Any) -> bytes:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(KvParts, "checksums", no_memory)
    assert difference(kv(), completed()) is None


def test_d_reads_nothing_for_a_message_about_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "MOST_BYTES", 3 * 512)
    parts = kv()
    assert difference(parts, completed()) is None
    assert parts.read == 0


def test_p_reads_so_much_at_most_and_once_for_ranks_with_the_same_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "SAMPLE_BYTES", 5 * 512)
    parts = kv()
    sample = Sample(parts, ["a"], 2, LINK, random.Random(0))
    layer = parts.layers["a"]
    for found in (PLACES[:4], PLACES[4:], []):
        sample._take("a", layer, found)
    assert parts.read == 5
    rows = [sample.sums(rank, BLOCKS * TOKENS) for rank in (0, 1)]
    assert rows[0] == rows[1]
    assert sum(len(row.values) // 4 for row in rows[0]) == 5


def test_a_prefix_has_the_checksums_of_its_own_tokens() -> None:
    parts = kv()
    sample = Sample(parts, ["a"], 1, LINK, random.Random(0))
    sample._take("a", parts.layers["a"], PLACES)
    (row,) = sample.sums(0, 2 * TOKENS + 1)
    assert (row.start, row.end, len(row.values)) == (0, 2 * TOKENS, 2 * 4)


def test_no_push_is_chosen_for_a_d_that_compares_nothing() -> None:
    other = Registration(**{**WANTED_FIELDS, "verifies": None})
    assert Sampler(kv(), ["a"], 1.0).sample(other, LINK) is None


def test_a_new_epoch_drops_the_checksums_of_what_is_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """P may compute other bytes than before, and may take fewer checksums of them. D keeps the first block."""
    monkeypatch.setattr(samples, "MAX_CHECKSUMS", BLOCKS + 1)
    sample = Sample(kv(), ["a"], 1, LINK, random.Random(0))
    tokens = BLOCKS * TOKENS
    link: Any = sample._link
    link.pieces, link.replicas = None, ()
    for epoch, kept in enumerate([0, TOKENS]):
        write = Write(epoch, epoch, 0, 0, (Segment(slice(0, 1), 0, kept // TOKENS, BLOCKS, (), (), 0),))
        blocks: Any = SimpleNamespace(
            kept_tokens=kept,
            prompt_tokens=tokens,
            wanted=[BLOCKS],
            sources=lambda part: [(number, number) for number in range(part.first, part.end)],
        )
        sample.take_checksums(write, blocks)
    (first, *others) = sample.sums(0, tokens)
    assert first.start == 0, "that of the kept block"
    assert sum(len(row.values) // 4 for row in (first, *others)) == 2, "and one of the new epoch"


def test_all_ranks_choose_the_same_pushes() -> None:
    def chosen(rank: int, share: float) -> list[bool]:
        sampler = Sampler(kv(), ["a"], share, random.Random(rank))
        keys = [Registration(**{**WANTED_FIELDS, "request_id": f"r-{number}"}) for number in range(400)]
        return [sampler.sample(registration, LINK) is not None for registration in keys]

    assert chosen(0, 0.25) == chosen(1, 0.25)
    assert 60 < sum(chosen(0, 0.25)) < 140
    assert all(chosen(0, 1.0))
    assert not any(chosen(0, 0.0))


WANTED_FIELDS = {name: getattr(WANTED, name) for name in WANTED.__struct_fields__}
