"""The table of layerpush's patches of vLLM."""

from __future__ import annotations

from layerpush.compat.patches import PATCHES, Target
from scripts.docgen.tables import table


def patches() -> str:
    rows = [
        (
            f"`{patch.name}`",
            "; ".join(f"{target.process}: `{_shown(target)}`" for target in patch.targets),
            patch.reason,
            f"`{patch.setting}`" if patch.setting else "always",
            patch.lost,
        )
        for patch in PATCHES
    ]
    return table(("patch", "process and target", "reason", "setting", "without it"), rows)


def _shown(target: Target) -> str:
    name = target.path.removeprefix("vllm.").replace(":", ".")
    return f"{name} (new)" if target.is_new else name
