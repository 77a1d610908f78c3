"""README and docs: generated parts are in step with code and results; handwritten parts name existing things."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from layerpush.apps.tracing.breakdown import PARTS
from layerpush.core import wire
from layerpush.core.config import VLLM_KEYS, ConfigError, LayerPushConfig
from layerpush.core.request_params import MAX_OUTER_ID_CHARS, ParamsError, check_params, check_request_id
from layerpush.telemetry.trace_records import (
    ChunkRecord,
    DropRecord,
    FirstTokenRecord,
    LoadRecord,
    ProcessRecord,
    PushRecord,
    WriteRecord,
)
from scripts.docgen import messages, pictures, protocol, versions
from scripts.docgen.markers import MarkerError, fill
from scripts.docgen.sections import pages, updated
from tests.e2e.zoo import FAMILIES
from tests.quotes import blank, is_said, ours

ROOT = Path(__file__).parents[2]
DOCS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted(
    (ROOT / "docs").rglob("*.md")
)


@pytest.mark.parametrize("page", pages())
def test_generated_parts_are_up_to_date(page: str) -> None:
    text = (ROOT / page).read_text()
    assert updated(ROOT, page, text) == text, f"{page}: run scripts/pages"


def test_a_stale_part_is_found() -> None:
    page = "docs/design/protocol.md"
    text = (ROOT / page).read_text()
    stale = text.replace("WAITING --> CONNECTING", "WAITING --> DONE")
    assert stale != text
    assert updated(ROOT, page, stale) == text


@pytest.mark.parametrize("path", pictures.PICTURES, ids=lambda path: path.stem)
def test_the_pictures_are_up_to_date(path: Path) -> None:
    assert pictures.render(pictures.PICTURES[path]) == path.read_text(), "run scripts/pages"


@pytest.mark.parametrize(
    ("name", "old"),
    [
        ("pyproject.toml", '"nixl>='),
        ("requirements/cpu.lock", "\nvllm-cpu=="),
        ("requirements/torch.lock", "\ntorch=="),
        ("bench/results/soak.json", '"python":'),
    ],
)
def test_a_version_missing_from_its_file_is_an_error(tmp_path: Path, name: str, old: str) -> None:
    files = {each: (ROOT / each).read_text() for each in ("pyproject.toml", *map(str, versions.LOCKS))}
    files[str(versions.SOAK)] = '{"versions": {"python": "3.11.7"}}'
    files[str(versions.GPU)] = (
        '{"versions": {"vllm": "1", "torch": "2", "python": "3"}, "machine": {"gpus": [{"name": "One"}]}}'
    )
    for each, text in files.items():
        (tmp_path / each).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / each).write_text(text)
    assert versions.tables(tmp_path)
    (tmp_path / name).write_text(files[name].replace(old, "\nother"))
    with pytest.raises((LookupError, ValueError)):
        versions.tables(tmp_path)


@pytest.mark.parametrize("page", ["", "<!-- a -->\n", "<!-- a -->\n<!-- /a -->\n<!-- a -->\n<!-- /a -->\n"])
def test_missing_and_double_markers_are_refused(page: str) -> None:
    with pytest.raises(MarkerError, match="wanted once"):
        fill(page, "a", "new")


@pytest.mark.parametrize(
    ("machine", "diagrams"),
    [
        (protocol.PREFILL, (protocol.course(), protocol.endings())),
        (protocol.DECODE, (protocol.DECODE.diagram(),)),
    ],
    ids=["P", "D"],
)
def test_the_diagrams_show_every_transition_of_the_table_once(
    machine: protocol.StateMachine, diagrams: tuple[str, ...]
) -> None:
    drawn = [move for diagram in diagrams for move in moves(diagram)]
    table = {
        (state.name, event.__name__, target.name)
        for state, exits in machine.module.TRANSITIONS.items()
        for event, targets in exits.items()
        for target in targets - {state}
    }
    assert sorted(drawn) == sorted(table)


def moves(diagram: str) -> list[tuple[str, str, str]]:
    arrows = re.findall(r"^    (\w+) --> (\w+): (.+)$", diagram, re.MULTILINE)
    return [(state, event, target) for state, target, events in arrows for event in events.split(", ")]


@pytest.mark.parametrize("machine", [protocol.PREFILL, protocol.DECODE], ids=["P", "D"])
def test_the_state_table_has_every_accepted_event(machine: protocol.StateMachine) -> None:
    for line in machine.states().splitlines()[2:]:
        state = re.match(r"\| `(\w+)`", line)
        assert state is not None
        (events,) = [exits for one, exits in machine.module.TRANSITIONS.items() if one.name == state[1]]
        named = set(re.findall(r"`((?:[A-Z][a-z]*)+)`", line)) - set(machine.module.State.__members__)
        assert named == {event.__name__ for event in events}


def test_the_message_tables_have_every_message() -> None:
    named = re.findall(r"^\| `(\w+)`", f"{messages.vllms()}\n{messages.ours()}", re.MULTILINE)
    assert sorted(named) == sorted(kind.__name__ for kind in wire.Message.__args__)


def matrix_section() -> str:
    return (ROOT / "docs/design/failures.md").read_text().split("## The matrix")[1].split("\n## ")[0]


def matrix() -> list[list[str]]:
    """The rows of the matrix of failures, cell by cell."""
    rows = [line.strip("|").split("|") for line in matrix_section().splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row] for row in rows[1:]]


def test_the_matrix_names_tests_that_exist() -> None:
    sources = "".join(file.read_text() for file in (ROOT / "tests/faults").glob("test_*.py"))
    defined = set(re.findall(r"^def (test_\w+)", sources, re.MULTILINE))
    named = {name for row in matrix() for name in re.findall(r"`(test_\w+)`", row[4])}
    assert named - defined == set()
    assert defined - named == set(), "fault tests without a row in docs/design/failures.md"


def test_the_matrix_quotes_existing_log_lines() -> None:
    """The page has ``<...>`` in the place of a placeholder of the code."""
    frames = re.findall(r"^- .*?`([^`]*)`", matrix_section(), re.MULTILINE)
    quotes = frames + [quote for row in matrix() for quote in re.findall(r"`([^`]*)`", row[3])]
    own = [quote for quote in quotes if not quote.startswith("Releasing expired KV blocks")]
    assert len(own) > 10
    assert [quote for quote in own if not is_said(blank(quote), ours())] == []


def test_the_trace_page_names_every_field() -> None:
    page = (ROOT / "docs/trace.md").read_text()
    named = set(re.findall(r"`(\w+)`", " ".join(line.split("|")[1] for line in page.splitlines() if line[:3] == "| `")))
    kinds = (ProcessRecord, PushRecord, ChunkRecord, WriteRecord, LoadRecord, FirstTokenRecord, DropRecord)
    assert named == {field for kind in kinds for field in kind.__struct_fields__}


def test_the_trace_page_lists_the_parts_of_the_hand_over() -> None:
    page = (ROOT / "docs/trace.md").read_text()
    table = page.split("| part | from, until |\n")[1].split("\n\n")[0]
    assert re.findall(r"^\| ([\w ]+) \| (.+) \|$", table, re.MULTILINE) == [*PARTS.items()]


def test_the_configuration_page_names_vllms_keys_and_our_variable() -> None:
    page = (ROOT / "docs/configuration.md").read_text()
    part = page.split("## vLLM's keys")[1].split("Other fields")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", part, re.MULTILINE)) == set(VLLM_KEYS)


def test_the_compatibility_page_lists_the_architectures_of_the_zoo() -> None:
    page, test = (ROOT / "docs/compatibility.md").read_text(), "`tests/e2e/test_zoo.py`"
    alike: dict[str, list[str]] = {}
    for name, family in sorted(FAMILIES.items()):
        behaviour = "by layer; states at the end" if family.states else "by layer"
        compared = "" if family.tokens else ": KV, not tokens"
        alike.setdefault(f"{family.attention} | {behaviour} | {test}{compared}", []).append(f"`{name}`")
    listed = page.split("| architectures | layers | behaviour | tested by |\n")[1].split("\n\n")[0]
    assert listed.splitlines()[1:] == [f"| {', '.join(names)} | {row} |" for row, names in sorted(alike.items())]


BAD_SETTINGS: tuple[dict[str, object], ...] = (
    {"granularity": "block"},
    {"granularity": "Layer"},
    {"layerwise": "false"},
    {"layerwise_min_tokens": -1},
    {"trace_dir": ""},
    {"allowed_hosts": "10.0.0.0/8"},
    {"allowed_hosts": ["10.1.2.3/8"]},
    {"allowed_hosts": ["prefill-0:5600"]},
    {"num_threads": "four"},
    {"engine_id": "prefill-0"},
    {"layer_wise": True},
)
GOOD_REQUEST: dict[str, object] = {
    "do_remote_prefill": True,
    "remote_engine_id": "prefill-0",
    "remote_request_id": "cmpl-7",
    "remote_host": "10.0.0.7",
    "remote_port": 5600,
    "tp_size": 1,
}
BAD_REQUESTS: tuple[dict[str, object], ...] = (
    {key: value for key, value in GOOD_REQUEST.items() if key != "tp_size"},
    GOOD_REQUEST | {"remote_port": "5600"},
    GOOD_REQUEST | {"remote_host": "192.168.0.1"},
    {"do_remote_decode": True},
)


def refusal(check: Callable[[], object]) -> str:
    with pytest.raises((ConfigError, ParamsError)) as refused:
        check()
    return str(refused.value)


def messages_below(heading: str) -> list[str]:
    page = (ROOT / "docs/configuration.md").read_text()
    return page.split(f"## {heading}\n")[1].split("```text\n")[1].split("\n```")[0].splitlines()


def test_the_configuration_page_has_the_messages_of_bad_settings() -> None:
    said = [refusal(partial(LayerPushConfig.from_extra_config, extra)) for extra in BAD_SETTINGS]
    assert messages_below("When a value is bad") == said


def test_the_configuration_page_has_the_messages_of_bad_requests() -> None:
    config = LayerPushConfig.from_extra_config({"allowed_hosts": ["10.0.0.0/8"]})
    check_params(GOOD_REQUEST, "kv_consumer", config)
    said = [refusal(partial(check_params, params, "kv_consumer", config)) for params in BAD_REQUESTS]
    said.append(
        refusal(partial(check_params, {"do_remote_decode": True, "layerpush_mode": "Layer"}, "kv_producer", config))
    )
    bad_id = partial(check_request_id, {"do_remote_decode": True}, "cmpl-\x1b[2J-0", MAX_OUTER_ID_CHARS)
    said.append(refusal(bad_id))
    assert messages_below("When a request's `kv_transfer_params` are bad") == said


@pytest.mark.parametrize("page", DOCS, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_make_targets_on_a_page_exist(page: Path) -> None:
    """Links to files, paths of modules, scripts and tests, make targets."""
    text = page.read_text()
    links = [link.split("#")[0] for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link]
    missing = [link for link in links if link and not (page.parent / link).exists()]
    paths = re.findall(
        r"`((?:layerpush|prefill|transport|scripts|tests|bench|requirements)/(?!results)[\w/.-]*)`", text
    )
    missing += [path for path in paths if not ((ROOT / path).exists() or (ROOT / "layerpush" / path).exists())]
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    missing += [
        f"make {target}" for target in re.findall(r"[`\n ]make ([a-z]+)\b(?=`| ARGS|  )", text) if target not in targets
    ]
    assert missing == []
