"""Decides the number of layers for which ready layers wait before their WRITE leaves. Pure: no clock, no I/O.

Only the landing of a prompt's last byte decides the exposed time. So layers before the last need not go one by one, as
long as all of them have landed when the last layer is ready. Ready layers wait, and merge into one WRITE, while this
holds:

    busy_s + SAFETY * bytes * byte_s + writes * write_s <= (layers - 2 - ready) * layer_s

``busy_s`` is the time in seconds until all WRITEs in flight have landed. ``bytes`` counts the unposted bytes of all
layers but the last, ready or not. Both terms assume a link that is ``SAFETY`` times as slow as estimated. The right
side is the time that is left until the layer before the last is ready, if the ready ones wait for one more layer.
Layers also wait while an earlier WRITE is in flight: behind it they would land no sooner. The writer polls again when
it has landed. It follows that

- a prompt's last layer goes alone. The exposed time is the transfer of one layer, as with one WRITE per layer;
- WRITEs shrink geometrically towards the end of a prompt. Let ``load`` be a layer's transfer time divided by its
  computation time: about ``log(layers) / log(1 / load)`` WRITEs leave, instead of one a layer;
- nothing waits where ``SAFETY * load >= 1``: the link is never idle while a layer is ready;
- a chunk that is not the prompt's last has the next chunk's time as well. The rule assumes that the next chunk is the
  last one. If both are of one size, a chunk goes in one WRITE up to a load of ``1 / (2 * SAFETY)``;
- nothing waits before an engine knows the time of a layer and of the link. A prompt's first layer goes at once: it
  shows how fast the link is now, before many layers wait for it.

Each of the ``writes`` prompts of the step posts a WRITE of its own. Times of small WRITEs do not predict a large one's.
So ready layers also leave once each of these WRITEs has ``proven_bytes``: the WRITEs of a new link grow step by step,
and each step shows whether the next one is safe.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

SAFETY = 2.0
"""The link may be this many times as slow as estimated before a WRITE is late."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """Running estimates, in seconds. None: nothing is known yet.

    ``layer_s`` is the computation of one layer of this step, ``byte_s`` the transfer of one byte, ``write_s`` the cost
    of a WRITE of any size. They hold for WRITEs of up to ``proven_bytes`` bytes.
    """

    layer_s: float | None = None
    byte_s: float | None = None
    write_s: float = 0.0
    proven_bytes: float = math.inf


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a step with its chunks for one link. The chunks are of ``writes`` prompts; each prompt's chunk
    leaves in a WRITE of its own.

    ``ready`` of the step's ``layers`` are in P's memory. ``layer_bytes`` are the bytes of one layer of all chunks.
    ``unposted_bytes`` are the bytes for this link that are planned and not posted, other prompts' included. WRITEs in
    flight keep the link busy for ``busy_s`` seconds if it is ``SAFETY`` times as slow as estimated. ``next_part`` is
    the size of the next chunk divided by that of this one: 0 for the prompt's last, 1 at most. ``probed``: a WRITE of
    one of these prompts has landed, or any WRITE on this link within the last second.
    """

    layers: int
    ready: int
    writes: int
    layer_bytes: int
    unposted_bytes: int
    busy_s: float
    next_part: float
    probed: bool


def layers_to_wait(speeds: Speeds, progress: Progress) -> int:
    """The number of further layers for which the ready ones wait. 0: they leave now, in one WRITE."""
    to_come = progress.layers - progress.ready
    if speeds.layer_s is None or speeds.byte_s is None or not progress.probed or to_come <= 0:
        return 0
    if SAFETY * progress.layer_bytes * speeds.byte_s >= speeds.layer_s:
        return 0
    next_layers = progress.next_part * progress.layers
    layers_left, bytes_left = to_come + next_layers, progress.unposted_bytes + next_layers * progress.layer_bytes
    transfer_s = progress.busy_s + SAFETY * (bytes_left - progress.layer_bytes) * speeds.byte_s
    transfer_s += progress.writes * speeds.write_s
    spare = layers_left - 2 - transfer_s / speeds.layer_s
    wait = min(to_come, math.floor(spare) + 1) if spare >= 0 else int(progress.busy_s > 0)
    proven_bytes = progress.writes * speeds.proven_bytes
    unproven = progress.unposted_bytes - (to_come - wait) * progress.layer_bytes - proven_bytes
    if unproven > 0:
        wait -= int(unproven // max(1, progress.layer_bytes))
    return max(0, wait)
