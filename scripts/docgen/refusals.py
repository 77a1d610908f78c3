"""What layerpush says to a bad setting: the real messages."""

from __future__ import annotations

from collections.abc import Mapping

from layerpush.calm import VARIABLE, wanted
from layerpush.config import ConfigError, LayerPushConfig

BAD_SETTINGS: tuple[Mapping[str, object], ...] = (
    {"granularity": "block"},
    {"granularity": "Layer"},
    {"layerwise": "false"},
    {"min_write_bytes": -1},
    {"trace_dir": ""},
    {"layer_wise": True},
)


def refusals() -> str:
    """One line per bad setting, as the engine's log shows it."""
    messages = []
    for extra in BAD_SETTINGS:
        try:
            LayerPushConfig.from_extra_config(extra)
        except ConfigError as error:
            messages.append(str(error))
        else:
            raise ValueError(f"{extra} is no bad setting any more")
    try:
        wanted({VARIABLE: "maybe"})
    except ConfigError as error:
        messages.append(str(error))
    return "\n".join(["```text", *messages, "```"])
