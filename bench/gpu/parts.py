"""The parts, and the commands of each. Pure."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from bench.forward.links import CUDA_IPC_TRANSPORTS

PARTS = {
    "kernels": "the gather and checksums: their tests on the GPU, then GB/s beside a plain copy",
    "serve": "vLLM engines on the GPU with a random model of Llama-3.2-3B's geometry: first token, by prompt length",
    "forward": "two processes on the GPU over CUDA IPC: the cost of pushes for a forward pass, and the exposed time",
}
"""The most valuable part is first: a user with a GPU for a short time gets its figures."""
MIB = 1 << 20


class TooSmallError(ValueError):
    """The GPU's memory is too small for a part."""


@dataclass(frozen=True)
class Step:
    """One command: ``arguments`` of the interpreter. A part ends with the first step that fails."""

    name: str
    arguments: tuple[str, ...]

    def __str__(self) -> str:
        return shlex.join(self.arguments)


@dataclass(frozen=True)
class Room:
    """Room for engines: memory of the GPU, and a folder for a model of 7 GB."""

    gpu_mib: int
    model: Path


@dataclass(frozen=True)
class EnginesPerGpu:
    """``count`` engines beside each other, the longest prompts they have room for, and their KV cache."""

    modes: str
    count: int
    lengths: tuple[int, ...]
    kv_bytes: int


MODEL_BYTES = 6_890 * MIB
OVERHEAD_BYTES = 3_000 * MIB
"""Memory of an engine beside weights and KV: CUDA's context, activations of a step, fragmentation."""
KV_BYTES_PER_TOKEN = 2 * 28 * 8 * 128 * 2
"""K and V of 28 layers, 8 heads of 128 in bf16."""
PROMPTS_IN_CACHE = 1.25
"""Room for the next prompt before the blocks of the last one are free."""
USABLE = 0.94
"""Share of the GPU's memory that engines may use."""
LONG = 32768
LENGTHS = (4096, 8192, 16384, 32768, 65536)
ANSWER_ROOM = 1024
STEP_TOKENS = 8192
BY_LAYER = ("auto", "token")
LINEUPS = (("pull,push,request,auto", 8), ("push,request,auto", 6), ("request,auto", 4))
"""Modes side by side, and their engines: the aggregated one, P of each mode, D of each stock mode, layerpush's D."""


def engines_for(gpu_mib: int) -> list[EnginesPerGpu]:
    """The runs of engines: the first of ``LINEUPS`` with room for prompts of 32k tokens, else layerpush's modes alone.

    Side by side their answers are compared. Alone, those of ``token`` are compared with the aggregated engine's. Each
    run also has the aggregated engine and layerpush's D. Raises ``TooSmallError``.
    """
    for modes, count in LINEUPS:
        together = _engines(modes, count, gpu_mib)
        if together and together.lengths[-1] >= LONG:
            return [together]
    alone = [engines for mode in ("token", "request") if (engines := _engines(mode, 3, gpu_mib)) is not None]
    if not alone:
        needed = 3 * (MODEL_BYTES + OVERHEAD_BYTES) // MIB + 3000
        raise TooSmallError(f"serve: three engines with 3B parameters take some {needed} MiB, the GPU has {gpu_mib}")
    return alone


def _engines(modes: str, count: int, gpu_mib: int) -> EnginesPerGpu | None:
    each = int(USABLE * gpu_mib * MIB) // count - MODEL_BYTES - OVERHEAD_BYTES
    tokens = int(each / KV_BYTES_PER_TOKEN / PROMPTS_IN_CACHE) - ANSWER_ROOM
    lengths = tuple(length for length in LENGTHS if length <= tokens)
    return EnginesPerGpu(modes, count, lengths, each) if lengths else None


def _kernels(out: Path, _: Room) -> list[Step]:
    tests = (
        "-m",
        "pytest",
        "tests/unit/kernels",
        "tests/unit/test_fences.py",
        "tests/unit/test_staging_memory.py",
        "-m",
        "gpu",
        "-q",
        "-p",
        "no:cacheprovider",
    )
    bench = ("-m", "bench.kernel", "--device", "cuda", "--out", str(out / "kernel.json"))
    return [Step("tests", tests), Step("bench", bench)]


def _forward(out: Path, _: Room) -> list[Step]:
    bench = ("-m", "bench.forward", "--device", "cuda", "--links", "cuda_ipc", "--progress", "spin")
    return [
        Step("quick", (*bench, "--quick", "--out", str(out / "forward-quick.json"))),
        Step("bench", (*bench, "--out", str(out / "forward.json"))),
    ]


def _serve(out: Path, room: Room) -> list[Step]:
    """Engines, and a check of their hooks."""
    runs = engines_for(room.gpu_mib)
    steps = [Step("model", ("-m", "bench.gpu.model", "--out", str(room.model)))]
    for engines in runs:
        name = "serve" if len(runs) == 1 else f"serve-{engines.modes}"
        result, logs = out / f"{name}.json", out / f"{name}-logs"
        steps.append(Step(name, _measure(engines, room.model, result, logs)))
        traces = logs / f"loopback-b{STEP_TOKENS}" / "trace"
        by_layer = [str(traces / mode) for mode in engines.modes.split(",") if mode in BY_LAYER]
        if by_layer:
            steps.append(Step(f"{name}-hooks", ("-m", "bench.gpu.hooks", *by_layer)))
    return steps


def _measure(engines: EnginesPerGpu, model: Path, result: Path, logs: Path) -> tuple[str, ...]:
    """The KV cache has a fixed size, because engines that start side by side cannot measure free memory.

    The answers are greedy: they need no FlashInfer, which an environment may lack.
    """
    arguments = (
        "--dtype bfloat16",
        f"--kv-cache-memory-bytes {engines.kv_bytes}",
        f"--gpu-memory-utilization {0.9 / engines.count:.2f}",
        "--no-enforce-eager",
    )
    return (
        *("-m", "bench.serve", "--model", str(model), "--modes", engines.modes, "--compare", "shapes"),
        *("--lengths", ",".join(map(str, engines.lengths)), "--rounds", "3", "--requests", "2"),
        *("--max-num-batched-tokens", str(STEP_TOKENS), "--engine-args", " ".join(arguments)),
        *("--engine-env", f"UCX_TLS={CUDA_IPC_TRANSPORTS}", "--engine-env", "LAYERPUSH_CALM=0"),
        *("--engine-env", "VLLM_USE_FLASHINFER_SAMPLER=0"),
        *("--out", str(result), "--keep-logs", str(logs)),
    )


def steps_of(part: str, out: Path, room: Room) -> list[Step]:
    """The commands of a part."""
    return {"kernels": _kernels, "serve": _serve, "forward": _forward}[part](out, room)
