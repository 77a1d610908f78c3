"""Every metric of layerpush: its name, its labels, its buckets and its meaning. Pure.

``docs/metrics.md`` and the Prometheus objects are made from this table. To add a metric, add it here and record it
under its ``key``.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

PREFIX = "vllm:layerpush_"

NO_LABEL = ""
"""The label value under which a counter without a label is recorded."""


class Kind(enum.Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Side(enum.Enum):
    """The engine that records a metric: the prefill engine, the decode engine, or either."""

    PREFILL = "P"
    DECODE = "D"
    BOTH = "P, D"


@dataclass(frozen=True, slots=True)
class Metric:
    """``values`` maps the known values of ``label`` to their meanings; a counter may get other values too.

    ``buckets`` are a histogram's upper bounds, ascending; a last bucket without a bound follows them.
    """

    key: str
    kind: Kind
    side: Side
    meaning: str
    label: str | None = None
    values: Mapping[str, str] = field(default_factory=dict)
    buckets: tuple[float, ...] = ()

    @property
    def name(self) -> str:
        """The name that is registered with Prometheus."""
        return PREFIX + self.key

    @property
    def exposed_name(self) -> str:
        """The name that Prometheus scrapes; a histogram's gets ``_bucket``, ``_sum`` and ``_count`` appended."""
        return self.name + "_total" if self.kind is Kind.COUNTER else self.name

    @property
    def known_values(self) -> tuple[str, ...]:
        return tuple(self.values) if self.label is not None else (NO_LABEL,)


SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
LONG_SECONDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 240.0, 480.0)
BYTES = tuple(float(1 << power) for power in range(12, 35, 2))
COUNTS = tuple(float(1 << power) for power in range(0, 19, 2))
LAYERS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)

PUSHES = Metric(
    "pushes",
    Kind.COUNTER,
    Side.PREFILL,
    "Pushes that are over, by how they ended.",
    "outcome",
    {
        "layerwise": "completed; pushed while prefill ran",
        "whole": "completed; pushed whole because the configuration says so (`layerwise: false`)",
        "fallback": "completed; pushed whole because it could not be pushed by layer, or the prompt was short",
        "late_registration": "completed; pushed whole because D registered only after prefill had finished",
        "failed": "P sent no completion; the log says why",
        "unclaimed": "P freed the blocks before a D had registered; D's request may still have waited",
        "cancelled": "P's request was aborted, or D wanted its blocks back",
    },
)
FALLBACKS = Metric(
    "fallbacks",
    Kind.COUNTER,
    Side.PREFILL,
    "Whole-request pushes of an engine that is to push by layer, by reason, with any outcome.",
    "reason",
    {
        "engine": "P's KV cache cannot be divided by layer; P's log says so at start",
        "decode_engine": "D's blocks or ranks do not fit P's; P's log says so at the first push to that D",
        "short_prompt": "fewer tokens than `layerwise_min_tokens`",
        "late_registration": "no D had registered when prefill finished",
    },
)
EXPOSED = Metric(
    "exposed_seconds",
    Kind.HISTOGRAM,
    Side.PREFILL,
    "Time that a completed push adds after prefill. It begins when the last layer is ready and D has registered, and "
    "ends when the completion is sent.",
    buckets=SECONDS,
)
TRANSFER = Metric(
    "transfer_seconds",
    Kind.HISTOGRAM,
    Side.PREFILL,
    "Time in which at least one WRITE of a completed push was on the wire.",
    buckets=SECONDS,
)
WRITE_BYTES = Metric(
    "write_bytes",
    Kind.HISTOGRAM,
    Side.PREFILL,
    "Bytes of a WRITE that has landed. The sum is the number of bytes pushed, the count the number of WRITEs.",
    buckets=BYTES,
)
WRITE_DESCRIPTORS = Metric(
    "write_descriptors", Kind.HISTOGRAM, Side.PREFILL, "Descriptors of a WRITE that has landed.", buckets=COUNTS
)
WRITE_LAYERS = Metric(
    "write_layers",
    Kind.HISTOGRAM,
    Side.PREFILL,
    "Number of layers in a layer-wise WRITE that has landed.",
    buckets=LAYERS,
)
WRITES = Metric(
    "writes",
    Kind.COUNTER,
    Side.PREFILL,
    "WRITEs that have landed, by plan.",
    "plan",
    {
        "direct": "from P's KV cache into D's",
        "gathered": "gathered into P's staging ring, from there into D's KV cache",
        "packed": "gathered into P's staging ring, from there into D's staging ring and then into D's KV cache",
    },
)
WRITE_ESTIMATE = Metric(
    "write_estimate_seconds",
    Kind.HISTOGRAM,
    Side.PREFILL,
    "Estimated time of a WRITE by its plan, for WRITEs that have an estimate and have landed.",
    buckets=SECONDS,
)
WRITE_SECONDS = Metric(
    "write_seconds",
    Kind.HISTOGRAM,
    Side.PREFILL,
    "Measured time of those WRITEs, from the choice of the plan until P saw that they had landed.",
    buckets=SECONDS,
)
FAILED_WRITES = Metric(
    "failed_writes", Kind.COUNTER, Side.PREFILL, "WRITEs that ended in an error, or could not be posted."
)
LAYERS_READY = Metric(
    "layers",
    Kind.COUNTER,
    Side.PREFILL,
    "(chunk, layer) pairs of pushes that are over, by how P detected that they were computed.",
    "found",
    {
        "hooked": "as soon as it was computed, by the layer's hook",
        "swept": "at the end of the step: no overlap with this step",
    },
)
ACTIVE_PUSHES = Metric("active_pushes", Kind.GAUGE, Side.PREFILL, "Pushes that are not over.")
UNCLAIMED_PUSHES = Metric(
    "unclaimed_pushes", Kind.GAUGE, Side.PREFILL, "Pushes for which no D has registered yet: P waits for D."
)
PENDING_REGISTRATIONS = Metric(
    "pending_registrations",
    Kind.GAUGE,
    Side.PREFILL,
    "Registrations whose request has not reached P yet: D waits for P.",
)
LOADS = Metric(
    "loads",
    Kind.COUNTER,
    Side.DECODE,
    "Loads that are over for their request, by how they ended.",
    "outcome",
    {
        "loaded": "all blocks have arrived",
        "failed": "not all blocks have arrived, and no P may still write",
        "parked": "failed while a P may still write: the blocks are set aside",
        "aborted": "D's request was aborted meanwhile",
        "refused": "the load could not be registered",
    },
)
LOAD = Metric(
    "load_seconds",
    Kind.HISTOGRAM,
    Side.DECODE,
    "Time from D's registration until all blocks have arrived; P's prefill is part of it.",
    buckets=LONG_SECONDS,
)
AWAITED_LOADS = Metric("awaited_loads", Kind.GAUGE, Side.DECODE, "Loads that D waits for, including parked ones.")
PARKED_REQUESTS = Metric(
    "parked_requests",
    Kind.GAUGE,
    Side.DECODE,
    "Requests that are over, but whose blocks stay out of use because a P may still write them.",
)
PARKED_BLOCKS = Metric("parked_blocks", Kind.GAUGE, Side.DECODE, "KV cache blocks that are out of use for that reason.")
LOST_PEERS = Metric(
    "lost_peers",
    Kind.COUNTER,
    Side.DECODE,
    "Times that D gave up waiting for a rank of a P.",
    "how",
    {
        "silent": "no message for `peer_timeout_s`",
        "gone": "its process has ended",
    },
)
DROPPED_MESSAGES = Metric(
    "dropped_messages",
    Kind.COUNTER,
    Side.BOTH,
    "Messages and requests that were ignored, by kind; the log has the texts.",
    "kind",
    {
        "bad_notification": "an invalid notification",
        "bad_kv_transfer_params": "a request whose `kv_transfer_params` are bad or name a host that is not allowed",
        "foreign_word": "to D: about a push that D did not ask this agent for",
        "late_completion": "to D: about a push that D does not wait for",
        "foreign_cancel": "to P: for a registration of another engine",
        "id_in_use": "to P: a second registration under the id of one that is being served",
        "engine_id_in_use": "to P: a registration under the name of another, living engine",
        "notifications": "NIXL could not return the notifications that had arrived",
        "other": "kinds beyond the first 64",
    },
)
DROPPED_RECORDS = Metric(
    "dropped_records",
    Kind.COUNTER,
    Side.PREFILL,
    "Records that were dropped because their queue was full.",
    "queue",
    {
        "trace": "pushes and loads that are missing from the trace file",
        "hooks": "layers that the sweep found instead",
    },
)
RING_BYTES = Metric(
    "staging_ring_bytes",
    Kind.GAUGE,
    Side.BOTH,
    "Staging memory of the rank that has the most; 0: it packs nothing. Unless that is configured, the log says why.",
)
RING_USED_BYTES = Metric(
    "staging_ring_used_bytes",
    Kind.GAUGE,
    Side.BOTH,
    "Used part of it, on the rank that uses the most: on P for WRITEs under way, on D for requests' windows.",
)
WRITER_LAG = Metric(
    "writer_lag_seconds",
    Kind.HISTOGRAM,
    Side.BOTH,
    "Longest time that the writer thread left its queues waiting since the last report; one value per report and rank.",
    buckets=SECONDS,
)
RANKS = Metric(
    "ranks",
    Kind.GAUGE,
    Side.BOTH,
    "Worker processes of the engine. Counts per rank divided by this number are counts per request.",
)

CATALOG: tuple[Metric, ...] = (
    PUSHES, FALLBACKS, EXPOSED, TRANSFER,
    WRITES, WRITE_BYTES, WRITE_DESCRIPTORS, WRITE_LAYERS, WRITE_ESTIMATE, WRITE_SECONDS,
    FAILED_WRITES, LAYERS_READY,
    ACTIVE_PUSHES, UNCLAIMED_PUSHES, PENDING_REGISTRATIONS,
    LOADS, LOAD, AWAITED_LOADS, PARKED_REQUESTS, PARKED_BLOCKS, LOST_PEERS,
    DROPPED_MESSAGES, DROPPED_RECORDS, RING_BYTES, RING_USED_BYTES, WRITER_LAG, RANKS,
)  # fmt: skip
BY_KEY: Mapping[str, Metric] = MappingProxyType({metric.key: metric for metric in CATALOG})
