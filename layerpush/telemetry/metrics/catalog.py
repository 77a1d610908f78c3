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
        """The label values that ``/metrics`` shows from the start, at 0."""
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
    "Ended pushes, by outcome.",
    "outcome",
    {
        "layerwise": "completed; pushed during prefill",
        "whole": "completed; pushed whole because the configuration (`layerwise: false`) or the request says so",
        "fallback": "completed; pushed whole because push by layer was impossible, or the prompt was short",
        "late_registration": "completed; pushed whole because D registered only after prefill had finished",
        "failed": "P sent no completion; the log has the reason",
        "unclaimed": "no D registered before P freed the blocks",
        "cancelled": "P's request was aborted, or D cancelled it",
    },
)
FALLBACKS = Metric(
    "fallbacks",
    Kind.COUNTER,
    Side.PREFILL,
    "Whole pushes while `layerwise` is on, by reason; with any outcome.",
    "reason",
    {
        "engine": "P cannot separate its KV cache by layer; P logs the reason at start",
        "decode_engine": "D's blocks or ranks do not fit P's; P logs the reason at the first push to that D",
        "short_prompt": "fewer tokens than `layerwise_min_tokens`",
        "late_registration": "no D had registered when prefill finished",
    },
)
EXPOSED = Metric(
    "exposed_seconds",
    Kind.HISTOGRAM,
    Side.PREFILL,
    "Time that a completed push adds after prefill: from the last layer being ready until the last WRITE has landed, "
    "on the slowest rank. It includes the wait for a D that registers late: see `pushes` by `outcome`.",
    buckets=SECONDS,
)
TRANSFER = Metric(
    "transfer_seconds",
    Kind.HISTOGRAM,
    Side.PREFILL,
    "Time with at least one WRITE of a completed push on the wire, on the rank with the longest.",
    buckets=SECONDS,
)
WRITE_BYTES = Metric(
    "write_bytes",
    Kind.HISTOGRAM,
    Side.PREFILL,
    "Bytes per landed WRITE. The sum is all pushed bytes, the count the number of WRITEs.",
    buckets=BYTES,
)
WRITE_DESCRIPTORS = Metric(
    "write_descriptors", Kind.HISTOGRAM, Side.PREFILL, "Descriptors per landed WRITE.", buckets=COUNTS
)
WRITE_LAYERS = Metric(
    "write_layers",
    Kind.HISTOGRAM,
    Side.PREFILL,
    "Layers per landed layer-wise WRITE.",
    buckets=LAYERS,
)
WRITES = Metric(
    "writes",
    Kind.COUNTER,
    Side.PREFILL,
    "Landed WRITEs, by plan.",
    "plan",
    {
        "direct": "from P's KV cache into D's",
        "gathered": "collected in P's staging ring, into D's KV cache",
    },
)
WRITE_ESTIMATE = Metric(
    "write_estimate_seconds",
    Kind.HISTOGRAM,
    Side.PREFILL,
    "Estimated time of a landed WRITE by its plan; only of WRITEs with an estimate.",
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
    "failed_writes", Kind.COUNTER, Side.PREFILL, "WRITEs that ended in an error, or that NIXL could not post."
)
REWOUND_PUSHES = Metric(
    "rewound_pushes",
    Kind.COUNTER,
    Side.PREFILL,
    "Completed pushes of which vLLM took back a step afterwards: D may have answered from wrong KV, and P logs the "
    "request. Not 0: another connector on P reports lost blocks too late.",
)
LAYERS_READY = Metric(
    "layers",
    Kind.COUNTER,
    Side.PREFILL,
    "(chunk, layer) pairs of ended pushes, by how P found them ready; every rank counts its own.",
    "found",
    {
        "hooked": "by the layer's hook, as soon as it was computed",
        "swept": "by the sweep at the end of the step: no overlap with this step",
    },
)
ACTIVE_PUSHES = Metric("active_pushes", Kind.GAUGE, Side.PREFILL, "Pushes that have not ended.")
UNCLAIMED_PUSHES = Metric(
    "unclaimed_pushes", Kind.GAUGE, Side.PREFILL, "Pushes without a registration yet: P waits for D."
)
PENDING_REGISTRATIONS = Metric(
    "pending_registrations",
    Kind.GAUGE,
    Side.PREFILL,
    "Registrations without a request on P yet: D waits for P.",
)
LOADS = Metric(
    "loads",
    Kind.COUNTER,
    Side.DECODE,
    "Ended loads, by outcome.",
    "outcome",
    {
        "loaded": "every byte is there",
        "unregistered": "P could not begin it; its blocks went to another request, and it is registered again later",
        "failed": "bytes are missing; no P rank can write any more",
        "parked": "failed while P may still write: the blocks stay parked",
        "aborted": "D's request was aborted",
        "refused": "D could not register it",
    },
)
LOAD = Metric(
    "load_seconds",
    Kind.HISTOGRAM,
    Side.DECODE,
    "Time from D's registration until every byte is there on the slowest rank, including P's prefill.",
    buckets=LONG_SECONDS,
)
KEPT_TOKENS = Metric(
    "kept_tokens",
    Kind.COUNTER,
    Side.DECODE,
    "Tokens of prompts whose load failed or was aborted: their KV had landed, and is in the prefix cache since then.",
)
VERIFIED_PARTS = Metric(
    "verified_parts",
    Kind.COUNTER,
    Side.DECODE,
    "Parts of KV (of a layer and a block) whose checksums D has compared with P's, because of `verify`; every rank "
    "counts its own.",
)
VERIFY_MISMATCHES = Metric(
    "verify_mismatches",
    Kind.COUNTER,
    Side.DECODE,
    "Loads that failed on a rank because their KV differs from P's; the log has layer, block and P.",
)
HAND_OVER = Metric(
    "hand_over_seconds",
    Kind.HISTOGRAM,
    Side.DECODE,
    "D's part of the hand-over: from the reading of the last completion until the engine has the first token. One "
    "value per request; none if a rank is on another host than the scheduler. The next three metrics are its parts.",
    buckets=SECONDS,
)
HAND_OVER_REPORT = Metric(
    "hand_over_report_seconds",
    Kind.HISTOGRAM,
    Side.DECODE,
    "From the reading of the last completion until the scheduler has the report of all ranks: the rest of the current "
    "step, or the wake-up of an idle engine.",
    buckets=SECONDS,
)
HAND_OVER_SCHEDULE = Metric(
    "hand_over_schedule_seconds",
    Kind.HISTOGRAM,
    Side.DECODE,
    "From that report until a step begins with the request in it.",
    buckets=SECONDS,
)
HAND_OVER_FIRST_STEP = Metric(
    "hand_over_first_step_seconds",
    Kind.HISTOGRAM,
    Side.DECODE,
    "From the beginning of that step until the engine has the first token: D's forward pass and its sampling.",
    buckets=SECONDS,
)
EARLY_ANSWERS = Metric(
    "early_answers",
    Kind.COUNTER,
    Side.PREFILL,
    "Requests that P has answered before it has computed them, because of `answer_early`.",
    "event",
    {
        "answered": "its router has the answer",
        "withdrawn": "then D did not want the KV any more, and P aborted the request",
    },
)
FIRST_TOKENS = Metric(
    "first_tokens",
    Kind.COUNTER,
    Side.DECODE,
    "Requests with a load, by the origin of their first token, while `first_token` is `prefill`.",
    "origin",
    {
        "prefill": "P: D has loaded it with the KV",
        "engine": "D: the engine cannot take over P's token; it logs the reason at start",
        "logprobs": "D: the request wants log probabilities",
        "structured_output": "D: a grammar has to see the token",
        "penalties": "D: penalties, `min_tokens`, `bad_words` or a thinking budget have to see the token",
        "seed": "D: the request's random numbers begin with its first token",
        "n": "D: one of several answers to a prompt",
        "multimodal": "D: the prompt is more than tokens",
        "resumed": "D: the request has run before, or its prompt goes on",
        "ends": "D: the token is the answer's last: `max_tokens`, or the end of the context",
        "not_promised": "D: P is not a layerpush engine, or an older one",
        "late": "D: P's token had not come 50 ms after the last byte of KV",
        "other_sampling": "D: P has no token, or sampled with other parameters, whose names D logs",
        "invalid": "D: P's token is not in D's vocabulary",
        "no_block": "D: no block was free for the token's KV",
        "failed_load": "D: the load has failed",
    },
)
AWAITED_LOADS = Metric("awaited_loads", Kind.GAUGE, Side.DECODE, "Loads that have not ended, parked ones included.")
PARKED_REQUESTS = Metric(
    "parked_requests",
    Kind.GAUGE,
    Side.DECODE,
    "Ended requests whose blocks are parked, because a P may still write them.",
)
WAITING_PROMPTS = Metric(
    "waiting_prompts",
    Kind.GAUGE,
    Side.DECODE,
    "Prompts of P that wait for blocks: they do not fit beside the running requests, or awaited prompts hold "
    "`awaited_share` of the KV cache.",
)
PARKED_BLOCKS = Metric("parked_blocks", Kind.GAUGE, Side.DECODE, "Parked blocks of the KV cache.")
LOST_PEERS = Metric(
    "lost_peers",
    Kind.COUNTER,
    Side.DECODE,
    "P ranks that a rank of D gave up waiting for.",
    "how",
    {
        "silent": "no message for `peer_timeout_s`",
        "gone": "D knows that its process has ended",
    },
)
DROPPED_MESSAGES = Metric(
    "dropped_messages",
    Kind.COUNTER,
    Side.BOTH,
    "Dropped messages of peers and clients, by kind; the log has the texts.",
    "kind",
    {
        "bad_notification": "bytes that are not a message",
        "bad_kv_transfer_params": "a request with bad `kv_transfer_params` or a host outside `allowed_hosts`",
        "foreign_status": "to D: a status from an agent without this registration",
        "late_completion": "to D: a status for an unknown load",
        "foreign_cancel": "to P: a `Cancel` for another engine's registration",
        "unknown_request": "to P: a registration of a request that did not come",
        "turn_not_kept": "to D: a registration for a turn that D does not keep",
        "other_prompt": "to P: a registration for a request with another prompt",
        "spare_answer": "to P: a registration for an answer that P does not have (`n`)",
        "refused_registration": "to P: a registration for a request that has ended, or went to another rank",
        "id_in_use": "to P: a second registration under the id of a current one",
        "engine_id_in_use": "to P: a registration under the id of another, living engine: each needs its own",
        "notifications": "NIXL could not hand over the received notifications",
        "other": "all kinds beyond the first 64",
    },
)
DROPPED_RECORDS = Metric(
    "dropped_records",
    Kind.COUNTER,
    Side.BOTH,
    "Lost records, by queue.",
    "queue",
    {
        "trace": "pushes, loads and first tokens that the trace file lacks",
        "hooks": "hook events; the sweep found their layers instead",
    },
)
RING_BYTES = Metric(
    "staging_ring_bytes",
    Kind.GAUGE,
    Side.BOTH,
    "Staging memory of the rank with the most; 0: nothing is gathered. The log has the reason if `packing` is not off.",
)
RING_USED_BYTES = Metric(
    "staging_ring_used_bytes",
    Kind.GAUGE,
    Side.BOTH,
    "Used staging memory of the rank with the most.",
)
WRITER_LAG = Metric(
    "writer_lag_seconds",
    Kind.HISTOGRAM,
    Side.BOTH,
    "Longest time that the writer thread ignored its queues since the last report; one value per report and rank.",
    buckets=SECONDS,
)
RANKS = Metric(
    "ranks",
    Kind.GAUGE,
    Side.BOTH,
    "Worker processes of the engine.",
)

CATALOG: tuple[Metric, ...] = (
    PUSHES, FALLBACKS, EXPOSED, TRANSFER,
    WRITES, WRITE_BYTES, WRITE_DESCRIPTORS, WRITE_LAYERS, WRITE_ESTIMATE, WRITE_SECONDS,
    FAILED_WRITES, REWOUND_PUSHES, LAYERS_READY,
    ACTIVE_PUSHES, UNCLAIMED_PUSHES, PENDING_REGISTRATIONS,
    LOADS, LOAD, HAND_OVER, HAND_OVER_REPORT, HAND_OVER_SCHEDULE, HAND_OVER_FIRST_STEP, FIRST_TOKENS, EARLY_ANSWERS,
    KEPT_TOKENS, VERIFIED_PARTS, VERIFY_MISMATCHES, AWAITED_LOADS, WAITING_PROMPTS, PARKED_REQUESTS, PARKED_BLOCKS,
    LOST_PEERS, DROPPED_MESSAGES, DROPPED_RECORDS, RING_BYTES, RING_USED_BYTES, WRITER_LAG, RANKS,
)  # fmt: skip
BY_KEY: Mapping[str, Metric] = MappingProxyType({metric.key: metric for metric in CATALOG})
