"""scripts/gpu-bench: its commands, its time limits, and its messages without a GPU."""

from __future__ import annotations

import importlib.metadata
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from bench.gpu import __main__ as command
from bench.gpu import host, model
from bench.gpu.hooks import problems
from bench.gpu.model import LLAMA_3B
from bench.gpu.parts import (
    KV_BYTES_PER_TOKEN,
    MIB,
    MODEL_BYTES,
    PARTS,
    STEP_TOKENS,
    Room,
    Step,
    TooSmallError,
    engines_for,
    steps_of,
)
from bench.servers.processes import is_running
from layerpush.telemetry.trace_records import ChunkRecord, PushRecord
from tests.docblocks import Command
from tests.docprograms import check
from tests.support.waiting import until

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts/gpu-bench"
H200, H100, L40, L4 = 143_771, 81_559, 46_068, 23_034
SECONDS = 60


def invoke(*arguments: object) -> tuple[int, str]:
    done = CliRunner(env={"COLUMNS": "300"}).invoke(command.app, [str(each) for each in arguments])
    return done.exit_code, done.output


def steps(part: str, gpu_mib: int = H200) -> list[Step]:
    return steps_of(part, Path("/out"), Room(gpu_mib, Path("/model")))


def test_every_part_writes_its_result_into_the_folder() -> None:
    results = {"kernels": "kernel"}
    for part in PARTS:
        result = results.get(part, part)
        assert any(f"/out/{result}.json" in step.arguments for step in steps(part)), part


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("gpu_mib", [H200, L40])
def test_every_command_is_valid(tmp_path: Path, part: str, gpu_mib: int) -> None:
    """The folders of the traces exist."""
    for run in ("serve", "serve-token", "serve-request"):
        (tmp_path / f"{run}-logs/loopback-b{STEP_TOKENS}/trace").mkdir(parents=True)
    for step in steps_of(part, tmp_path, Room(gpu_mib, tmp_path)):
        check(Command(("python", *step.arguments), ()))


def test_a_large_gpu_runs_all_modes_side_by_side_and_a_smaller_one_fewer() -> None:
    every = [engines_for(gpu_mib) for gpu_mib in (H200, H100, L40)]
    assert [[one.modes for one in runs] for runs in every] == [
        ["pull,push,request,auto"],
        ["request,auto"],
        ["token", "request"],
    ]
    assert all(one.lengths[-1] >= 32768 for runs in every[:2] for one in runs)


def test_modes_that_do_not_fit_side_by_side_run_one_after_the_other() -> None:
    names = [step.name for step in steps("serve", L40)]
    token = ["serve-token", "serve-token-hooks"]
    assert names == ["model", *token, "serve-request"]


def options_of(step: Step) -> list[str]:
    return step.arguments[step.arguments.index("--engine-args") + 1].split()


def test_engines_run_with_graphs() -> None:
    """Their answers are compared with a mode of the same shapes, and their hooks are checked."""
    every = steps("serve")
    (step,) = (step for step in every if step.arguments[1] == "bench.serve")
    assert options_of(step)[-1] == "--no-enforce-eager"
    assert step.arguments[step.arguments.index("--compare") + 1] == "shapes"
    logs = step.arguments[step.arguments.index("--keep-logs") + 1]
    hooks = next(each for each in every if each.name == f"{step.name}-hooks")
    assert hooks.arguments[-1] == f"{logs}/loopback-b{STEP_TOKENS}/trace/auto"


def push_of(chunks: list[tuple[int, int, bool]], swept: set[int], mode: str = "auto") -> PushRecord:
    """``chunks``: first block, end, and whether it is cached. Chunks in ``swept`` have one of two layers swept."""
    push = PushRecord(request_id="p-1", engine_id="P", rank=0, mode=mode)
    for number, (first, end, cached) in enumerate(chunks):
        push.chunks.append(ChunkRecord(first, end, 0.0, cached))
        for layer in (0, 1):
            push.ready_at(number, layer, 1.0, None if cached else not (layer and number in swept))
    return push


@pytest.mark.parametrize(
    ("chunks", "swept", "mode", "said"),
    [
        ([(0, 8, False), (8, 16, False)], set(), "auto", []),
        ([(0, 8, False), (8, 16, False)], {1}, "auto", ["p-1, chunk 1: 1 layers called no hook"]),
        ([(0, 8, True), (8, 16, False)], set(), "layer", []),
        ([(0, 8, False), (8, 9, False)], {1}, "auto", []),
        ([(0, 8, False)], {0}, "request", ["no push by layer has a chunk of several blocks"]),
        ([], set(), "auto", ["no push by layer has a chunk of several blocks"]),
    ],
)
def test_layers_without_a_hook_call_are_reported(
    chunks: list[tuple[int, int, bool]], swept: set[int], mode: str, said: list[str]
) -> None:
    """A replayed step of few tokens calls no hook, and a cached chunk has no step."""
    assert problems([push_of(chunks, swept, mode)]) == said


@pytest.mark.parametrize("gpu_mib", [H200, H100, L40])
def test_engines_and_their_longest_prompts_fit(gpu_mib: int) -> None:
    for one in engines_for(gpu_mib):
        assert one.count * (one.kv_bytes + MODEL_BYTES) < gpu_mib * MIB
        assert one.lengths[-1] * KV_BYTES_PER_TOKEN < one.kv_bytes


def test_a_gpu_that_is_too_small_is_refused() -> None:
    with pytest.raises(TooSmallError, match="23034"):
        engines_for(L4)


def test_the_constants_match_the_model() -> None:
    assert LLAMA_3B.kv_bytes_per_token == KV_BYTES_PER_TOKEN
    weights = sum(2 * torch.Size(size).numel() for _, size, _ in LLAMA_3B.tensors())
    assert 0.99 * MODEL_BYTES < weights <= MODEL_BYTES


def python(source: str, name: str = "step") -> Step:
    return Step(name, ("-c", source))


def marking(mark: Path, what: str) -> str:
    """Source that writes the value of the expression ``what`` to ``mark``, all at once."""
    whole = f"pathlib.Path({str(mark)!r})"
    return (
        f"import pathlib; {whole}.with_suffix('.new').write_text({what}); {whole}.with_suffix('.new').rename({whole})"
    )


def assert_gone(pid: int) -> None:
    until(lambda: not is_running(pid), f"{pid} is gone", SECONDS, pause_s=0.05)


def script(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHON"} | variables
    return subprocess.run(
        [str(SCRIPT), *arguments],
        env=environment,
        cwd="/",
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


def test_the_script_accepts_any_interpreter_and_a_dry_run_prints_its_commands(tmp_path: Path) -> None:
    done = script("all", "--out", str(tmp_path), "--dry-run", PYTHON=sys.executable)
    assert done.returncode == 0, done.stderr
    for part in PARTS:
        assert f"{part}: at most 8 minutes" in done.stdout
    lines = done.stdout.splitlines()
    files = "tests/unit/kernels tests/unit/test_fences.py tests/unit/test_staging_memory.py"
    assert f"{sys.executable} -m pytest {files} -m gpu" in done.stdout
    assert any("bench.forward --device cuda" in line for line in lines)
    assert any("bench.serve" in line and "8192," in line and "cuda_ipc" in line for line in lines)
    assert not list(tmp_path.iterdir()), "it ran nothing"


def test_the_error_names_an_unusable_interpreter() -> None:
    done = script("all", "--out", "x", PYTHON="/no/such/python")
    assert done.returncode == 2
    assert "/no/such/python" in done.stderr
    assert "PYTHON=" in done.stderr


def no_gpu() -> AbstractContextManager[object]:
    return mock.patch.object(host, "machine", return_value={"cpus": 2})


def a_gpu(mib: int = H200) -> AbstractContextManager[object]:
    return mock.patch.object(command, "gpu_mib", return_value=mib)


def test_without_a_gpu_the_command_reports_it_and_exits_with_2(tmp_path: Path) -> None:
    with no_gpu():
        status, said = invoke("all", "--out", tmp_path / "out")
    assert status == 2
    assert "no GPU here: nvidia-smi" in said
    assert not (tmp_path / "out").exists()


def test_a_gpu_that_torch_cannot_use_has_its_own_error() -> None:
    gpus = {"gpus": [{"name": "NVIDIA H200", "memory_mib": H200}]}
    with (
        mock.patch.object(host, "machine", return_value=gpus),
        mock.patch.object(torch.cuda, "is_available", return_value=False),
        pytest.raises(host.GpuHostError, match=r"NVIDIA H200, but torch .* cannot use it"),
    ):
        host.gpu_mib()
    with (
        mock.patch.object(host, "machine", return_value=gpus),
        mock.patch.object(torch.cuda, "is_available", return_value=True),
    ):
        assert host.gpu_mib() == H200


def test_the_command_reports_a_gpu_without_room_for_engines(tmp_path: Path) -> None:
    with a_gpu(L4):
        status, said = invoke("serve", "--out", tmp_path)
    assert status == 2
    assert "three engines" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["kernel"], "none of kernels, serve, forward, all"),
        (["forward", "--minutes", "0"], "--minutes"),
    ],
)
def test_wrong_arguments_are_named(tmp_path: Path, arguments: Sequence[str], said: str) -> None:
    status, output = invoke(*arguments, "--out", tmp_path)
    assert status == 2
    assert said in output


def test_the_output_folder_is_required() -> None:
    status, output = invoke("forward")
    assert status == 2
    assert "--out" in output


def planned(**parts: list[Step]) -> AbstractContextManager[object]:
    return mock.patch.object(command, "steps_of", lambda part, *_: parts[part])


def test_the_first_step_that_fails_ends_its_part(tmp_path: Path) -> None:
    failing = [python("print('one')", "first"), python("raise SystemExit(3)", "second"), python("print('no')", "third")]
    working = [python("import os; print(os.getcwd())")]
    with a_gpu(), planned(kernels=failing, forward=working):
        status, said = invoke("kernels", "forward", "--out", tmp_path)
    assert status == 1
    lines = [line for line in said.splitlines() if line and line[0] not in "=W"]
    assert lines[:3] == ["one", "kernels-first: status 0", "kernels-second: status 3"]
    assert lines[3:] == [str(ROOT), "forward-step: status 0"]
    assert (tmp_path / "logs/kernels-first.log").read_text() == "one\n"
    with a_gpu(), planned(forward=working):
        assert invoke("forward", "--out", tmp_path)[0] == 0


def test_an_interrupted_run_leaves_no_process(tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    source = f"import os, time; {marking(mark, 'str(os.getpid())')}; time.sleep(600)"
    program = (
        "import sys\n"
        "from unittest import mock\n"
        "from bench.gpu import __main__ as command\n"
        "from bench.gpu.parts import Step\n"
        "command.gpu_mib = lambda: 143771\n"
        f"command.steps_of = lambda *_: [Step('bench', ('-c', {source!r}))]\n"
        f"sys.argv = ['gpu-bench', 'forward', '--out', {str(tmp_path / 'out')!r}]\n"
        "command.app()\n"
    )
    paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, env=os.environ | {"PYTHONPATH": paths})
    try:
        until(lambda: mark.exists() or process.poll() is not None, "its step runs", SECONDS, pause_s=0.05)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(SECONDS) == 130
    finally:
        process.kill()
        process.wait()
    assert_gone(int(mark.read_text()))


def test_steps_import_this_checkout_and_do_not_inherit_the_allocator_settings(tmp_path: Path) -> None:
    inherited = {"PYTHONPATH": "/theirs", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "UCX_TLS": "tcp"}
    found = host.environment(inherited, tmp_path)
    assert found["PYTHONPATH"].split(os.pathsep) == [str(ROOT), str(ROOT / "kernels"), "/theirs"]
    assert "PYTORCH_CUDA_ALLOC_CONF" not in found
    assert found["UCX_TLS"] == "tcp"


def test_vllm_finds_the_plugin_even_if_layerpush_is_not_installed(tmp_path: Path) -> None:
    with mock.patch.object(importlib.metadata, "entry_points", return_value=()):
        found = host.environment({}, tmp_path)
    assert str(tmp_path) in found["PYTHONPATH"].split(os.pathsep)
    (ours,) = importlib.metadata.distributions(path=[str(tmp_path)])
    (point,) = ours.entry_points
    assert (ours.name, point.group, point.name) == ("layerpush", host.GROUP, host.PLUGIN)
    assert callable(point.load())


def test_the_model_has_a_tokenizer_and_bf16_weights(tmp_path: Path) -> None:
    small = replace(LLAMA_3B, layers=1, hidden=32, heads=4, kv_heads=2, head_dim=8, intermediate=48, vocabulary=64)
    with mock.patch.object(model, "LLAMA_3B", small):
        for _ in range(2):  # the second one finds the model
            done = CliRunner().invoke(model.app, ["--out", str(tmp_path / "model")])
            assert done.exit_code == 0, done.output
    config = json.loads((tmp_path / "model/config.json").read_text())
    assert (config["torch_dtype"], config["rope_theta"]) == ("bfloat16", 500_000.0)
    assert (tmp_path / "model/tokenizer.json").exists()
    assert {weight.dtype for weight in load_file(tmp_path / "model/model.safetensors").values()} == {torch.bfloat16}
    (tmp_path / "thesis.tex").write_text("years of work")
    assert CliRunner().invoke(model.app, ["--out", str(tmp_path)]).exit_code == 2


def test_help_explains_the_parts_and_the_options() -> None:
    _, said = invoke("--help")
    for word in (
        *PARTS,
        "PYTHON=",
        "--dry-run",
        "CUDA IPC",
        "scripts/gpu-bench kernels --out results",
    ):
        assert word in said
