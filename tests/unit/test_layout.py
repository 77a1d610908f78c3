"""Layers to regions to descriptor ids, for the shapes of cache that engines register."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerpush.core.layout import (
    LayerCache,
    LayerSlots,
    LayoutError,
    Region,
    RowPart,
    States,
    descriptor_ids,
    descriptor_offsets,
    kernel_ids,
    match_layers,
    named_layers,
)

BLOCKS, PAGE = 10, 64
SPAN = BLOCKS * PAGE


def own_regions(count: int, bytes_each: int = PAGE) -> list[Region]:
    return [Region(0x1000 + index * SPAN, bytes_each, BLOCKS) for index in range(count)]


def cache(index: int, group: int = 0, page: int = PAGE, start: int | None = None) -> LayerCache:
    return LayerCache(f"layers.{index}", group, 0x1000 + index * SPAN if start is None else start, SPAN, page)


def test_every_layer_has_its_own_region() -> None:
    layout = match_layers([cache(index) for index in range(3)], own_regions(3))

    assert [layer.slots for layer in layout.layers] == [(0,), (1,), (2,)]
    assert layout.index_of == {"layers.0": 0, "layers.1": 1, "layers.2": 2}
    assert layout.layer_bytes == (PAGE,) * 3
    assert layout.region_blocks == (BLOCKS,) * 3


def test_slots_are_ordered_by_address_and_layers_keep_their_order() -> None:
    layout = match_layers([cache(2), cache(0), cache(1)], own_regions(3))
    assert [(layer.name, layer.slots) for layer in layout.layers] == [
        ("layers.2", (2,)),
        ("layers.0", (0,)),
        ("layers.1", (1,)),
    ]


def test_layers_of_two_groups_may_share_a_region() -> None:
    """A hybrid model: the same memory holds a full-attention layer's blocks and a sliding-window layer's."""
    shared = [cache(0, 0, start=0x1000), cache(1, 1, start=0x1000), cache(2, 0, start=0x1000 + SPAN)]
    layout = match_layers(shared, own_regions(2))

    assert [(layer.group, layer.slots) for layer in layout.layers] == [(0, (0,)), (1, (0,)), (0, (1,))]


def test_keys_and_values_may_lie_in_two_regions() -> None:
    halves = [Region(0x1000, PAGE // 2, BLOCKS), Region(0x1000 + SPAN // 2, PAGE // 2, BLOCKS)]
    layout = match_layers([cache(0)], halves)

    assert layout.layers[0].slots == (0, 1)
    assert layout.layer_bytes == (PAGE,)


def test_a_page_may_be_several_kernel_blocks() -> None:
    layout = match_layers([cache(0)], own_regions(1), kernel_blocks=4)
    assert layout.layer_bytes == (4 * PAGE,)
    assert layout.layers[0].kernel_blocks == 4


def test_states_come_after_attention_and_share_its_memory() -> None:
    """Two regions: attention and a state share the first, the second holds states only."""
    attention = own_regions(2)
    parts = [Region(region.base + offset, 8, 4) for region in attention for offset in (0, 8)]
    states = States((LayerSlots("s.0", 1, (2, 3)), LayerSlots("s.1", 1, (4, 5))), tuple(parts))
    layout = match_layers([cache(0)], attention, 4, states)

    assert [(layer.name, layer.slots) for layer in layout.layers] == [
        ("layers.0", (0,)),
        ("s.0", (2, 3)),
        ("s.1", (4, 5)),
    ]
    assert layout.layer_bytes == (4 * PAGE, 16, 16)
    assert layout.region_blocks == (BLOCKS, BLOCKS, 4, 4, 4, 4)
    assert [layer.kernel_blocks for layer in layout.layers] == [4, 1, 1]
    with pytest.raises(LayoutError, match=r"regions \[1, 4, 5\] belong to no known layer"):
        match_layers([cache(0)], attention, 4, States(states.layers[:1], states.regions))


def in_row(index: int, offset: int, row: int, page: int = PAGE, runs: tuple[int, ...] = (0,)) -> LayerCache:
    """A layer whose pages are parts of rows of ``row`` bytes."""
    return LayerCache(f"layers.{index}", 0, 0x1000 + offset, BLOCKS * row - offset, page, row, runs)


def test_layers_may_share_rows_and_differ_in_size() -> None:
    row = 2 * PAGE + 16
    caches = [in_row(0, 0, row), in_row(1, PAGE, row, 8), in_row(2, PAGE + 8, row)]
    layout = match_layers(caches, [Region(0x1000, row, BLOCKS)])

    assert layout.layer_bytes == (PAGE, 8, PAGE)
    assert [layout.regions[layer.slots[0]] for layer in layout.layers] == [
        Region(0x1000, PAGE, BLOCKS, row - PAGE),
        Region(0x1000 + PAGE, 8, BLOCKS, row - 8),
        Region(0x1000 + PAGE + 8, PAGE, BLOCKS, row - PAGE),
    ]
    assert [layout.parts[layer.slots[0]] for layer in layout.layers] == [
        RowPart(0, 0, row),
        RowPart(0, PAGE, row),
        RowPart(0, PAGE + 8, row),
    ]
    assert layout.has_gaps
    assert not match_layers([cache(0)], own_regions(1)).has_gaps


def test_rows_beside_a_state_are_not_cut() -> None:
    states = States((LayerSlots("s.0", 1, (1,)),), (Region(0x1000, 8, 4),))
    with pytest.raises(LayoutError, match="layers with a state lie in rows of several layers"):
        match_layers([in_row(0, 0, 128)], [Region(0x1000, 128, BLOCKS)], states=states)


def test_a_layers_heads_may_be_apart_in_a_row() -> None:
    """BHLNC with two layers: each head of all layers, then the next."""
    caches = [in_row(layer, layer * 32, 128, PAGE, (0, 64)) for layer in range(2)]
    layout = match_layers(caches, [Region(0x1000, 128, BLOCKS)])

    found = [[layout.regions[slot].base - 0x1000 for slot in layer.slots] for layer in layout.layers]
    assert found == [[0, 64], [32, 96]]
    assert {(region.block_bytes, region.stride) for region in layout.regions} == {(32, 128)}
    assert layout.layer_bytes == (PAGE, PAGE)


def test_rows_beside_regions_of_their_own() -> None:
    """The slots are those of the registered regions, each in the place of its row."""
    caches = [cache(0), in_row(1, SPAN, 2 * PAGE), in_row(2, SPAN + PAGE, 2 * PAGE)]
    layout = match_layers(caches, [*own_regions(1), Region(0x1000 + SPAN, 2 * PAGE, BLOCKS)])

    assert [layer.slots for layer in layout.layers] == [(0,), (1,), (2,)]
    assert [part.row for part in layout.parts] == [0, 1, 1]


MIDDLE = cache(1, start=0x1000 + PAGE)


@pytest.mark.parametrize(
    ("caches", "regions", "error"),
    [
        ([cache(0), MIDDLE], [Region(0x1000, PAGE * 4, BLOCKS)], r"layers.0 has pages of 64 bytes .* \[0\] hold 256"),
        ([cache(0), MIDDLE], [Region(0x1000, PAGE * 2, BLOCKS)], r"layers.0 has pages of 64 bytes .* \[0\] hold 128"),
        ([MIDDLE], [Region(0x1000, PAGE * 2, BLOCKS)], r"layers.1 at 0x1040 lies in no registered region"),
        ([in_row(0, PAGE, 128, 65)], [Region(0x1000, 128, BLOCKS)], "lies in no registered region"),
        ([in_row(0, 0, 129)], [Region(0x1000, 128, BLOCKS)], r"layers.0 has pages of 64 bytes .* \[0\] hold 128"),
        ([in_row(0, 0, 192, 64, (0, 64, 128))], [Region(0x1000, 192, BLOCKS)], r"\[0\] hold 192"),
        ([in_row(0, 0, 128)], [Region(0x1000, 128, BLOCKS), *own_regions(2)[1:]], r"regions \[1\] belong to no known"),
        ([cache(0)], own_regions(2), r"regions \[1\] belong to no known layer"),
        ([cache(0)], own_regions(1, PAGE // 2), "hold 32 bytes a block"),
        ([], [], "no layer"),
    ],
    ids=[
        "a row of four layers",
        "a row of two",
        "the middle of a row",
        "the end of a row",
        "other strides",
        "odd runs",
        "a row and a region of nobody",
        "a region of nobody",
        "too small",
        "no layer",
    ],
)
def test_regions_that_do_not_match_the_layers_are_refused(
    caches: list[LayerCache], regions: list[Region], error: str
) -> None:
    with pytest.raises(LayoutError, match=error):
        match_layers(caches, regions)


def test_named_layers_keep_the_order_of_their_names() -> None:
    layout = named_layers(["b", "a"], [0, 1], own_regions(2))
    assert layout.layers == (LayerSlots("b", 0, (0,)), LayerSlots("a", 1, (1,)))
    with pytest.raises(LayoutError, match="2 layer names, 1 groups and 2 regions"):
        named_layers(["b", "a"], [0], own_regions(2))


@given(
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=6),
    data=st.data(),
)
def test_ids_are_region_major(sizes: list[int], data: st.DataObject) -> None:
    """Compared with a count one by one. Regions may have different block counts."""
    numbers: dict[tuple[int, int], int] = {}
    for slot, count in enumerate(sizes):
        for block in range(count):
            numbers[slot, block] = len(numbers)
    slots = data.draw(st.lists(st.integers(0, len(sizes) - 1), min_size=1, max_size=4))
    blocks = data.draw(st.lists(st.integers(0, min(sizes[slot] for slot in slots) - 1), max_size=8))

    ids = descriptor_ids(descriptor_offsets(sizes), slots, np.asarray(blocks, dtype=np.int32))

    assert ids.dtype == np.int32
    assert ids.tolist() == [numbers[slot, block] for slot in slots for block in blocks]


@given(blocks=st.lists(st.integers(0, 500), max_size=20), per_page=st.integers(1, 5))
def test_a_block_is_its_kernel_blocks(blocks: list[int], per_page: int) -> None:
    expanded = kernel_ids(tuple(blocks), per_page)

    assert expanded.dtype == np.int32
    assert expanded.tolist() == [block * per_page + part for block in blocks for part in range(per_page)]


def test_the_largest_descriptor_id_is_correct() -> None:
    offsets = descriptor_offsets([1 << 30, (1 << 30) - 1, 1])
    assert descriptor_ids(offsets, [2], np.asarray([0], np.int32)).tolist() == [(1 << 31) - 1]


def test_more_descriptors_than_int32_can_number_are_refused() -> None:
    """Ids are int32: an overflow would name another layer's block, or none."""
    with pytest.raises(LayoutError, match="2147483648"):
        descriptor_offsets([1 << 30, 1 << 30, 1])
