"""Compares KV that has landed with the checksums that prefill ranks have taken of theirs. Writer thread only."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from layerpush.core.wire import NULL_BLOCK, PartSums, Registration
from layerpush.telemetry.metrics.catalog import VERIFIED_PARTS, VERIFY_MISMATCHES
from layerpush.telemetry.metrics.recorder import Recorder
from layerpush.telemetry.trace_records import LoadRecord
from layerpush.transport.kv_parts import KvParts, LayerKv, Place

MOST_BYTES = 64 << 20
"""The most KV that is compared for one message. A prefill rank of layerpush sends checksums of half of it at most."""

logger = logging.getLogger(f"vllm.{__name__}")


class _NoPlaceError(ValueError):
    """A part of a prompt is not among a load's blocks. The text has the reason."""


class Checks:
    """``parts`` is this rank's KV."""

    def __init__(self, parts: KvParts, recorder: Recorder) -> None:
        self._parts = parts
        self._recorder = recorder

    def difference(
        self, registration: Registration, tokens: int, sums: Sequence[PartSums], record: LoadRecord
    ) -> str | None:
        """The first part of a load that differs from a prefill rank's, with both checksums; None if there is none.

        The prompt has ``tokens`` tokens, and ``sums`` are the prefill rank's checksums. ``record`` gets the number of
        parts and the time. What cannot be compared is logged: its bytes may be right.
        """
        began = time.perf_counter()
        try:
            left = MOST_BYTES
            for row in sums:
                left -= self._size(row)
                if left < 0:
                    raise _NoPlaceError(f"its checksums are of more than {MOST_BYTES >> 20} MiB")
                if (found := self._wrong(row, registration, tokens, record)) is not None:
                    self._recorder.count(VERIFY_MISMATCHES)
                    return found
        except Exception as error:  # noqa: BLE001  a device without memory, a peer of another set-up: the load goes on
            self._not_compared(registration, error)
        finally:
            record.verify_s += time.perf_counter() - began
        return None

    def _not_compared(self, registration: Registration, error: Exception) -> None:
        logger.warning("the KV of %s is not compared with P's: %s", registration.request_id, error)

    def _size(self, row: PartSums) -> int:
        """The bytes that are read for a row: whole kernel blocks. Raises ``_NoPlaceError``."""
        layer, heads = self._parts.layers.get(row.layer), range(row.first_head, row.end_head)
        own = range(0) if layer is None else self._parts.heads(row.layer)
        if layer is None or not own.start <= heads.start < heads.stop <= own.stop:
            raise _NoPlaceError(f"this rank does not have heads {heads.start} to {heads.stop - 1} of {row.layer}")
        count = len(range(row.start, row.end, row.unit))
        if len(row.values) != 4 * count:
            raise _NoPlaceError(f"{len(row.values)} bytes of checksums for {count} parts of {row.layer}")
        return count * layer.size(heads, layer.kernel_tokens)

    def _wrong(self, row: PartSums, registration: Registration, tokens: int, record: LoadRecord) -> str | None:
        layer, heads = self._parts.layers[row.layer], range(row.first_head, row.end_head)
        starts = range(row.start, row.end, row.unit)
        parts = [(start, min(start + row.unit, row.end)) for start in starts]
        places = [_place(layer, start, end, registration, tokens) for start, end in parts]
        values = self._parts.checksums(row.layer, heads, places)
        self._recorder.count(VERIFIED_PARTS, number=len(parts))
        record.verified_parts += len(parts)
        for index, ((start, end), place) in enumerate(zip(parts, places, strict=True)):
            ours, theirs = values[4 * index :][:4], row.values[4 * index :][:4]
            if ours != theirs:
                where = f"layer {row.layer}, tokens {start} to {end - 1}, block {place.block // layer.kernel_blocks}"
                return f"{where}: checksum {ours.hex()}, on the prefill rank {theirs.hex()}"
        return None


def _place(layer: LayerKv, start: int, end: int, registration: Registration, tokens: int) -> Place:
    """The place of tokens ``[start, end)`` of a prompt of ``tokens``. Raises ``_NoPlaceError``."""
    kernel, group = layer.kernel_tokens, registration.local_block_ids[layer.group]
    block, inside = divmod(start, kernel)
    number, page = divmod(block, layer.kernel_blocks)
    index = number - _skipped(layer, tokens, len(group))
    if not 0 <= index < len(group) or group[index] == NULL_BLOCK or inside + end - start > kernel:
        raise _NoPlaceError(f"tokens {start} to {end - 1} are in no block of the load")
    return Place(group[index] * layer.kernel_blocks + page, inside, end - start)


def _skipped(layer: LayerKv, tokens: int, registered: int) -> int:
    """The number of a prompt's first blocks that the load does not have: they were in the prefix cache."""
    return -(-tokens // (layer.kernel_tokens * layer.kernel_blocks)) - registered
