"""WRITEs to descriptor pairs, against one pair at a time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerpush.core.layout import CacheLayout, LayerSlots, Region
from layerpush.core.write import Segment, Write
from layerpush.transport.link import DirectPlanner, Link


@st.composite
def cases(draw: st.DrawFn) -> tuple[CacheLayout, tuple[int, ...], Write]:
    """A layout (some layers in two regions, some regions shared), another engine's region sizes, a WRITE."""
    per_page = draw(st.sampled_from([1, 1, 2, 4]))
    slots = draw(st.integers(1, 6))
    local = [draw(st.integers(2, 30)) * per_page for _ in range(slots)]
    remote = tuple(draw(st.integers(2, 30)) * per_page for _ in range(slots))
    layers = tuple(
        LayerSlots(
            f"layers.{index}",
            0,
            tuple(draw(st.lists(st.integers(0, slots - 1), min_size=1, max_size=2, unique=True))),
            per_page,
        )
        for index in range(draw(st.integers(1, 5)))
    )
    layout = CacheLayout(layers, tuple(Region(index, 8, count) for index, count in enumerate(local)))
    segments = []
    for _ in range(draw(st.integers(1, 3))):
        first = draw(st.integers(0, len(layers) - 1))
        picked = slice(first, draw(st.integers(first + 1, len(layers))))
        touched = {slot for layer in layers[picked] for slot in layer.slots}
        count = draw(st.integers(0, 5))
        source = tuple(draw(st.integers(0, min(local[slot] for slot in touched) // per_page - 1)) for _ in range(count))
        target = tuple(
            draw(st.integers(0, min(remote[slot] for slot in touched) // per_page - 1)) for _ in range(count)
        )
        segments.append(Segment(picked, 0, 0, count, source, target))
    return layout, remote, Write(0, 0, 0, 1, tuple(segments))


@given(cases())
def test_descriptor_pairs_match_a_brute_force_count(case: tuple[CacheLayout, tuple[int, ...], Write]) -> None:
    layout, remote, write = case
    expected = []
    for part in write.segments:
        for layer in layout.layers[part.layers]:
            for slot in layer.slots:
                for source, target in zip(part.source, part.target, strict=True):
                    for inner in range(layer.kernel_blocks):
                        here = sum(layout.region_blocks[:slot]) + source * layer.kernel_blocks + inner
                        there = sum(remote[:slot]) + target * layer.kernel_blocks + inner
                        expected.append((here, there))

    ours, theirs = DirectPlanner(layout).descriptors(write, Link("D", (), remote))

    assert list(zip(ours.tolist(), theirs.tolist(), strict=True)) == expected


def test_a_state_has_no_kernel_blocks() -> None:
    layers = (LayerSlots("a", 0, (0,), 4), LayerSlots("s", 1, (1, 2)))
    layout = CacheLayout(layers, (Region(0, 8, 8), Region(0, 2, 2), Region(2, 6, 2)))
    write = Write(0, 0, 0, 1, (Segment(slice(0, 1), 0, 0, 1, (1,), (0,)), Segment(slice(1, 2), 1, 0, 1, (1,), (2,))))
    ours, theirs = DirectPlanner(layout).descriptors(write, Link("D", (), (12, 3, 3)))
    assert ours.tolist() == [4, 5, 6, 7, 9, 11]
    assert theirs.tolist() == [0, 1, 2, 3, 14, 17]


@given(cases())
def test_descriptor_ids_are_contiguous_int32(case: tuple[CacheLayout, tuple[int, ...], Write]) -> None:
    layout, remote, write = case
    for ids in DirectPlanner(layout).descriptors(write, Link("D", (), remote)):
        assert ids.dtype.name == "int32"
        assert ids.flags.c_contiguous


def test_several_decode_engines_have_their_own_offsets() -> None:
    layout = CacheLayout((LayerSlots("a", 0, (0,)), LayerSlots("b", 0, (1,))), (Region(0, 8, 10), Region(80, 8, 10)))
    write = Write(0, 0, 0, 8, (Segment(slice(1, 2), 0, 0, 1, (3,), (4,)),))
    planner = DirectPlanner(layout)

    small, large = Link("D1", (), (5, 5)), Link("D2", (), (100, 100))

    assert [planner.descriptors(write, link)[1].tolist() for link in (small, large, small)] == [[9], [104], [9]]


@pytest.mark.parametrize(("source", "target"), [(3, 5), (10, 2), (3, -1), (-1, 2)])
def test_a_block_outside_a_region_is_refused(source: int, target: int) -> None:
    """Unchecked, its id would be that of another layer's block."""
    layout = CacheLayout((LayerSlots("a", 0, (0,)), LayerSlots("b", 0, (1,))), (Region(0, 8, 10), Region(80, 8, 10)))
    write = Write(0, 0, 0, 8, (Segment(slice(0, 1), 0, 0, 1, (source,), (target,)),))
    with pytest.raises(LookupError):
        DirectPlanner(layout).descriptors(write, Link("D", (), (5, 5)))
