"""Looks names of vLLM up in its sources, without importing them."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path

_Found = tuple[str, ast.AST]
"""A module's name, and a node in it."""


class VllmSources:
    """``home`` is the folder of the package ``vllm``; by default the installed one. It must exist."""

    def __init__(self, home: Path | None = None) -> None:
        if home is None:
            spec = find_spec("vllm")
            assert spec is not None
            assert spec.submodule_search_locations
            home = Path(spec.submodule_search_locations[0])
        self.home = home
        self._module = cache(self._parsed)

    def describe(self, path: str) -> str | None:
        """The parameters of the function ``module:name`` or ``module:Class.name``, inherited or not; of a property and
        of anything else its kind. None: there is no such name.
        """
        found = self.find(path)
        if found is None:
            return None
        node = found[1]
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            kinds = [name for each in node.decorator_list if (name := ast.unparse(each)) in _KINDS]
            text = f"({ast.unparse(_without_annotations(node.args))})"
            return " ".join([*kinds, text]) if kinds != ["property"] else "property"
        return "class" if isinstance(node, ast.ClassDef) else "attribute"

    def find(self, path: str) -> _Found | None:
        """The module and the node that define ``module:name`` or ``module:Class.name``."""
        module, _, names = path.partition(":")
        name, *rest = names.split(".")
        found = self._in_module(module, name)
        for each in rest:
            found = None if found is None else self._in_class(found, each)
        return found

    def _parsed(self, module: str) -> ast.Module | None:
        base = self.home.joinpath(*module.split(".")[1:])
        for file in (base.with_suffix(".py"), base / "__init__.py"):
            if file.is_file():
                return ast.parse(file.read_text())
        return None

    def _in_module(self, module: str, name: str) -> _Found | None:
        tree = self._module(module) if module.partition(".")[0] == "vllm" else None
        if tree is None:
            return None
        for node in _statements(tree.body):
            if name in _defined(node):
                return module, node
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if name == (alias.asname or alias.name):
                        found = self._in_module(_imported(self.home, module, node), alias.name)
                        return found or (module, node)
        return None

    def _in_class(self, found: _Found, name: str) -> _Found | None:
        module, scope = found
        if not isinstance(scope, ast.ClassDef):
            return None
        for node in _statements(scope.body):
            if name in _defined(node):
                return module, node
        if name in (stored := _stored(scope)):
            return module, stored[name]
        for base in scope.bases:
            plain = base.value if isinstance(base, ast.Subscript) else base
            parent = self._in_module(module, plain.id) if isinstance(plain, ast.Name) else None
            inherited = None if parent is None else self._in_class(parent, name)
            if inherited is not None:
                return inherited
        return None


_KINDS = frozenset({"property", "classmethod", "staticmethod", "contextmanager"})


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a body, those below conditions and attempts, too."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With):
            yield from _statements([*node.body, *getattr(node, "orelse", ())])
            for handler in getattr(node, "handlers", ()):
                yield from _statements(handler.body)


def _defined(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)}


@cache
def _stored(scope: ast.ClassDef) -> dict[str, ast.AST]:
    """The attributes that the methods of a class assign."""
    found = [each for each in ast.walk(scope) if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store)]
    return {each.attr: each for each in found}


def _imported(home: Path, module: str, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    is_package = home.joinpath(*parts[1:]).is_dir()
    return ".".join([*parts[: len(parts) - node.level + is_package], *([node.module] if node.module else [])])


def _without_annotations(arguments: ast.arguments) -> ast.arguments:
    copy: ast.arguments = ast.parse(f"def f({ast.unparse(arguments)}): ...").body[0].args  # type: ignore[attr-defined]
    for each in ast.walk(copy):
        if isinstance(each, ast.arg):
            each.annotation = None
    return copy
