"""Every metric of layerpush: its name, its labels, its buckets and what it means. Pure.

``docs/metrics.md`` is made from this table, and the Prometheus objects are. To add a metric, add it here and record it
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
    """Which engine records it: the one that prefills, the one that decodes, or either."""

    PREFILL = "P"
    DECODE = "D"
    BOTH = "P, D"


@dataclass(frozen=True, slots=True)
class Metric:
    """``values`` are the known values of ``label`` and what each means; a counter may meet others later.

    ``buckets`` are a histogram's upper bounds, ascending; one without a bound follows them.
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
        """As it is registered."""
        return PREFIX + self.key

    @property
    def exposed_name(self) -> str:
        """As it is scraped; a histogram's has ``_bucket``, ``_sum`` and ``_count`` behind it."""
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
        "whole": "completed; pushed whole as the configuration (`layerwise: false`) or the request asks",
        "fallback": "completed; pushed whole because it could not be pushed by layer, or the prompt was short",
        "late_registration": "completed; pushed whole because D registered only after prefill had finished",
        "failed": "D was not told that it is complete; the log says why",
        "unclaimed": "no D had registered when P gave the blocks up: its request may have left while D's still waited",
        "cancelled": "P's request was aborted, or D wanted its blocks back",
    },
)
FALLBACKS = Metric(
    "fallbacks",
    Kind.COUNTER,
    Side.PREFILL,
    "Pushes of whole requests by an engine that is to push by layer, by reason; however they ended.",
    "reason",
    {
        "engine": "P cannot tell its KV cache apart by layer; said in its log at start",
        "decode_engine": "D's blocks or ranks do not fit P's; said in P's log at the first push to that D",
        "short_prompt": "fewer tokens than `layerwise_min_tokens`",
        "late_registration": "no D had registered when prefill finished",
    },
)
EXPOSED = Metric(
    "exposed_seconds",
    Kind.HISTOGRAM,
    Side.PREFILL,
    "What a completed push adds after prefill: from when the last layer was ready and D had registered until the "
    "completion was sent.",
    buckets=SECONDS,
)
TRANSFER = Metric(
    "transfer_seconds",
    Kind.HISTOGRAM,
    Side.PREFILL,
    "How long at least one WRITE of a completed push was on its way.",
    buckets=SECONDS,
)
WRITE_BYTES = Metric(
    "write_bytes",
    Kind.HISTOGRAM,
    Side.PREFILL,
    "Bytes of a WRITE that has landed. The sum is what was pushed, the count how many WRITEs it took.",
    buckets=BYTES,
)
WRITE_DESCRIPTORS = Metric(
    "write_descriptors", Kind.HISTOGRAM, Side.PREFILL, "Descriptors of a WRITE that has landed.", buckets=COUNTS
)
WRITE_LAYERS = Metric(
    "write_layers",
    Kind.HISTOGRAM,
    Side.PREFILL,
    "Layers of a layer-wise WRITE that has landed: how many it took together.",
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
        "gathered": "put together in P's staging ring, into D's KV cache",
        "packed": "put together in P's staging ring, into D's staging ring",
    },
)
WRITE_ESTIMATE = Metric(
    "write_estimate_seconds",
    Kind.HISTOGRAM,
    Side.PREFILL,
    "How long a WRITE was estimated to take by the plan that it went by; of WRITEs that have an estimate and landed.",
    buckets=SECONDS,
)
WRITE_SECONDS = Metric(
    "write_seconds",
    Kind.HISTOGRAM,
    Side.PREFILL,
    "How long those WRITEs took, from the choice of the plan until it was seen that they had landed.",
    buckets=SECONDS,
)
FAILED_WRITES = Metric(
    "failed_writes", Kind.COUNTER, Side.PREFILL, "WRITEs that ended in an error, or could not be posted."
)
LAYERS_READY = Metric(
    "layers",
    Kind.COUNTER,
    Side.PREFILL,
    "(chunk, layer) pairs of pushes that are over, by how P found out that they were computed.",
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
    "Registrations whose request has not come to P yet: D waits for P.",
)
LOADS = Metric(
    "loads",
    Kind.COUNTER,
    Side.DECODE,
    "Awaited pushes that are over for their request, by how they ended.",
    "outcome",
    {
        "loaded": "every byte is there",
        "failed": "nothing came, or not everything; nobody writes any more",
        "parked": "failed while P may still write: the blocks are set aside",
        "aborted": "D's request was aborted meanwhile",
        "refused": "it could not even be registered",
    },
)
LOAD = Metric(
    "load_seconds",
    Kind.HISTOGRAM,
    Side.DECODE,
    "From D's registration until every byte is there; P's prefill is part of it.",
    buckets=LONG_SECONDS,
)
AWAITED_LOADS = Metric("awaited_loads", Kind.GAUGE, Side.DECODE, "Pushes that D waits for, parked ones included.")
PARKED_REQUESTS = Metric(
    "parked_requests",
    Kind.GAUGE,
    Side.DECODE,
    "Requests that are over and whose blocks stay out of use, because a P may still write them.",
)
PARKED_BLOCKS = Metric("parked_blocks", Kind.GAUGE, Side.DECODE, "KV cache blocks that are out of use for that reason.")
LOST_PEERS = Metric(
    "lost_peers",
    Kind.COUNTER,
    Side.DECODE,
    "Times that D gave up waiting for a rank of a P.",
    "how",
    {
        "silent": "it said nothing for `peer_timeout_s`",
        "gone": "its process is known to have ended",
    },
)
DROPPED_MESSAGES = Metric(
    "dropped_messages",
    Kind.COUNTER,
    Side.BOTH,
    "What others sent and was not acted on, by kind; the log has the texts.",
    "kind",
    {
        "bad_notification": "bytes that are no message",
        "bad_kv_transfer_params": "a request whose `kv_transfer_params` are bad or name a host that is not allowed",
        "foreign_word": "to D: about a push that this agent was not asked for",
        "late_completion": "to D: about a push that nobody waits for",
        "foreign_cancel": "to P: for a registration of another engine",
        "id_in_use": "to P: a second registration under the id of one that is being served",
        "engine_id_in_use": "to P: a registration under the name of another, living engine",
        "notifications": "NIXL could not hand out what had come",
        "other": "kinds beyond the 64 that are told apart",
    },
)
DROPPED_RECORDS = Metric(
    "dropped_records",
    Kind.COUNTER,
    Side.PREFILL,
    "What found its queue full.",
    "queue",
    {
        "trace": "pushes and loads that are missing in the trace file",
        "hooks": "layers that were found by the sweep instead",
    },
)
RING_BYTES = Metric(
    "staging_ring_bytes",
    Kind.GAUGE,
    Side.BOTH,
    "Staging memory of the rank that has the most; 0: it packs nothing. The log says why if nobody asked for that.",
)
RING_USED_BYTES = Metric(
    "staging_ring_used_bytes",
    Kind.GAUGE,
    Side.BOTH,
    "Of that what is taken, on the rank that uses the most: on P by WRITEs under way, on D by requests' windows.",
)
WRITER_LAG = Metric(
    "writer_lag_seconds",
    Kind.HISTOGRAM,
    Side.BOTH,
    "The longest that the writer thread left its queues alone since the last report; one value per report and rank.",
    buckets=SECONDS,
)
RANKS = Metric(
    "ranks",
    Kind.GAUGE,
    Side.BOTH,
    "Worker processes of the engine. What is counted per rank, divided by it, is per request.",
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
