"""The hashes of the pinned packages: ``python -m scripts.lockfiles`` writes them into requirements/*.lock."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import canonicalize_name, parse_wheel_filename
from pip._internal.models.index import PyPI

FOLDER = Path(__file__).parents[1] / "requirements"
WITHOUT_HASHES = "torch.lock"
FROM_SOURCE = "vllm"
"""scripts/vllm-0.33 builds it."""
PYTHONS = ((3, 11), (3, 12), (3, 13))
GLIBC = range(5, 40)
"""Minor versions of glibc 2. A package may have wheels for an old and a new one: the lock has the hashes of both."""
INDEX = os.environ.get("PIP_INDEX_URL", PyPI.simple_url).rstrip("/")


def usable_tags() -> frozenset[Tag]:
    """The tags of wheels that any Python of the project can install on Linux on x86_64."""
    named = {5: "manylinux1", 12: "manylinux2010", 17: "manylinux2014"}
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in GLIBC]
    platforms += [f"{named[minor]}_x86_64" for minor in GLIBC if minor in named]
    return frozenset(
        tag
        for python in PYTHONS
        for tags in (cpython_tags(python, platforms=platforms), compatible_tags(python, f"cp3{python[1]}", platforms))
        for tag in tags
    )


def hashes_of(files: list[dict[str, Any]], version: str, usable: frozenset[Tag]) -> list[str]:
    """The SHA-256 of each usable wheel. Of the source archive, if some Python of the project has no wheel."""
    wheels: list[tuple[str, frozenset[Tag]]] = []
    sources: list[str] = []
    for file in files:
        name, digest = file["filename"], file["hashes"]["sha256"]
        if name.endswith(".whl") and name.split("-")[1] == version:  # old files may have names that are no longer valid
            tags = parse_wheel_filename(name)[3]
            if tags & usable:
                wheels.append((digest, tags))
        elif name.endswith((f"-{version}.tar.gz", f"-{version}.zip")):
            sources.append(digest)
    served = frozenset(tag for _, tags in wheels for tag in tags)
    every = all(served & _tags_of(python, usable) for python in PYTHONS)
    return sorted({digest for digest, _ in wheels} | set(() if every else sources))


def _tags_of(python: tuple[int, int], usable: frozenset[Tag]) -> frozenset[Tag]:
    """Those of ``usable`` that this Python accepts."""
    platforms = sorted({tag.platform for tag in usable} - {"any"})
    return frozenset(cpython_tags(python, platforms=platforms)) | frozenset(
        compatible_tags(python, f"cp3{python[1]}", platforms)
    )


def pins(text: str) -> Iterator[tuple[str, str]]:
    """The name and the version of each package of a lock."""
    for line in text.splitlines():
        name, equals, rest = line.partition("==")
        if equals and not line.startswith(("#", " ")):
            yield name, rest.removesuffix("\\").strip()


def with_hashes(text: str, usable: frozenset[Tag]) -> str:
    """The lock's comment, then each package with its hashes. Raises ``LookupError`` for a package without a file."""
    comment = [line for line in text.splitlines() if line.startswith("#")]

    def entry(pin: tuple[str, str]) -> str:
        name, version = pin
        page = Request(f"{INDEX}/{canonicalize_name(name)}/", headers={"Accept": "application/vnd.pypi.simple.v1+json"})
        with urlopen(page, timeout=60) as answer:
            hashes = hashes_of(json.load(answer)["files"], version, frozenset() if name == FROM_SOURCE else usable)
        if not hashes:
            raise LookupError(f"{name}=={version}: the index has no file for Linux on x86_64")
        return " \\\n".join([f"{name}=={version}", *(f"    --hash=sha256:{each}" for each in hashes)])

    with ThreadPoolExecutor(8) as threads:
        return "\n".join([*comment, *threads.map(entry, pins(text))]) + "\n"


def main() -> None:
    usable = usable_tags()
    for lock in sorted(FOLDER.glob("*.lock")):
        if lock.name != WITHOUT_HASHES:
            lock.write_text(with_hashes(lock.read_text(), usable))
            print(lock.name)


if __name__ == "__main__":
    main()
