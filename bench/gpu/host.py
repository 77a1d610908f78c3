"""The host's GPU, and the environment of all steps."""

from __future__ import annotations

import importlib.metadata
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path

import layerpush
from bench import ROOT
from bench.forward.links import ALLOCATOR_VARIABLES
from bench.machine import machine

GROUP, PLUGIN = "vllm.general_plugins", "layerpush"


class GpuHostError(RuntimeError):
    """This host lacks something; the text names it and the cure."""


def gpu_mib() -> int:
    """Memory of the first GPU in MiB. Raises ``GpuHostError`` without a GPU that torch can use."""
    gpus = machine().get("gpus")
    if not isinstance(gpus, list) or not gpus:
        raise GpuHostError(
            "no GPU here: nvidia-smi is not there, or shows none. scripts/gpu-bench needs one NVIDIA GPU."
        )
    import torch

    if not torch.cuda.is_available():
        raise GpuHostError(
            f"nvidia-smi shows {gpus[0]['name']}, but torch {torch.__version__} cannot use it: PYTHON=... chooses an "
            "interpreter with a CUDA build of torch that fits the driver"
        )
    return int(gpus[0]["memory_mib"])


def environment(inherited: Mapping[str, str], plugin: Path) -> dict[str, str]:
    """The environment of every step: this checkout's code, offline, no variable that prevents sharing of GPU memory.

    ``plugin`` is a folder for metadata, by which vLLM finds layerpush if it is not installed.
    """
    kept = {name: value for name, value in inherited.items() if name not in ALLOCATOR_VARIABLES}
    paths = [str(ROOT), str(ROOT / "kernels"), *_plugin_path(plugin), *filter(None, [inherited.get("PYTHONPATH")])]
    return kept | {
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }


def _plugin_path(folder: Path) -> list[str]:
    """vLLM finds plugins by the metadata of installed packages. An interpreter that lacks ours gets a copy of it."""
    if importlib.metadata.entry_points(group=GROUP, name=PLUGIN):
        return []
    write_metadata(folder)
    return [str(folder)]


def write_metadata(folder: Path) -> None:
    """Write the metadata that ``pip install`` would write for layerpush, without its list of files."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    points = project["entry-points"][GROUP]
    information = folder / f"{project['name']}-{layerpush.__version__}.dist-info"
    information.mkdir(parents=True, exist_ok=True)
    head = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {layerpush.__version__}\n"
    (information / "METADATA").write_text(head)
    lines = "".join(f"{name} = {value}\n" for name, value in points.items())
    (information / "entry_points.txt").write_text(f"[{GROUP}]\n{lines}")
