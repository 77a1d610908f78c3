"""The servers of a demo, and their options."""

from __future__ import annotations

from pathlib import Path

from bench.demo.cluster import DEMO_SHAPE, Cluster


def test_p_and_d_write_their_traces_below_one_directory(tmp_path: Path) -> None:
    """`layerpush trace` reads the whole directory."""
    cluster = Cluster(tmp_path / "model", DEMO_SHAPE, 1024, tmp_path / "trace")
    folders = [Path(str(spec.extra_config["trace_dir"])) for spec in (cluster.prefill(), cluster.decode())]
    assert folders == [tmp_path / "trace" / name for name in ("prefill", "decode")]
    assert folders == [cluster.trace_dir(name) for name in ("prefill", "decode")], "the demo looks for pushes there"


def test_p_pushes_in_the_mode_of_the_request(tmp_path: Path) -> None:
    """One P serves all modes, so its configuration names none."""
    cluster = Cluster(tmp_path / "model", DEMO_SHAPE, 1024, tmp_path / "trace")
    assert {*cluster.prefill().extra_config} == {"trace_dir"}
