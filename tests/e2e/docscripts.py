"""The commands of docs/kv-transfer-params.md, for engines and a prompt of a test."""

from __future__ import annotations

import re
from pathlib import Path

from bench.servers.engines import Engine
from tests.e2e.proxyrig import MODEL

PAGE = Path(__file__).parents[2] / "docs/kv-transfer-params.md"


def concurrent_example(prefill: Engine, decode: Engine, prompt: str, max_tokens: int) -> str:
    section = PAGE.read_text().split("## Concurrent\n")[1].split("\n## ")[0]
    (commands,) = re.findall(r"```bash\n(.*?)```", section, re.DOTALL)
    (pages_prompt,) = re.findall(r'^prompt="(.*)"$', commands, re.MULTILINE)
    for there, here in (
        ("http://10.0.0.1:8000", prefill.url),
        ("http://10.0.0.2:8000", decode.url),
        ('"prefill-0"', f'"{prefill.name}"'),
        ('"10.0.0.1"', '"127.0.0.1"'),
        ("5600", str(prefill.side_channel_port)),
        ('"MODEL"', f'"{MODEL}"'),
        (f'prompt="{pages_prompt}"', f'prompt="{prompt}"'),
        ('"max_tokens": 64', f'"max_tokens": {max_tokens}, "temperature": 0'),
    ):
        commands = commands.replace(there, here)
    assert "10.0.0." not in commands
    return str(commands)


def keys_that_p_answers() -> set[str]:
    """The keys of P's answer in the page's table."""
    keys = PAGE.read_text().split("## Keys\n")[1].split("\n## ")[0]
    rows = [line.split("|") for line in keys.splitlines() if line.startswith("| `")]
    return {key for row in rows if row[3].strip() for key in re.findall(r"`(\w+)`", row[1])}
