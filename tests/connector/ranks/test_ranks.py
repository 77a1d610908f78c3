"""Every case of ``table.json``: each byte of D's KV cache, the bytes that P sends, and how it sends them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from layerpush.core.write import Write
from layerpush.transport.base import DescriptorIds
from layerpush.transport.link import DirectPlanner, Link
from tests.connector.conftest import LISTENER, RETRY
from tests.connector.ranks.topology import DRAFT_TOKENS, Case, Side, Topology, cases


@pytest.fixture(scope="module")
def folder(world: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a second one would only spin
    gc.freeze()  # a run ends with a collection, which need not look at vLLM's modules
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("VLLM_SSM_CONV_STATE_LAYOUT", "DS")  # vLLM transfers no other
        patched.setattr(f"{LISTENER}.WAIT_S", 0.01)  # an engine's shutdown waits so long
        patched.setattr(RETRY, 0.1)
        yield tmp_path_factory.mktemp("models")
    gc.unfreeze()
    torch.set_num_threads(threads)


CASES = [pytest.param(case, id=case.row, marks=pytest.mark.exhaustive if case.exhaustive else ()) for case in cases()]
SIDES = st.builds(
    Side,
    tp=st.sampled_from([1, 2, 4]),
    pp=st.sampled_from([1, 1, 2]),
    dp=st.sampled_from([1, 1, 2]),
    block_size=st.sampled_from([32, 32, 64, 96, 128]),
    layout=st.sampled_from(["LBHNC", "LBHNC", "BLHNC", "LBNHC", "BLNHC", "BHLNC"]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)


@pytest.mark.parametrize("case", CASES)
def test_every_byte_of_the_kv(case: Case, folder: Path) -> None:
    from tests.connector.ranks.rig import run

    result = run(case.topology, folder)
    assert result.differing == []
    assert result.mode == case.mode, result.reason
    assert case.reason in result.reason
    assert sum(result.sent) == case.copies * result.needed + (result.repeated if case.copies else 0)
    assert (result.needed > 0) == (case.mode != "refused")
    p, d = case.topology.p, case.topology.d
    by_vllm = p.stock or (case.mode == "whole" and p.block_size == d.block_size)
    assert (result.verified > 0) == (case.mode != "refused" and not by_vllm and not d.stock)


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)  # the examples together
@settings(max_examples=100, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_pair_of_engines_is_right_or_refused(folder: Path, data: st.DataObject) -> None:
    from tests.connector.ranks.rig import run

    p = replace(data.draw(SIDES), layerwise=data.draw(st.sampled_from([True, True, True, False])))
    alike = data.draw(st.booleans())  # two independent sides are mostly refused
    d = replace(data.draw(SIDES), **({"layout": p.layout, "dtype": p.dtype, "pp": 1} if alike else {}))
    d = replace(d, stock=data.draw(st.sampled_from([False, False, True])))  # a stock P that refuses never ends
    if alike and data.draw(st.booleans()):
        d = replace(d, block_size=p.block_size)
    kind = data.draw(st.sampled_from(["full", "window", "mixed", "mla", "indexer", "states", "gdn", "mla-gdn"]))
    if kind in ("mla", "indexer"):
        p = replace(p, pcp=data.draw(st.sampled_from([1, 1, 2])))
    if kind in ("mla", "indexer") and p.layout.startswith("B"):
        p, d = replace(p, block_size=16), replace(d, block_size=16)  # vLLM splits no block of such rows
    if kind == "mla-gdn":  # a state does not fit into a smaller block of latents
        p, d = (replace(side, block_size=max(64, side.block_size)) for side in (p, d))
    tokens = data.draw(st.integers(1, 300))
    cached, heads = data.draw(st.integers(0, tokens - 1)), data.draw(st.sampled_from([2, 4, 8]))
    drafter = data.draw(st.sampled_from([None, None, "heads", "latents"]))
    if drafter == "latents" and kind not in ("mla", "indexer", "mla-gdn"):
        drafter = "heads"
    drafts = 0
    if kind in ("states", "gdn", "mla-gdn"):
        drafts = DRAFT_TOKENS if drafter else data.draw(st.sampled_from([0, DRAFT_TOKENS]))
    topology = Topology(kind, p, d, heads, tokens, cached, drafts=drafts, drafter=drafter)
    result = run(topology, folder)
    assert result.differing == []
    assert result.mode != "refused" or result.reason


TWO, FOUR, OF_64 = Side(tp=2), Side(tp=4), Side(block_size=64)
HALVES = (
    (Topology(p=TWO, d=OF_64), 64),  # D's second block has landed in part
    (Topology("mla", Side(tp=2, block_size=64), cached=32), 64),  # each rank of P sends some of the blocks
    (Topology("mixed"), 0),
    (Topology(d=TWO), 96),
    (Topology(p=TWO, d=FOUR, cached=64), 96),
    (Topology(heads=2, p=FOUR), 96),
    (Topology(p=OF_64), 64),
    (Topology(p=Side(block_size=64), d=Side(block_size=96)), 0),
    (Topology(p=Side(block_size=96), d=Side(block_size=64)), 64),
    (Topology(p=TWO, d=Side(tp=4, block_size=64)), 64),
    (Topology(p=Side(pp=2), d=TWO), 96),
    (Topology("mla", Side(tp=4), TWO), 96),
    (Topology("mla", Side(pcp=2, tp=2)), 96),
    (Topology("indexer", TWO), 96),
    (Topology("mla", *[Side(block_size=16, layout="BLHNC")] * 2), 96),
    (Topology(p=Side(layout="BLNHC", block_size=64), d=Side(layout="BLNHC")), 64),
)


@pytest.mark.parametrize(
    ("topology", "kept"),
    [pytest.param(*half, marks=() if index < 4 else pytest.mark.exhaustive) for index, half in enumerate(HALVES)],
    ids=str,
)
def test_what_has_landed_is_kept_in_whole_blocks(topology: Topology, kept: int, folder: Path) -> None:
    """P sends the rest only, when the prompt comes again. All of D's KV is right."""
    from tests.connector.ranks.rig import run

    result = run(replace(topology, steps=1), folder)
    assert result.differing == []
    assert (result.mode, result.kept) == ("by layer", kept), result.reason
    assert sum(result.sent) == result.needed > 0


@pytest.fixture
def unverified(monkeypatch: pytest.MonkeyPatch) -> None:
    """D compares nothing with P's checksums: its load would fail."""
    from tests.connector.ranks import rig

    monkeypatch.setattr(rig, "LAYERPUSH", rig.LAYERPUSH | {"verify": 0})


PAIRS = {
    "alike": Topology(),
    "MLA, more ranks on P": Topology("mla", Side(tp=2)),
    "larger blocks on D, more ranks on P": Topology(p=Side(tp=2), d=Side(block_size=64)),
    "larger blocks on P, more ranks on D": Topology(p=Side(block_size=64), d=Side(tp=2)),
}


@pytest.mark.parametrize("topology", PAIRS.values(), ids=PAIRS)
def test_blocks_in_wrong_places_fail_the_load(
    topology: Topology, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.connector.ranks.rig import run

    right = DirectPlanner.descriptors

    def wrong(self: DirectPlanner, write: Write, link: Link) -> tuple[DescriptorIds, DescriptorIds]:
        local, remote = right(self, write, link)
        return local, np.roll(remote, 1)

    monkeypatch.setattr(DirectPlanner, "descriptors", wrong)
    result = run(topology, folder)
    assert result.mode == "refused"
    assert "is not what it has sent: layer model.layers." in result.reason


@pytest.mark.usefixtures("unverified")
@pytest.mark.parametrize("fault", ["blocks change places", "a block of nobody is written"])
def test_wrong_descriptors_are_seen(fault: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.connector.ranks.rig import run

    right = DirectPlanner.descriptors

    def wrong(self: DirectPlanner, write: Write, link: Link) -> tuple[DescriptorIds, DescriptorIds]:
        local, remote = right(self, write, link)
        if fault == "blocks change places":
            return local, np.roll(remote, 1)
        return np.append(local, local[:1]), np.append(remote, np.zeros_like(remote[:1]))

    monkeypatch.setattr(DirectPlanner, "descriptors", wrong)
    assert run(Topology(), folder).differing != []


def test_d_learns_of_the_rank_that_fails(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of P's ranks sends some of the blocks. A WRITE of the second one ends with an error."""
    from tests.connector.ranks import rig

    agents: list[Any] = []
    spoiled: set[int] = set()

    class Failing(rig.Agent):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            agents.append(self)

        def _counted(self, handle: Any, state: str) -> str:
            state = super()._counted(handle, state)
            if state != "DONE" or self is not agents[1] or len(spoiled | {id(handle)}) > 1:
                return state
            spoiled.add(id(handle))
            return "ERR"

    monkeypatch.setattr(rig, "Agent", Failing)
    result = rig.run(Topology("mla", Side(tp=2)), folder)
    assert (result.mode, result.differing) == ("refused", [])
    assert result.sent[0] > 0
    assert "a WRITE" in result.reason


ROWS = Topology("mla", *[Side(block_size=16, layout="BLHNC")] * 2)


@pytest.mark.usefixtures("unverified")
def test_a_layer_at_the_place_of_another_is_seen(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from layerpush.compat import pieces
    from tests.connector.ranks.rig import run

    right = pieces._parts
    monkeypatch.setattr(pieces, "_parts", lambda *row: [*right(*row)[1:], right(*row)[0]])
    assert run(ROWS, folder).differing != []


def test_mla_in_rows_on_d_only(folder: Path) -> None:
    from vllm import __version__

    from tests.connector.ranks.rig import run

    result = run(replace(ROWS, p=Side(block_size=16)), folder)
    assert (result.mode, result.differing) == ("refused" if __version__.startswith("0.32") else "by layer", [])


def test_parts_of_rows_are_gathered(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from layerpush.transport.gather.gatherer import Gatherer
    from tests.connector.ranks import rig

    staged, gather = [], Gatherer.gather
    monkeypatch.setattr(Gatherer, "gather", lambda *write: staged.append(gather(*write)) or staged[-1])
    monkeypatch.setattr(rig, "LAYERPUSH", rig.LAYERPUSH | {"packing": "gather"})
    result = rig.run(ROWS, folder)
    assert (result.mode, result.differing) == ("by layer", [])
    assert staged
    assert all(staged)


@pytest.mark.parametrize("topology", [ROWS, Topology(p=Side(block_size=64))], ids=["rows", "pieces"])
def test_lists_of_descriptors_are_released(topology: Topology, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.connector.ranks import rig

    prepared, released = [], []

    class Counting(rig.Agent):
        def prep_xfer_dlist(self, *args: Any, **kwargs: Any) -> Any:
            prepared.append(super().prep_xfer_dlist(*args, **kwargs))
            return prepared[-1]

        def release_dlist_handle(self, handle: Any) -> None:
            released.append(handle)
            super().release_dlist_handle(handle)

    monkeypatch.setattr(rig, "Agent", Counting)
    assert rig.run(topology, folder).mode == "by layer"
    assert sorted(map(id, released)) == sorted(map(id, prepared))
