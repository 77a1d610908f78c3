"""Proxy, messages and trace tools run on every Python that pyproject.toml allows, where there is no engine."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOCK = ROOT / "requirements/cpu.lock"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
VERSIONS = ("3.12", "3.13")
"""The other tests run on 3.11."""
PROXY = ("connection", "dispatch", "hostile", "parts", "server", "streams")
PURE = (
    "claims",
    "load_session",
    "request_params",
    "ring",
    "push_session",
    "trace_breakdown",
    "trace_file",
    "trace_hand_over",
    "trace_perfetto",
    "trace_tools",
    "wire",
    "wire_fuzz",
)
FILES = [*(f"tests/unit/proxy/test_{name}.py" for name in PROXY), *(f"tests/unit/test_{name}.py" for name in PURE)]


def interpreter(version: str) -> str:
    """A Python of this version, from PATH or pyenv. A shim of pyenv may name a version that it does not start."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found = [shutil.which(f"python{version}"), *sorted(map(str, pyenv.glob(f"versions/{version}.*/bin/python")))]
    for path in filter(None, found):
        if subprocess.run([path, "-c", ""], capture_output=True, timeout=30, check=False).returncode == 0:
            return path
    pytest.skip(f"needs Python {version}, and this machine has none")


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("version", VERSIONS)
def test_modules_without_an_engine_work_on_other_pythons(version: str, tmp_path: Path) -> None:
    """A fresh environment has the extra `proxy`, with the versions of the lock, and neither torch nor vLLM."""
    python = str(tmp_path / "fresh/bin/python")
    subprocess.run([interpreter(version), "-m", "venv", tmp_path / "fresh"], check=True, timeout=60)
    wanted = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["proxy"]]
    tools = ["hypothesis", "pytest", "pytest-timeout"]
    versions = tmp_path / "versions.txt"  # pip takes no hashes for packages that are asked for without a version
    versions.write_text("\n".join(re.findall(r"^[\w.-]+==[^ \n]+", LOCK.read_text(), re.MULTILINE)))
    pip = [python, "-m", "pip", "install", "--disable-pip-version-check", "-c", str(versions)]
    done = subprocess.run([*pip, *wanted, *tools], cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    pytest_ = [python, "-m", "pytest", "-q", "--noconftest", "--hypothesis-profile=ci", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "kernels")))}
    environment |= {"PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "200"}
    done = subprocess.run(
        [*pytest_, *FILES], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout
