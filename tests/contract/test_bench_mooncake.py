"""bench.serve's mode `mooncake` with real engines."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.scripts import made_by

ROOT = Path(__file__).parents[2]


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_mooncakes_answers_are_those_of_one_engine(tmp_path: Path) -> None:
    made_by("mooncake")
    words = ["--modes=mooncake", "--lengths=600", "--rounds=2", "--requests=1", "--out", str(tmp_path / "out")]
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
