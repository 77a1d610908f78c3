"""An estimate as a table of 80 columns, and as JSON."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import Any

from layerpush.apps.estimate.estimate import PAYS, PromptEstimate

UNKNOWN = (
    "TTFT ends when D has all KV: router, tokenizing, queues and D's first step come on top, in every mode.",
    "Other work of the engines and on the link, and cached prefixes, are left out.",
    "Exposed times of a few milliseconds also depend on the wake-ups of threads, which take no time here.",
    "Every block of a layer is a descriptor, and its time over RDMA is an assumption; gathering is left out.",
    "D's KV cache and its decoding may limit the number of P before its network cards do.",
    "Pull and stock push move the same bytes after prefill: they expose what `request` does, or more.",
)
WIDTH = 80


def text(prompts: Sequence[PromptEstimate], speed: str) -> str:
    """``speed``: where P's comes from, as a sentence."""
    estimate = prompts[0].estimate
    (ours, theirs), wire = estimate.ranks, estimate.wire
    lines = [
        f"{estimate.model.name}, TP {ours} on P and {theirs} on D, {wire.rate / 1e9:g} GB/s for each rank",
        f"chunks of {estimate.chunk} tokens, blocks of {estimate.block_tokens}",
        "",
        f"{'prompt':>8}{'KV':>12}{'prefill':>12}  {'mode':8}{'WRITEs':>8}{'exposed':>14}{'TTFT':>12}",
    ]
    for prompt in prompts:
        head = f"{prompt.tokens:>8}{_size(prompt.bytes):>12}{_seconds(prompt.prefill_s):>12}"
        for mode, push in prompt.pushes.items():
            times = f"{1e3 * push.exposed_s:>11,.1f} ms{_seconds(prompt.ttft_s(mode)):>12}"
            lines.append(f"{head:32}  {mode:8}{len(push.writes):>8}{times}")
            head = ""
    lines += ["", f"{'prompt':>8}{'use of D':>12}{'P for one D':>14}{'keeps up from':>18}{'pays up to':>18}"]
    for prompt in prompts:
        use, pays = prompt.card_use, prompt.pays_up_to()
        limit = "any link" if pays == math.inf else f"{pays / 1e9:,.1f} GB/s"
        rates = f"{prompt.keeps_up_from / 1e9:>13,.1f} GB/s{limit:>18}"
        lines.append(f"{prompt.tokens:>8}{use:>12.1%}{1 / use:>14.1f}{rates}")
    lines += [
        "",
        "use of D: part of D's network cards that one P takes, if it only computes such",
        "  prompts. P for one D: as many as D's cards can take.",
        "keeps up from: on a slower link, what is exposed grows with the prompt.",
        f"pays up to: on a faster one, by layer shortens TTFT by less than {PAYS:.0%}.",
        "",
        "Not known:",
        *(line for sentence in (speed, *UNKNOWN) for line in _wrapped(sentence)),
    ]
    return "\n".join(lines)


def data(prompts: Sequence[PromptEstimate], speed: str) -> dict[str, Any]:
    """Times in seconds, rates in bytes a second. ``pays_up_to`` is null if by layer pays on any link."""
    estimate = prompts[0].estimate
    return {
        "model": estimate.model.name,
        "tensor_parallel": {"prefill": estimate.ranks[0], "decode": estimate.ranks[1]},
        "block_tokens": estimate.block_tokens,
        "chunk_tokens": estimate.chunk,
        "link": {
            "rate": estimate.wire.rate,
            "write_s": estimate.wire.write_s,
            "descriptor_s": estimate.wire.descriptor_s,
        },
        "prompts": [
            {
                "tokens": prompt.tokens,
                "bytes": prompt.bytes,
                "prefill_s": prompt.prefill_s,
                "use_of_decode_cards": prompt.card_use,
                "keeps_up_from": prompt.keeps_up_from,
                "pays_up_to": None if (pays := prompt.pays_up_to()) == math.inf else pays,
                "modes": {
                    str(mode): {
                        "writes": len(push.writes),
                        "exposed_s": push.exposed_s,
                        "ttft_s": prompt.ttft_s(mode),
                    }
                    for mode, push in prompt.pushes.items()
                },
            }
            for prompt in prompts
        ],
        "not_known": [speed, *UNKNOWN],
    }


def _wrapped(sentence: str) -> list[str]:
    return textwrap.wrap(sentence, WIDTH, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False)


def _size(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def _seconds(seconds: float) -> str:
    return f"{seconds:,.3f} s"
