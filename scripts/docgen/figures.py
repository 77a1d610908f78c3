"""The table of the demo, from the JSON that it writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from bench.markdown import Result, conditions, number_table

Figures = Mapping[str, Any]
DEMO_ROWS: tuple[tuple[str, Callable[[Figures], str]], ...] = (
    ("**exposed**", lambda mode: f"**{_ms(mode['exposed_ms'], 1)}**"),
    ("hand-over", lambda mode: _ms(mode["hand_over_ms"])),
    ("completion read by D", lambda mode: _ms(mode["hand_over_parts_ms"]["notification"])),
    ("tokens equal", lambda mode: "yes" if mode["tokens_equal"] else "**no**"),
    ("layers hooked / swept", lambda mode: f"{_count(mode['hooked_layers'])} / {_count(mode['swept_layers'])}"),
    ("WRITEs", lambda mode: _count(mode["writes"])),
    ("descriptors", lambda mode: _count(mode["descriptors"])),
    ("bytes", lambda mode: _mib(mode["bytes"])),
    ("transfer", lambda mode: _ms(mode["transfer_ms"])),
    ("prefill", lambda mode: _ms(mode["prefill_ms"])),
    ("time to first token", lambda mode: _ms(mode["ttft_ms"])),
    ("least to most", lambda mode: "-".join(f"{ms:.0f}" for ms in mode["ttft_range_ms"]) + " ms"),
)


def demo(result: Result) -> str:
    """One column per mode; below it remarks and the conditions of the run."""
    modes: Mapping[str, Figures] = result["modes"]
    rows = [(heading, *(show(mode) for mode in modes.values())) for heading, show in DEMO_ROWS]
    table = number_table(("", *(f"`{name}`" for name in modes)), rows)
    link = f"link emulated at {result['link']}" if result["link"] else "loopback"
    return f"{table}\n\n{' '.join([*_remarks(result), conditions(result, link)])}"


def _remarks(result: Result) -> list[str]:
    remarks = []
    early = "auto" if "auto" in result["modes"] else "layer"
    hand_over, whole = (result["modes"][mode]["hand_over_ms"] for mode in (early, "request"))
    if hand_over is not None and whole is not None:
        remarks.append(
            f"From the last layer to the first token, `{early}` takes {whole - hand_over:.0f} ms less than `request`."
        )
    samples = result.get("samples", {}).get(early, [])
    lengths = sorted({sample["push"]["tokens"] for sample in samples if sample["push"]})
    if lengths:
        remarks.append(f"Medians of {len(samples)} prompts of {'/'.join(map(str, lengths))} tokens.")
    if result["negative_control_detected"]:
        remarks.append("Negative control: with one layer corrupted, the tokens changed.")
    else:
        remarks.append(
            "**Negative control: with one layer corrupted, the tokens did not change; equal tokens say nothing.**"
        )
    return remarks


def _ms(value: float | None, digits: int = 0) -> str:
    return "?" if value is None else f"{value:.{digits}f} ms"


def _count(value: int | None) -> str:
    return "?" if value is None else str(value)


def _mib(value: int | None) -> str:
    return "?" if value is None else f"{value / 2**20:.0f} MiB"
