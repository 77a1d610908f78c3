"""bench.serve's mode `mooncake` with real engines."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOT_HERE = 3
"""The exit status of `scripts/mooncake` where a package index lacks a package."""


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_mooncakes_answers_are_those_of_one_engine(tmp_path: Path) -> None:
    made = subprocess.run([ROOT / "scripts/mooncake"], capture_output=True, text=True, check=False)
    if made.returncode == NOT_HERE:
        pytest.skip(f"there is no Mooncake here: {made.stderr.strip()}")
    assert made.returncode == 0, made.stderr
    words = [
        "--modes",
        "mooncake",
        "--lengths",
        "600",
        "--rounds",
        "2",
        "--requests",
        "1",
        "--out",
        str(tmp_path / "out"),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "bench.serve", *words, "--keep-logs", str(tmp_path / "logs")],
        cwd=ROOT, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "out").read_text())
    assert result["answers"]["compared"] == 2
    assert result["versions"]["mooncake-transfer-engine-non-cuda"]
    (p,) = (tmp_path / "logs").glob("*/mooncake-prefill.log")
    assert "Num successful transfers=" in p.read_text(), "the answers came from Mooncake's transfers"
