"""Checksums of parts of KV: equal for equal KV in any layout, and other ones for any other byte."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from itertools import pairwise
from unittest import mock

import pytest
import torch

from layerpush.transport import kv_parts
from layerpush.transport.kv_parts import Field, KvParts, LayerKv, Place
from layerpush_kernels import checksums
from tests.unit.kernels.places import running_at

HEADS, TOKENS, CONTENT, BLOCK = 4, 64, 8, 16
KV = torch.arange(HEADS * TOKENS * CONTENT, dtype=torch.int16).view(HEADS, TOKENS, CONTENT)
WHOLE = (Field(1, 2 * CONTENT),)
APART = (Field(CONTENT // 2, 2), Field(1, CONTENT))
"""The keys' elements one after another, then the values of each token."""


def cache(kernel: int, heads: range, *, by_token: bool = False) -> torch.Tensor:
    """A rank's cache of all tokens, block by block."""
    blocks = KV[heads.start : heads.stop].view(len(heads), -1, kernel, CONTENT).transpose(0, 1)
    return blocks.transpose(1, 2).contiguous().transpose(1, 2) if by_token else blocks.contiguous()


def parts(kv: torch.Tensor, rank: int = 0, ranks: int = 1, fields: tuple[Field, ...] = WHOLE) -> KvParts:
    return KvParts({"a": LayerKv(kv, 0, 1, HEADS, fields)}, rank, ranks)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("by_token", [False, True])
def test_ranks_block_sizes_and_layouts_may_differ(rank: int, by_token: bool) -> None:
    whole, heads = parts(cache(32, range(HEADS))), range(2 * rank, 2 * rank + 2)
    half = parts(cache(BLOCK, heads, by_token=by_token), rank, 2)
    ours = [Place(block, 0, BLOCK) for block in range(4)]
    theirs = [Place(block // 2, block % 2 * BLOCK, BLOCK) for block in range(4)]
    assert half.heads("a") == heads
    assert half.checksums("a", heads, ours) == whole.checksums("a", heads, theirs)
    assert len({*half.checksums("a", heads, ours)[::4]}) > 1, "blocks with other KV have other checksums"


def test_keys_and_values_may_be_apart() -> None:
    """In blocks of another size as well."""

    def apart(kernel: int) -> torch.Tensor:
        keys, values = cache(kernel, range(HEADS)).chunk(2, dim=3)
        memory = [keys.transpose(2, 3).flatten(2), values.flatten(2)]
        return torch.cat(memory, 2).view(-1, HEADS, kernel, CONTENT)

    small, large = parts(apart(BLOCK), fields=APART), parts(apart(32), fields=APART)
    all_heads = range(HEADS)
    assert small.checksums("a", all_heads, [Place(1, 0, 5)]) == large.checksums("a", all_heads, [Place(0, BLOCK, 5)])


@pytest.mark.parametrize("fields", [WHOLE, APART])
def test_every_byte_of_its_tokens_counts_and_no_other(fields: tuple[Field, ...]) -> None:
    kv = cache(BLOCK, range(HEADS))
    place, checked = [Place(1, 3, 6)], parts(kv, fields=fields)
    before, counted, memory = checked.checksums("a", range(1, 3), place), 0, kv.view(torch.uint8).view(-1)
    for at in range(memory.numel()):
        memory[at] ^= 1
        counted += checked.checksums("a", range(1, 3), place) != before
        memory[at] ^= 1
    assert counted == 2 * 6 * CONTENT * 2


@pytest.mark.parametrize(("ranks", "heads"), [(1, [0, 4]), (2, [0, 2, 4]), (4, [0, 1, 2, 3, 4])])
def test_the_heads_of_ranks(ranks: int, heads: list[int]) -> None:
    layer = LayerKv(cache(BLOCK, range(1)), 0, 1, HEADS)
    found = [layer.heads_of(rank, ranks) for rank in range(ranks)]
    assert found == [range(*pair) for pair in pairwise(heads)]


def test_ranks_may_have_a_head_in_common() -> None:
    layer = LayerKv(cache(BLOCK, range(1)), 0, 1, 2)
    assert [layer.heads_of(rank, 4).start for rank in range(4)] == [0, 0, 1, 1]
    latent = LayerKv(cache(BLOCK, range(1)), 0)
    assert [latent.heads_of(rank, 4) for rank in (0, 3)] == [range(1), range(1)]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The CPU's memory is that of a GPU, and Triton's interpreter its processors."""
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(kv_parts, "on_host", lambda _: False)
    with running_at("interpreter"):
        yield


PLACES = [Place(block, skipped, 5) for block, skipped in ((3, 0), (0, 7), (2, BLOCK - 5))]


@pytest.mark.parametrize("by_token", [False, True])
def test_a_device_takes_the_checksums_itself(monkeypatch: pytest.MonkeyPatch, by_token: bool, device: None) -> None:
    checked = parts(cache(BLOCK, range(HEADS), by_token=by_token))
    monkeypatch.setattr(kv_parts, "_by_copies", None)
    found = [checked.checksums("a", range(1, 3), places) for places in (PLACES, [])]
    monkeypatch.undo()
    assert found == [checked.checksums("a", range(1, 3), PLACES), b""]


@pytest.mark.parametrize("fault", ["fields", "error", "other sums"])
def test_else_blocks_are_copied_some_at_a_time(monkeypatch: pytest.MonkeyPatch, fault: str, device: None) -> None:
    kv, fields = cache(BLOCK, range(HEADS)), APART if fault == "fields" else WHOLE
    if fault != "fields":
        monkeypatch.setattr(checksums, "sum_parts", None if fault == "error" else mock.MagicMock())
    zeros = torch.zeros_like(kv)  # as at start-up, when any order of bytes has the same checksum
    checked = parts(zeros, fields=fields)
    zeros.copy_(kv)
    found = []
    for copied in (1, 1 << 20):
        monkeypatch.setattr(kv_parts, "COPY_BYTES", copied)
        found += [checked.checksums("a", range(1, 3), places) for places in (PLACES, [])]
    monkeypatch.undo()
    assert found == [parts(kv, fields=fields).checksums("a", range(1, 3), PLACES), b""] * 2
