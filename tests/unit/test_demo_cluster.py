"""The servers of a demo: what each is told."""

from __future__ import annotations

from pathlib import Path

from layerpush.apps.demo.cluster import DEMO_SHAPE, MODES, Cluster


def test_every_p_and_d_leaves_a_trace_of_its_own(tmp_path: Path) -> None:
    """Below one directory, which `layerpush trace` reads as a whole."""
    cluster = Cluster(tmp_path / "model", DEMO_SHAPE, 1024, tmp_path / "trace")
    specs = [cluster.decode(), *(cluster.prefill(mode) for mode in MODES)]
    folders = [Path(str(spec.extra_config["trace_dir"])) for spec in specs]
    assert len(set(folders)) == len(specs)
    assert {folder.parent for folder in folders} == {tmp_path / "trace"}
    assert [cluster.trace_dir(mode) for mode in MODES] == folders[1:], "where the demo looks for pushes"
