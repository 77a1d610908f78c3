"""The blocks of a prompt's chunks, and their targets: in sum, the same as one push of the whole request."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from layerpush.core.push_mode import PushMode
from layerpush.core.step_plan import Alignment, ChunkPlan, GroupSlice, PromptProgress
from tests.unit.builders import blocks_of, chunks_of, table_of, vllm_pairs


@dataclass(frozen=True)
class Epoch:
    """One try at a prompt: its start behind P's prefix cache, its step sizes, its block tables."""

    start: int
    steps: tuple[int, ...]
    tables: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Prompt:
    tokens: int
    block_sizes: tuple[int, ...]
    epochs: tuple[Epoch, ...]
    """Each but the last is preempted after ``preempted_after`` of its chunks."""
    preempted_after: tuple[int, ...]


@st.composite
def prompts(draw: st.DrawFn) -> Prompt:
    tokens = draw(st.integers(1, 400))
    sizes = tuple(draw(st.lists(st.sampled_from([1, 3, 16, 32, 128]), min_size=1, max_size=3)))
    epochs, after = [], []
    for _ in range(draw(st.integers(1, 3))):
        hit = draw(st.integers(0, (tokens - 1) // max(sizes))) * max(sizes)
        steps = tuple(draw(st.lists(st.integers(1, 150), min_size=1, max_size=8)))
        tables = []
        for size in sizes:
            count = blocks_of(tokens, size)
            ids = random.Random(draw(st.integers(0, 1 << 16))).sample(range(1, 5000), count)
            nulls = draw(st.integers(0, count)) if draw(st.booleans()) else 0
            tables.append((0,) * nulls + tuple(ids[nulls:]))
        epochs.append(Epoch(hit, steps, tuple(tables)))
        after.append(draw(st.integers(1, 6)))
    return Prompt(tokens, sizes, tuple(epochs), tuple(after))


def played(prompt: Prompt) -> list[list[ChunkPlan]]:
    """Every epoch's chunks, as one scheduler would have planned them."""
    progress = PromptProgress("p-1", prompt.block_sizes)
    epochs = []
    for index, epoch in enumerate(prompt.epochs):
        last = index == len(prompt.epochs) - 1
        # Chunks after the preemption were never run: they are cut off, as if they had not been planned.
        chunks = chunks_of(prompt.tokens, epoch.steps, epoch.tables, prompt.block_sizes, progress, epoch.start)
        epochs.append(chunks if last else chunks[: prompt.preempted_after[index]])
        if not last:
            progress.restart()
    return epochs


@given(prompts())
def test_the_chunks_of_an_epoch_are_the_block_table(prompt: Prompt) -> None:
    chunks = played(prompt)[-1]

    for group, (size, table) in enumerate(zip(prompt.block_sizes, prompt.epochs[-1].tables, strict=True)):
        joined = [block for chunk in chunks for block in chunk.groups[group].blocks]
        assert joined == list(table[: blocks_of(prompt.tokens, size)])
        ends = [0, *(chunk.groups[group].end for chunk in chunks)]
        assert [chunk.groups[group].first for chunk in chunks] == ends[:-1], "a gap or an overlap"


@given(prompts())
def test_only_the_final_chunk_holds_a_partly_filled_block(prompt: Prompt) -> None:
    for chunks in played(prompt):
        for chunk in chunks:
            assert chunk.final == (chunk.end == prompt.tokens)
            for size, part in zip(prompt.block_sizes, chunk.groups, strict=True):
                assert part.total == blocks_of(prompt.tokens, size)
                assert part.end == (part.total if chunk.final else chunk.end // size)


@given(prompts())
def test_epochs_and_indices_count(prompt: Prompt) -> None:
    for epoch, chunks in enumerate(played(prompt)):
        assert [chunk.epoch for chunk in chunks] == [epoch] * len(chunks)
        assert [chunk.index for chunk in chunks] == list(range(len(chunks)))
        assert chunks[0].start == prompt.epochs[epoch].start
        assert all(one.end == two.start for one, two in itertools.pairwise(chunks))


@given(prompts(), st.data())
def test_blocks_have_the_targets_of_a_whole_push(prompt: Prompt, data: st.DataObject) -> None:
    chunks = played(prompt)[-1]
    for group, table in enumerate(prompt.epochs[-1].tables):
        total = chunks[0].groups[group].total
        wanted = data.draw(st.integers(0, total))
        targets = tuple(range(1000, 1000 + wanted))
        alignment = Alignment(total, targets)
        pairs = [
            (block, alignment.targets[index - alignment.skipped])
            for chunk in chunks
            for index, block in enumerate(chunk.groups[group].blocks, chunk.groups[group].first)
            if index >= alignment.skipped
        ]
        assert pairs == vllm_pairs(table[:total], targets)
        assert alignment.skipped == total - wanted


@given(tokens=st.integers(1, 200), size=st.sampled_from([1, 16, 32]), extra=st.integers(1, 40))
def test_decode_steps_add_no_chunks(tokens: int, size: int, extra: int) -> None:
    progress = PromptProgress("p-1", (size,))
    table = table_of(tokens + extra, size)
    assert progress.advance(0, tokens, tokens, [table]) is not None

    assert all(progress.advance(tokens + step, 1, tokens, [table]) is None for step in range(extra))


def test_a_chunk_ends_at_the_end_of_the_prompt() -> None:
    progress = PromptProgress("p-1", (16,))
    chunk = progress.advance(16, 64, 40, [[7, 8, 9, 10, 11]])  # speculative tokens may be scheduled with the prompt

    assert chunk is not None
    assert (chunk.start, chunk.end, chunk.final) == (16, 40, True)
    assert chunk.groups == (GroupSlice(0, (7, 8, 9), 3),)


def test_a_chunk_inside_one_block_completes_none() -> None:
    progress = PromptProgress("p-1", (32,))
    first = progress.advance(0, 10, 50, [[4]])
    second = progress.advance(10, 25, 50, [[4, 5]])
    third = progress.advance(35, 15, 50, [[4, 5]])

    assert [part.groups[0].blocks for part in (first, second, third) if part] == [(), (4,), (5,)]


def test_a_planned_step_is_not_planned_again() -> None:
    progress = PromptProgress("p-1", (16,))
    assert progress.advance(0, 32, 64, [[1, 2]]) is not None
    assert progress.advance(32, 0, 64, [[1, 2]]) is None


def test_discarded_tokens_are_planned_again() -> None:
    progress = PromptProgress("p-1", (16,))
    assert progress.advance(0, 32, 64, [[1, 2]]) is not None
    again = progress.advance(16, 48, 64, [[1, 5, 6, 7]])
    assert again is not None
    assert (again.epoch, again.index, again.groups[0].first, again.groups[0].blocks) == (1, 0, 0, (1, 5, 6, 7))


def test_cached_tokens_are_a_chunk_of_their_own() -> None:
    progress = PromptProgress("p-1", (16, 32))
    tables = [[1, 2, 3, 4, 5], [7, 8, 9]]
    cached, rest = progress.plan_cached(48, 70, tables), progress.advance(48, 64, 70, tables)
    assert cached is not None
    assert rest is not None
    assert [(part.index, part.cached, part.final) for part in (cached, rest)] == [(0, True, False), (1, False, True)]
    assert cached.groups == (GroupSlice(0, (1, 2, 3), 5), GroupSlice(0, (7,), 3))
    assert rest.groups == (GroupSlice(3, (4, 5), 5), GroupSlice(1, (8, 9), 3))


def test_a_resumed_request_may_hit_cached_answer_tokens() -> None:
    """The prompt's last block is full then: it goes with the others."""
    progress = PromptProgress("p-1", (16,))
    cached = progress.plan_cached(48, 20, [[1, 2, 3, 4]])
    assert cached is not None
    assert (cached.final, cached.groups) == (True, (GroupSlice(0, (1, 2), 2),))
    assert progress.advance(48, 3, 20, [[1, 2, 3, 4]]) is None


def test_cached_tokens_of_a_partial_block_wait_for_the_step() -> None:
    progress = PromptProgress("p-1", (64,))
    assert progress.plan_cached(48, 70, [[1, 2]]) is None
    chunk = progress.advance(48, 22, 70, [[1, 2]])
    assert chunk is not None
    assert (chunk.index, chunk.groups) == (0, (GroupSlice(0, (1, 2), 2),))


def test_a_chunk_is_marked_if_its_request_does_not_stream() -> None:
    watched = PromptProgress("p-1", (16,), whole=True).advance(0, 8, 8, [[1]])
    assert watched is not None
    assert watched.whole


def test_every_chunk_has_the_mode_of_its_request() -> None:
    plain, chosen = PromptProgress("p-1", (16,)), PromptProgress("p-2", (16,), mode=PushMode.CHUNK)
    assert [part.mode for part in (plain.advance(0, 32, 64, [[1, 2]]),) if part] == [None]
    chunks = [chosen.advance(start, 32, 64, [[1, 2, 3, 4]]) for start in (0, 32)]
    assert [part.mode for part in chunks if part] == ["chunk", "chunk"]
