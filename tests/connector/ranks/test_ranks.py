"""Every case of ``table.json``: each byte of D's KV cache, the bytes that P sends, and how it sends them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from layerpush.core.write import Write
from layerpush.transport.base import DescriptorIds
from layerpush.transport.link import DirectPlanner, Link
from tests.connector.conftest import LISTENER
from tests.connector.ranks.topology import Case, Topology, cases


@pytest.fixture(scope="module")
def folder(world: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    gc.freeze()  # a run ends with a collection, which need not look at vLLM's modules
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(f"{LISTENER}.WAIT_S", 0.01)  # an engine's shutdown waits so long
        yield tmp_path_factory.mktemp("models")
    gc.unfreeze()


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.row)
def test_every_byte_of_the_kv(case: Case, folder: Path) -> None:
    from tests.connector.ranks.rig import run

    result = run(case.topology, folder)
    assert result.differing == []
    assert result.mode == case.mode, result.reason
    assert case.reason in result.reason
    assert sum(result.sent) == case.copies * result.needed
    assert (result.needed > 0) == (case.mode != "refused")


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
