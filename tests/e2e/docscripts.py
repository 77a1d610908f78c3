"""The commands of docs/kv-transfer-params.md, for engines that run here."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from layerpush.apps.demo.engines import Engine

PAGE = Path(__file__).parents[2] / "docs/kv-transfer-params.md"


@dataclass(frozen=True)
class Script:
    commands: str
    prompt: str


def concurrent_example(prefill: Engine, decode: Engine, model: str, prompt: str | None) -> Script:
    """With a prompt of one's own, or the page's."""
    return _example("## Concurrent", prefill, decode, model, prompt)


def sequential_example(prefill: Engine, decode: Engine, model: str, prompt: str | None) -> Script:
    """With a prompt of one's own, or the page's."""
    return _example("## Sequential", prefill, decode, model, prompt)


def keys_that_p_answers() -> set[str]:
    """Of the page's table."""
    keys = PAGE.read_text().split("## Keys\n")[1].split("\n## ")[0]
    rows = [line.split("|") for line in keys.splitlines() if line.startswith("| `")]
    return {key for row in rows if row[3].strip() for key in re.findall(r"`(\w+)`", row[1])}


def _example(heading: str, prefill: Engine, decode: Engine, model: str, prompt: str | None) -> Script:
    section = PAGE.read_text().split(f"{heading}\n")[1].split("\n## ")[0]
    (commands,) = re.findall(r"```bash\n(.*?)```", section, re.DOTALL)
    (pages_prompt,) = re.findall(r'^prompt="(.*)"$', commands, re.MULTILINE)
    wanted = pages_prompt if prompt is None else prompt
    for there, here in (
        ("http://10.0.0.1:8000", prefill.url),
        ("http://10.0.0.2:8000", decode.url),
        ('"prefill-0"', f'"{prefill.name}"'),
        ('"10.0.0.1"', '"127.0.0.1"'),
        ("5600", str(prefill.side_channel_port)),
        ('"MODEL"', f'"{model}"'),
        (f'prompt="{pages_prompt}"', f'prompt="{wanted}"'),
        ('"max_tokens": 64', '"max_tokens": 64, "temperature": 0'),
    ):
        commands = commands.replace(there, here)
    assert "10.0.0." not in commands
    return Script(commands, wanted)
