"""The blocks of commands in the documentation, the hardware that each needs, and their commands word by word."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "bench/README.md",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")),
)
PROGRAMS = frozenset(
    {"cat", "curl", "export", "git", "layerpush", "make", "pip", "python", "scripts", "ss", "vllm", "vllm-router"}
)
"""An indented block of commands begins with one of these."""

_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
_INDENTED = re.compile(r"(?<=\n\n)(?: {4}.*\n|\n(?= {4}))+")
_NEEDS = re.compile(r"^\*Needs (?P<what>[^*]+)\.\*$")
_ASSIGNMENT = re.compile(r"^[A-Za-z_]\w*=")


@dataclass(frozen=True)
class Block:
    """``needs`` names hardware that tests lack, from the line right above the block: ``*Needs two GPUs.*``."""

    page: str
    line: int
    language: str
    text: str
    needs: str | None

    @property
    def first(self) -> str:
        """The first line without its comment. It identifies the block."""
        return _uncommented(self.text.strip().splitlines()[0])

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.first}"


@dataclass(frozen=True)
class Command:
    """One program with its arguments; ``environment`` are the assignments before it, or those of an ``export``."""

    words: tuple[str, ...]
    environment: tuple[str, ...]


def blocks(page: str, root: Path = ROOT) -> list[Block]:
    """Every fenced block of ``page``, and every indented one of commands (as language ``bash``)."""
    text = (root / page).read_text()
    found = [
        _block(page, text, match.start(), match[2], re.sub(f"^{match[1]}", "", match[3], flags=re.MULTILINE))
        for match in _FENCE.finditer(text)
    ]
    outside = _FENCE.sub(lambda match: re.sub(r"[^\n]", "-", match[0]), text)
    for match in _INDENTED.finditer(outside):
        body = re.sub(r"^ {4}", "", match[0], flags=re.MULTILINE)
        if re.split(r"[\s/]", body.strip(), maxsplit=1)[0] in PROGRAMS or _ASSIGNMENT.match(body):
            found.append(_block(page, outside, match.start(), "bash", body))
    return sorted(found, key=lambda block: block.line)


def command_blocks(pages: Sequence[str] = PAGES, root: Path = ROOT) -> list[Block]:
    return [block for page in pages for block in blocks(page, root) if block.language in ("bash", "sh", "console")]


def commands(text: str) -> Iterator[Command]:
    """The simple commands of a shell text, those in ``$(...)`` and pipes too."""
    plain = "\n".join(_uncommented(line) for line in text.replace("\\\n", " ").splitlines())
    lexer = shlex.shlex(plain, posix=True, punctuation_chars=";&|()\n")
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t", True, ""
    words: list[str] = []
    for word in [*lexer, "\n"]:
        if not set(word) <= set(";&|()\n"):
            words.append(word)
            continue
        if words:
            yield _command(words)
        words = []


def needs_lines(page: str, root: Path = ROOT) -> list[int]:
    """Numbers of the lines that name needed hardware."""
    return [
        number
        for number, line in enumerate((root / page).read_text().splitlines(), start=1)
        if line.startswith("*Needs ")
    ]


def _command(words: list[str]) -> Command:
    exports = words[0] == "export"
    rest = words[1:] if exports else words
    count = next((at for at, word in enumerate(rest) if not _ASSIGNMENT.match(word)), len(rest))
    return Command(("export",) if exports else tuple(rest[count:]), tuple(rest[:count]))


def _block(page: str, text: str, start: int, language: str, body: str) -> Block:
    before = text[:start].rstrip("\n").rpartition("\n")[2].strip()
    needs = _NEEDS.match(before)
    return Block(page, text.count("\n", 0, start) + 1, language, body, needs["what"] if needs else None)


def _uncommented(line: str) -> str:
    return re.sub(r"(^|\s)#[^'\"]*$", "", line).rstrip()
