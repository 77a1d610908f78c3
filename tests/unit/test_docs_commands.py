"""Each command of the documentation is run by a test or names its hardware, and its program accepts it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from bench import OUTPUT, RESULTS
from bench.calm import VARIABLE
from bench.demo import model
from layerpush.compat import patches
from tests.docblocks import PAGES, ROOT, Block, Command, blocks, command_blocks, commands, needs_lines
from tests.docprograms import UCX, IncompleteCommandError, WrongCommandError, check, check_transfer_config
from tests.quotes import blank, is_said, ours, package

E2E, HERE, CI = "tests/e2e/test_docs_commands.py", "tests/unit/test_docs_commands.py", ".ci/run"
QUICKSTART, DEPLOYMENT, PROXY = "docs/quickstart.md", "docs/deployment.md", "docs/proxy.md"
CONTRACT, BENCHMARKS = "docs/kv-transfer-params.md", "docs/benchmarks.md"
EXAMPLES = ROOT / "docs/examples"
README_RUN, BY_HAND, DEPLOYED = (
    f"{E2E}::{name}"
    for name in ("test_the_readme_and_the_contract", "test_the_quickstart_by_hand", "test_the_deployment")
)
CURL_EXAMPLES = "tests/unit/proxy/test_pages.py::test_the_curl_examples_send_valid_params"

RUN_BY: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("README.md", "make demo"): (f"{E2E}::test_the_demo", CI),
    ("README.md", "export VLLM_NIXL_SIDE_CHANNEL_HOST=10.0.0.1"): (README_RUN,),
    ("README.md", "export VLLM_NIXL_SIDE_CHANNEL_HOST=10.0.0.2"): (README_RUN,),
    ("README.md", "layerpush proxy"): (README_RUN,),
    ("CONTRIBUTING.md", "git clone"): (CI,),
    (BENCHMARKS, "make demo"): (f"{E2E}::test_the_demo",),
    (CONTRACT, "id="): (README_RUN, CURL_EXAMPLES),
    ("docs/configuration.md", "vllm serve MODEL --kv-transfer-config"): (f"{E2E}::test_the_configuration",),
    (DEPLOYMENT, "export VLLM_NIXL_SIDE_CHANNEL_HOST=10.0.0.1"): (DEPLOYED,),
    (DEPLOYMENT, "export VLLM_NIXL_SIDE_CHANNEL_HOST=10.0.0.2"): (DEPLOYED,),
    (DEPLOYMENT, "vllm-router --host 0.0.0.0"): ("tests/e2e/test_vllm_router.py::test_p_pushes_by_layer",),
    (DEPLOYMENT, "layerpush proxy --host 0.0.0.0"): (DEPLOYED,),
    (PROXY, "layerpush proxy --port 8000"): (README_RUN,),
    (PROXY, "curl http://127.0.0.1:8000/v1/chat/completions"): (README_RUN,),
    (QUICKSTART, "make setup"): (CI, "tests/unit/test_cli.py::test_doctor_passes_on_this_installation"),
    (QUICKSTART, "python -m bench.demo.model"): (f"{HERE}::test_the_model_of_the_quickstart",),
    (QUICKSTART, "docs/examples/"): (BY_HAND,),
    (QUICKSTART, "python docs/examples/"): (BY_HAND,),
    (QUICKSTART, "layerpush proxy --prefill http://127.0.0.1:8100"): (BY_HAND,),
    ("docs/estimate.md", "layerpush estimate"): (
        "tests/unit/test_estimate.py::test_the_table_fits_a_terminal_and_says_what_it_does_not_know",
    ),
    ("docs/routers.md", "vllm-router --host"): ("tests/e2e/test_vllm_router.py::test_a_prefill_engine_refuses",),
    ("docs/soak.md", "scripts/soak --list"): (f"{HERE}::test_the_soak_lists_its_faults",),
    ("docs/trace.md", "layerpush trace summary DIR"): (
        "tests/unit/test_trace_command.py::test_summary_is_for_people_or_programs",
        "tests/unit/test_trace_command.py::test_plot_draws_the_requested_request",
        "tests/unit/test_trace_command.py::test_merge_writes_one_file",
    ),
    ("docs/troubleshooting.md", "layerpush doctor"): (
        "tests/unit/test_cli.py::test_doctor_passes_on_this_installation",
    ),
}
"""(page, start of the first line) -> the runners of the block. Blocks of equal text need one line."""

MISSPELT = json.dumps(
    {
        "kv_connector": "LayerwisePushConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"layer_wise": True},
    }
)

OTHERS = frozenset(
    {
        "GLOO_SOCKET_IFNAME",
        "HF_HUB_OFFLINE",
        "OMP_NUM_THREADS",
        "NIXL_PLUGIN_DIR",
        "NIXL_UCX_SGL_ENABLE",
        "PIP_EXTRA_INDEX_URL",
        VARIABLE,
        patches.VARIABLE,
    }
)
_INLINE = re.compile(r"(?<!`)`((?:layerpush |make |vllm serve |pip install |scripts/(?=[a-z-]+ ))[^`\n]+)`(?!`)")
_VARIABLE = re.compile(r"\b(?:VLLM|UCX|GLOO|NIXL|LAYERPUSH|HF|OMP|PIP)_[A-Z0-9_]*[A-Z0-9]\b(?!\*)")
_FIRST_ASSIGNED = ("CUDA_VISIBLE_DEVICES", "PYTHON", "PYTHONPATH", "id", "prompt", "params")


def listed(block: Block, run: Mapping[tuple[str, str], tuple[str, ...]]) -> bool:
    return any(block.page == page and block.first.startswith(start) for page, start in run)


def problem(block: Block, run: Mapping[tuple[str, str], tuple[str, ...]], known: list[Block]) -> str | None:
    """An error for a block that no test runs and that names no hardware."""
    if block.needs is not None or any(listed(one, run) and one.text == block.text for one in known):
        return None
    return f"{block}: no test runs it, and it does not say what it needs"


def test_each_block_has_a_runner_or_names_its_hardware() -> None:
    known = command_blocks(PAGES)
    assert len(known) > 30
    assert [found for block in known if (found := problem(block, RUN_BY, known))] == []
    assert [key for key in RUN_BY if not any(listed(block, {key: (CI,)}) for block in known)] == []


def test_every_runner_of_a_block_exists() -> None:
    for runner in {runner for runners in RUN_BY.values() for runner in runners}:
        path, _, name = runner.partition("::")
        assert (ROOT / path).is_file()
        assert not name or re.search(rf"^def {name}\(", (ROOT / path).read_text(), re.MULTILINE), runner


@pytest.mark.parametrize("page", PAGES)
def test_required_hardware_is_named_right_above_its_block(page: str) -> None:
    said = needs_lines(page)
    above = [block.line - 2 for block in blocks(page) if block.needs is not None]
    assert said == above


def test_blocks_without_a_runner_are_found(tmp_path: Path) -> None:
    fenced = [f"```bash\n{text}\n```" for text in ("layerpush doctor", "make test")]
    page = "\n\n".join(["# Page", fenced[0], "    make demo", "*Needs a GPU.*", fenced[1], "    a = b / c", ""])
    (tmp_path / "page.md").write_text(page)
    known = command_blocks(("page.md",), tmp_path)
    assert [block.first for block in known] == ["layerpush doctor", "make demo", "make test"]
    nothing = [problem(block, {}, known) for block in known]
    assert [bool(one) for one in nothing] == [True, True, False]
    run = {("page.md", block.first): (CI,) for block in known}
    assert [problem(block, run, known) for block in known] == [None, None, None]


def inline_commands(text: str) -> list[str]:
    """Spans that are one command: no patterns (``[...]``, ``|``), and no lines of our log."""
    spans = set(_INLINE.findall(text))
    return sorted(span for span in spans if not re.search(r"\.\.\.|\|", span) and not is_said(blank(span), ours()))


def check_all(text: str) -> None:
    for command in commands(text):
        check(command)


def wrong(texts: Iterable[str], ignored: type[Exception] | None = None) -> list[str]:
    """The texts with a command that its program refuses, with the refusal."""
    found = []
    for text in texts:
        try:
            check_all(text)
        except WrongCommandError as error:
            found += [] if ignored is not None and isinstance(error, ignored) else [f"{text}: {error}"]
    return found


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_command_is_valid() -> None:
    """The import of vLLM's parser takes seconds: all pages in one test. A span in a sentence may be incomplete."""
    assert wrong(block.text for block in command_blocks(PAGES)) == []
    spans = [span for page in PAGES for span in inline_commands((ROOT / page).read_text())]
    assert len(spans) > 20
    assert wrong(spans, IncompleteCommandError) == []


def published(text: str) -> list[str]:
    """Options of these commands that would write into the committed results."""
    words = [word for command in commands(text) for word in (*command.words, *command.environment)]
    return re.findall(r"--(?:out|json|plot)[= ]bench/results\S*", " ".join(words))


@pytest.mark.parametrize("page", PAGES)
def test_no_command_of_a_page_overwrites_the_committed_results(page: str) -> None:
    text = (ROOT / page).read_text()
    said = [block.text for block in command_blocks((page,))] + inline_commands(text)
    assert [found for one in said for found in published(one)] == []


def measured(words: Sequence[str]) -> tuple[str, ...]:
    """A benchmark, and its options without those that name files, in any order."""
    program, *rest = words
    name = program.removesuffix(".py").removesuffix("/__main__").replace("/", ".")
    options = re.split(r" (?=--)", " ".join(["", *rest]).strip())
    files = ("--out ", "--json ", "--plot ", "--keep-logs ")
    return (name, *sorted(option for option in options if option and not option.startswith(files)))


def commands_of_benchmarks(text: str) -> set[tuple[str, ...]]:
    """The commands of a page, as in the JSON files of their results."""
    said = [command.words for block in text.split("```bash\n")[1:] for command in commands(block.split("```")[0])]
    benchmarks = {measured(words[2:]) for words in said if words[:2] == ("python", "-m")}
    return benchmarks | ({("bench.demo",)} if ("make", "demo") in said else set())


def results_without_command(text: str) -> list[str]:
    """Committed results whose command the page lacks, with that command. docs/soak.md describes the soak's."""
    known = commands_of_benchmarks(text)
    made = {path.name: measured(json.loads(path.read_text())["argv"]) for path in RESULTS.glob("*.json")}
    return [f"{name}: {' '.join(argv)}" for name, argv in made.items() if name != "soak.json" and argv not in known]


def test_the_page_has_the_command_of_each_result() -> None:
    assert results_without_command("".join((ROOT / page).read_text() for page in (BENCHMARKS, "docs/fleet.md"))) == []


@pytest.mark.parametrize(
    ("old", "new", "name"),
    [
        ("bench.forward --rounds 3", "bench.forward", "forward.json"),
        ("--modes pull,request,layer,auto ", "", "serve.json"),
        ("auto,layer,request --rounds 3", "auto,layer,request --rounds 2", "long.json"),
    ],
)
def test_a_command_with_other_options_than_its_result_is_found(old: str, new: str, name: str) -> None:
    text = "".join((ROOT / page).read_text() for page in (BENCHMARKS, "docs/fleet.md"))
    assert text.count(old) == 1
    (found,) = results_without_command(text.replace(old, new))
    assert found.startswith(name)


@pytest.mark.parametrize(
    "text", ["scripts/soak --json bench/results/soak.json", 'make demo ARGS="--json bench/results/demo.json"']
)
def test_commands_that_overwrite_the_committed_results_are_found(text: str) -> None:
    assert published(text) != []


def test_commands_write_into_a_folder_that_git_ignores() -> None:
    """No command knows the place of the committed results."""
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    assert "/build/" in ignored
    assert OUTPUT.is_relative_to(ROOT / "build")
    folders = ("bench", "layerpush", "tests/faults/soak")
    sources = {path: path.read_text() for folder in folders for path in (ROOT / folder).rglob("*.py")}
    knowing = {str(path.relative_to(ROOT)) for path, text in sources.items() if "RESULTS" in text}
    assert knowing == {"bench/__init__.py"}
    assert [path for path, text in sources.items() if '"results"' in text and path.parent.name != "bench"] == []
    assert "build/bench" in (ROOT / "scripts/bench").read_text()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("layerpush doktor", "no such command"),
        ("layerpush doctor --josn", "No such option"),
        ("layerpush proxy --prefill http://a --decode http://b --port many", "integer"),
        ("make dmo", "no such target"),
        ('make demo ARGS="--promts 3"', "No such option"),
        ("make docs MINUTES=3", "does not know"),
        ("scripts/nothing", "does not exist"),
        ("docs/examples/nothing.sh", "does not exist"),
        ("pip install '.[gpu]'", "no such extra"),
        ("scripts/pages demo", "demo"),
        ("docker run layerpush", "nothing is known"),
        ("python -m layerpush.nothing", "nothing is known"),
        ('a=1 layerpush metrics --port "$(layerpush nothing)"', "integer|no such command"),
        ('curl http://d -d \'{"kv_transfer_params": {"do_remote_prefill": true}}\'', "remote_engine_id"),
        ("curl http://d -d '{'", "curl -d"),
        ("python -m pytest tests/unit/test_nothing.py", "no such file"),
    ],
)
def test_invalid_commands_are_found(text: str, words: str) -> None:
    with pytest.raises(WrongCommandError, match=words):
        check_all(text)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("vllm serve MODEL --kv-transfer-confg '{}'", "unrecognized"),
        (f"vllm serve MODEL --kv-transfer-config '{MISSPELT}'", "did you mean 'layerwise'"),
        ("vllm serv MODEL", "vllm serv"),
        ("vllm bench serve --modle MODEL", "unrecognized"),
        ("python docs/examples/load.py --modle MODEL", "unrecognized"),
    ],
)
def test_invalid_vllm_commands_are_found(text: str, words: str) -> None:
    test_invalid_commands_are_found(text, words)


def transfer_configs(page: str) -> list[dict[str, Any]]:
    """Values of ``--kv-transfer-config`` in blocks of any language, and JSON blocks that are one."""
    found = []
    for block in blocks(page):
        whole = block.language == "json" and '"kv_connector"' in block.text
        found += [json.loads(block.text)] if whole else configs_in(block.text)
    return found


def configs_in(shell: str) -> list[dict[str, Any]]:
    return [json.loads(text) for text in re.findall(r"'(\{\s*\"kv_connector\".*?\})'", shell, re.DOTALL)]


def test_transfer_configurations_are_valid() -> None:
    found = [config for page in PAGES for config in transfer_configs(page)]
    found += [config for file in EXAMPLES.glob("*.sh") for config in configs_in(file.read_text())]
    assert len(found) > 10
    for config in found:
        check_transfer_config(config)


def test_the_systemd_unit_checks_its_configuration_before_the_engine_starts() -> None:
    (unit,) = (block.text.replace("\\\n", "") for block in blocks(DEPLOYMENT) if block.language == "ini")
    ((name, config),) = re.findall(r"^Environment='(\w+)=(.*)'$", unit, re.MULTILINE)
    check_transfer_config(json.loads(config))
    before, start = re.findall(r"^ExecStart(?:Pre)?=(.*)$", unit, re.MULTILINE)
    assert before == f"/opt/vllm/bin/layerpush doctor --kv-transfer-config ${{{name}}}"
    assert start.startswith("/opt/vllm/bin/vllm serve ")
    assert start.endswith(f" --kv-transfer-config ${{{name}}}")


def test_yaml_blocks_are_valid() -> None:
    found = [block for page in PAGES for block in blocks(page) if block.language == "yaml"]
    assert found
    for block in found:
        assert "kind" in yaml.safe_load(block.text)


def test_the_application_for_ray_has_a_builder_and_valid_configurations() -> None:
    (application,) = yaml.safe_load((EXAMPLES / "ray.yaml").read_text())["applications"]
    module, _, builder = application["import_path"].partition(":")
    assert f"\ndef {builder}(" in (ROOT / f"{module.replace('.', '/')}.py").read_text()
    for role, kv_role in (("prefill", "kv_producer"), ("decode", "kv_consumer")):
        config = application["args"][f"{role}_config"]["engine_kwargs"]["kv_transfer_config"]
        check_transfer_config(config)
        assert config["kv_role"] == kv_role


def test_the_compose_file_names_our_images_and_one_port_for_each_engine() -> None:
    """Nothing here can run it."""
    services = yaml.safe_load((EXAMPLES / "compose.yaml").read_text())["services"]
    built = "".join(file.read_text() for file in (ROOT / "docker").glob("*.Dockerfile"))
    assert all(f"-t {service['image']} ." in built for service in services.values())
    for name in ("prefill", "decode"):
        check(Command(("vllm", "serve", *services[name]["command"]), ()))
        assert "--host=127.0.0.1" in services[name]["command"], "the host's network has no other guard"
    check(Command(("layerpush", "proxy", *services["proxy"]["command"]), ()))
    ports = {f"http://127.0.0.1:{port}" for port in (8100, 8200)}
    assert ports <= set(services["proxy"]["command"])
    assert (
        len(
            {
                service["environment"]["VLLM_NIXL_SIDE_CHANNEL_PORT"]
                for service in (services["prefill"], services["decode"])
            }
        )
        == 2
    )


def test_the_model_of_the_quickstart(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    (block,) = (one for one in command_blocks((QUICKSTART,)) if "bench.demo.model" in one.text)
    (command,) = commands(block.text)
    made = CliRunner().invoke(model.app, [str(tmp_path / "model")])
    assert made.exit_code == 0, made.output
    assert command.words == ("python", "-m", "bench.demo.model", "build/model")
    assert (tmp_path / "model/model.safetensors").stat().st_size > 1_000_000
    assert AutoTokenizer.from_pretrained(tmp_path / "model")("w7 w8").input_ids == [7, 8]


def unknown_variables(text: str, vllms: str) -> list[str]:
    """Environment variables that no program reads."""
    return sorted(
        name
        for name in set(_VARIABLE.findall(text))
        if not (
            name in OTHERS
            or (name.startswith("UCX_") and name.removeprefix("UCX_") in UCX)
            or (name.startswith("VLLM_") and f'"{name}"' in vllms)
        )
    )


@pytest.mark.parametrize("page", PAGES)
def test_environment_variables_are_known(page: str) -> None:
    vllms = (package("vllm") / "envs.py").read_text()
    assert unknown_variables((ROOT / page).read_text(), vllms) == []
    for block in command_blocks((page,)):
        for command in commands(block.text):
            names = [assignment.split("=")[0] for assignment in command.environment]
            assert [n for n in names if not _VARIABLE.fullmatch(n) and n not in _FIRST_ASSIGNED] == []


def test_unknown_variables_are_found() -> None:
    text = "`VLLM_NIXL_SIDE_CHANNEL_HOTS`, `UCX_TLSS`, `LAYERPUSH_CALM`, `UCX_TLS`, `VLLM_PLUGINS`, `NIXL_PORT`"
    vllms = (package("vllm") / "envs.py").read_text()
    assert unknown_variables(text, vllms) == ["NIXL_PORT", "UCX_TLSS", "VLLM_NIXL_SIDE_CHANNEL_HOTS"]


@pytest.mark.slow
def test_the_soak_lists_its_faults() -> None:
    """The block's commands, in an environment that `scripts/setup` has made."""
    (block,) = [one for one in command_blocks(("docs/soak.md",)) if one.first == "scripts/soak --list"]
    text = block.text.replace("scripts/soak", f"{sys.executable} -m tests.faults.soak")
    environment = os.environ | {"PYTHONPATH": str(ROOT), VARIABLE: "1"}
    done = subprocess.run(
        ["bash", "-euc", text], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout
