"""The engines that the tests use. Equal specs are one process, so tests choose from here."""

from tests.e2e.enginespec import (
    BLOCK_SIZE,
    LAYERWISE,
    STOCK,
    TRACE,
    EngineSpec,
    beside_example,
    beside_store,
    transfer,
)
from tests.e2e.models import SHAPE

PREFIX_CACHING = (("enable_prefix_caching", True),)
# 2,560 tokens at most in 90 blocks: two prompts of 2,000 tokens cannot be in memory at once.
TIGHT_CACHE = (("max_model_len", 2560), ("num_gpu_blocks_override", 90), ("scheduler_reserve_full_isl", False))
CORRUPTING_MODULE = "tests.e2e.corrupting"

# granularity="layer": every layer of every chunk is a WRITE of its own, for the most interleavings.
P_LAYER = EngineSpec("P-layer", "P", transfer(LAYERWISE, granularity="layer", trace_dir=TRACE))
P_FABRIC = EngineSpec(
    "P-fabric", "P", transfer(LAYERWISE, backends=["LIBFABRIC"], granularity="layer", trace_dir=TRACE)
)
P_AUTO = EngineSpec("P-auto", "P", transfer(LAYERWISE, trace_dir=TRACE))
P_WHOLE = EngineSpec("P-whole", "P", transfer(LAYERWISE, layerwise=False, trace_dir=TRACE))
P_CACHING = EngineSpec("P-caching", "P", transfer(LAYERWISE, granularity="layer", trace_dir=TRACE), PREFIX_CACHING)
P_STOCK = EngineSpec("P-stock", "P", transfer(STOCK))
# ExampleConnector knows neither several KV cache groups nor chunks of a prompt.
NO_GROUPS = (("disable_hybrid_kv_cache_manager", True),)
P_STORE = EngineSpec(
    "P-store",
    "P",
    beside_example(LAYERWISE, "kv_producer", store=f"{TRACE}/store", granularity="layer", trace_dir=TRACE),
    (*NO_GROUPS, ("max_num_batched_tokens", 4096)),
)
# Chunks that end in the middle of a block.
P_UNALIGNED = EngineSpec(
    "P-unaligned",
    "P",
    transfer(LAYERWISE, granularity="layer", trace_dir=TRACE),
    (("max_num_batched_tokens", 90),),
)
P_WRONG = EngineSpec(
    "P-wrong",
    "P",
    transfer("Corrupting", module_path=CORRUPTING_MODULE, granularity="layer", trace_dir=TRACE, verify=1.0),
)
P_SILENT = EngineSpec(
    "P-silent",
    "P",
    transfer("SilentAttention", module_path="tests.e2e.silent", granularity="layer", trace_dir=TRACE),
)

# The store is asked before layerpush, or after it.
P_BEHIND_STORE, P_BEFORE_STORE = (
    EngineSpec(
        name,
        "P",
        beside_store(transfer(LAYERWISE, granularity="layer", trace_dir=TRACE), "kv_producer", first=first),
        PREFIX_CACHING,
    )
    for name, first in (("P-behind-store", True), ("P-before-store", False))
)
P_STEPS_IN_FLIGHT = EngineSpec(
    "P-steps-in-flight",
    "P",
    beside_store(
        transfer(LAYERWISE, granularity="layer", trace_dir=TRACE), "kv_producer", first=True, steps_in_flight=True
    ),
    PREFIX_CACHING,
)
P_LATE = EngineSpec(
    "P-late",
    "P",
    transfer("Late", module_path="tests.e2e.latekv", granularity="layer", trace_dir=TRACE),
    PREFIX_CACHING,
)

R = EngineSpec("R", "R", None)
D_LAYER = EngineSpec("D-layer", "D", transfer(LAYERWISE))
D_FABRIC = EngineSpec("D-fabric", "D", transfer(LAYERWISE, backends=["LIBFABRIC"]))
# Room for 1,024 tokens: three prompts of 300, but not with answers of 60.
D_CACHING = EngineSpec("D-caching", "D", transfer(LAYERWISE), PREFIX_CACHING)
D_NO_GROUPS = EngineSpec("D-no-groups", "D", transfer(LAYERWISE), NO_GROUPS)
D_STOCK = EngineSpec("D-stock", "D", transfer(STOCK))
D_BEHIND_STORE, D_BEFORE_STORE = (
    EngineSpec(
        name,
        "D",
        beside_store(transfer(LAYERWISE, on_failed_load="recompute"), "kv_consumer", first=first),
        PREFIX_CACHING,
    )
    for name, first in (("D-behind-store", True), ("D-before-store", False))
)
D_RECOMPUTING = EngineSpec("D-recomputing", "D", transfer(LAYERWISE, on_failed_load="recompute"))

SHARED = frozenset({R, P_LAYER, P_AUTO, P_STOCK, D_LAYER, D_STOCK, D_CACHING})
"""The engines of several files."""

CORRUPTED_LAYER = 5
SWEPT_LAYER = 3
KV_BYTES_PER_BLOCK_AND_LAYER = BLOCK_SIZE * SHAPE.kv_bytes_per_token // SHAPE.layers
