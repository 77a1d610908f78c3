"""Finds the models whose layers own KV and never call vLLM's connector, in vLLM's source."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from bench.markdown import Row
from layerpush.compat.module_hooks import WRITTEN, WRITTEN_BEFORE
from scripts.docgen.tables import table

DECORATOR = "maybe_transfer_kv_layer"
OWNER, STATE = "AttentionLayerBase", "MambaBase"
"""Layers with KV descend from the first. Those with a state descend from both, and are pushed as whole requests."""
ENTRIES = ("forward", "forward_cuda")
"""``CustomOp`` calls the second method if the class has it."""
REGISTRY = "model_executor/models/registry.py"
MODELS = ("models", "model_executor/models", "model_executor/layers", "v1/attention/backends")
OTHER_PLATFORMS = {"amd", "xpu", "cpu"}


@dataclass(frozen=True, eq=False)
class Layer:
    """A class of a module."""

    source: VllmSource
    path: Path
    node: ast.ClassDef

    @cached_property
    def name(self) -> str:
        """The class's name with its modules: ``vllm.models.x.Y``."""
        return ".".join((*self.source.module_of(self.path), self.node.name))

    @cached_property
    def lineage(self) -> list[Layer]:
        """The class and its ancestors: depth first, near enough to Python's order."""
        bases = (self.source.find(self.path, base) for base in self.node.bases)
        return [self, *(layer for base in bases if base is not None for layer in base.lineage)]

    @cached_property
    def is_unhooked(self) -> bool:
        """Whether the class owns KV, and its ``forward`` reaches no operation that calls the connector."""
        names = {layer.node.name for layer in self.lineage[1:]}
        return OWNER in names and STATE not in names and not self._is_hooked()

    def _is_hooked(self) -> bool:
        """Whether ``forward`` reaches a decorated operation through the class's own and inherited methods."""
        todo, seen = [(name, self.lineage) for name in ENTRIES], set[ast.AST]()
        while todo:
            name, lineage = todo.pop()
            method, behind = _method(name, lineage)
            if method is None or method in seen:
                continue
            seen.add(method)
            for node in ast.walk(method):
                if _name(node) in self.source.hooked:
                    return True
                match node:
                    case ast.Attribute(value=ast.Name("self"), attr=called):
                        todo.append((called, self.lineage))
                    case ast.Attribute(value=ast.Call(func=ast.Name("super")), attr=called):
                        todo.append((called, behind))
        return False


class VllmSource:
    """vLLM's modules of models and layers below ``root``, vLLM's package. Parses only the necessary ones."""

    def __init__(self, root: Path) -> None:
        self._root = root
        paths = (path for folder in MODELS for path in (root / folder).rglob("*.py"))
        self._texts = {
            path: path.read_text() for path in paths if not OTHER_PLATFORMS & set(path.relative_to(root).parts)
        }
        self._trees: dict[Path, ast.Module] = {}
        self._names: dict[Path, dict[str, tuple[Path, str]]] = {}
        self._layers: dict[tuple[Path, str], Layer] = {}
        self.hooked = {
            node.name
            for path in self._matching(rf"@{DECORATOR}")
            for node in ast.walk(self._tree(path))
            if isinstance(node, ast.FunctionDef) and any(_name(one) == DECORATOR for one in node.decorator_list)
        }

    def unhooked(self) -> set[Layer]:
        """The classes that own KV and never call the connector."""
        return {layer for layer in self._owners() if layer.is_unhooked}

    def rows(self, early: Collection[str] = ()) -> list[tuple[list[str], list[str], list[str]]]:
        """Architectures that vLLM loads from one module or package, and the names of its unhooked classes: those of
        ``early``, with their modules, and the others.
        """
        unhooked, rows = self.unhooked(), []
        makers = self._matching(rf"\b({'|'.join({layer.node.name for layer in unhooked})})\(") if unhooked else []
        for home, architectures in self._architectures().items():
            used = {layer for layer in unhooked if home in (layer.path, *layer.path.parents)}
            for path in makers:
                if home in (path, *path.parents):
                    used |= unhooked & set(self._made(path))
            bases = {base for layer in used for base in layer.lineage[1:]}
            names = {
                layer.node.name: layer.name in early for layer in used if layer.name in early or layer not in bases
            }
            if names:
                kinds = ([name for name in sorted(names) if names[name] is known] for known in (True, False))
                rows.append((sorted(architectures), *kinds))
        return sorted(rows)

    def module_of(self, path: Path) -> tuple[str, ...]:
        """The parts of the module's dotted name."""
        return path.relative_to(self._root.parent).with_suffix("").parts

    def find(self, path: Path, node: ast.expr) -> Layer | None:
        """The class of vLLM that ``node`` names in the module ``path``."""
        name = _name(node.value if isinstance(node, ast.Subscript) else node)
        seen = set[tuple[Path, str]]()
        while path in self._texts and (path, name) not in seen:
            self._tree(path)
            if name not in self._names[path]:
                return self._layers.get((path, name))
            seen.add((path, name))
            path, name = self._names[path][name]  # a package imports the class from yet another module
        return None

    def _owners(self) -> Iterator[Layer]:
        """The classes with ``OWNER`` among their ancestors."""
        names, known = {OWNER}, set[str]()
        while names - known:
            known = names
            for path in self._matching(rf"class \w+\([^)]*\b({'|'.join(known)})\b"):
                self._tree(path)
            names = known | {
                layer.node.name
                for layer in self._layers.values()
                if any(_name(base) in known for base in layer.node.bases)
            }
        yield from (layer for layer in list(self._layers.values()) if layer.node.name in names)

    def _matching(self, pattern: str) -> list[Path]:
        return [path for path, text in self._texts.items() if re.search(pattern, text)]

    def _tree(self, path: Path) -> ast.Module:
        if path not in self._trees:
            tree = self._trees[path] = ast.parse(self._texts[path])
            self._names[path] = {}
            for node in ast.walk(tree):
                if isinstance(node, ast.ImportFrom):
                    module = self._module(path, node)
                    self._names[path].update({one.asname or one.name: (module, one.name) for one in node.names})
            for node in tree.body:
                if isinstance(node, ast.ClassDef):
                    self._layers[path, node.name] = Layer(self, path, node)
        return self._trees[path]

    def _module(self, path: Path, node: ast.ImportFrom) -> Path:
        base = path.parents[node.level - 1] if node.level else self._root.parent
        module = base.joinpath(*(node.module or "").split("."))
        return module / "__init__.py" if module.is_dir() else module.with_suffix(".py")

    def _made(self, path: Path) -> Iterator[Layer]:
        for node in ast.walk(self._tree(path)):
            if isinstance(node, ast.Call) and (layer := self.find(path, node.func)) is not None:
                yield layer

    def _architectures(self) -> dict[Path, set[str]]:
        """The architectures of each module of the registry; a package of ``vllm/models`` counts as one."""
        found: dict[Path, set[str]] = {}
        for node in ast.walk(self._tree(self._root / REGISTRY)):
            for key, value in zip(node.keys, node.values, strict=True) if isinstance(node, ast.Dict) else ():
                if isinstance(key, ast.Constant) and isinstance(value, ast.Tuple):
                    module = value.elts[0]
                    assert isinstance(module, ast.Constant)
                    found.setdefault(self._home(str(module.value)), set()).add(str(key.value))
        return found

    def _home(self, module: str) -> Path:
        if module.startswith("vllm.models."):
            return self._root / "models" / module.split(".")[2]
        return self._root / "model_executor/models" / f"{module}.py"


def layers(_: Path) -> str:
    """The table of the installed vLLM."""
    found = importlib.util.find_spec("vllm")
    assert found is not None
    assert found.origin is not None
    early = {name for names in WRITTEN.values() for name in names} | {*WRITTEN_BEFORE.values()}
    rows: list[Row] = [
        (", ".join(architectures), *(", ".join(f"`{name}`" for name in names) for names in kinds))
        for architectures, *kinds in VllmSource(Path(found.origin).parent).rows(early)
    ]
    return table(("architectures", "by layer, where Python runs the layer", "by chunk"), rows)


def _method(name: str, lineage: list[Layer]) -> tuple[ast.FunctionDef | None, list[Layer]]:
    """The first method of this name, and the lineage behind its class, for ``super()``."""
    for at, layer in enumerate(lineage):
        for node in layer.node.body:
            if isinstance(node, ast.FunctionDef) and node.name == name:
                return node, lineage[at + 1 :]
    return None, []


def _name(node: ast.AST) -> str:
    """The last part of a dotted name; empty for another expression."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
