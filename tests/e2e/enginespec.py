"""The kind of a hosted engine: its role, its connector and the few engine options that the tests vary."""

import dataclasses
import json
from typing import Any, Literal

from tests.e2e.zoo import FAMILIES

Role = Literal["P", "D", "R"]
ModelName = str
"""A name in `tests.e2e.models`, or an architecture in `tests.e2e.zoo`."""
FailedLoad = Literal["recompute", "fail"]

LAYERWISE = "LayerwisePushConnector"
STOCK = "NixlPushConnector"

BLOCK_SIZE = 32
MAX_MODEL_LEN = 4096
PREFILL_TOKENS_PER_STEP = 256
TRACE = "$TRACE"
SCHEDULER_BLOCK_SIZE = "scheduler_block_size"
"""An option of ours: the scheduler's blocks, whatever the kernel's. vLLM's CPU platform gives MLA no other than 16."""


@dataclasses.dataclass(frozen=True)
class EngineSpec:
    """All differences between hosted engines. Equal specs share one process.

    `transfer` is the JSON of the KVTransferConfig without engine_id. A missing kv_role follows from the role. None: the
    plain reference engine. `options` are (name, value) pairs for vLLM's EngineArgs; their configurations are JSON.
    The host replaces "$TRACE" in `transfer` by its own trace directory, and "$MODEL" in a speculative_config by the
    model's directory.
    """

    name: str
    role: Role
    transfer: str | None
    options: tuple[tuple[str, Any], ...] = ()
    model: ModelName = "llama"

    @property
    def kv_role(self) -> str:
        return "kv_producer" if self.role == "P" else "kv_consumer"

    @property
    def ranks(self) -> int:
        """Tensor parallel size."""
        return int(dict(self.options).get("tensor_parallel_size", 1))

    @property
    def leaves_last_token(self) -> bool:
        """Whether this P leaves a prompt's last token to D. vLLM does with states: they cannot go back by a token."""
        family = FAMILIES.get(self.model)
        return self.role == "P" and family is not None and family.states > 0

    def engine_options(self, model: str) -> dict[str, Any]:
        """The keyword arguments of EngineArgs for the model at this path."""
        defaults: dict[str, Any] = {
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": MAX_MODEL_LEN,
            "block_size": BLOCK_SIZE,
            "max_num_seqs": 16,
            "max_num_batched_tokens": PREFILL_TOKENS_PER_STEP if self.role == "P" else MAX_MODEL_LEN,
            "enable_prefix_caching": False,
            "skip_tokenizer_init": True,
            "kv_cache_memory_bytes": 128 << 20,
            "attention_backend": "CPU_MLA",  # of latents only, and there not AMX_MLA where a CPU has it
        }
        options = defaults | dict(self.options)
        for name in ("speculative_config", "compilation_config"):
            if name in options:
                options[name] = json.loads(options[name].replace("$MODEL", model))
        return options

    def transfer_fields(self, trace_dir: str) -> dict[str, Any] | None:
        if self.transfer is None:
            return None
        fields: dict[str, Any] = json.loads(self.transfer.replace(TRACE, trace_dir))
        return {"kv_role": self.kv_role} | fields


def transfer(
    connector: str,
    *,
    module_path: str | None = None,
    on_failed_load: FailedLoad | None = None,
    kv_role: str | None = None,
    **extra: Any,
) -> str:
    """The KVTransferConfig fields of one connector, as JSON. `extra` becomes kv_connector_extra_config.

    Every push by layer is verified, but not that of a connector that a test has changed. Stock engines have no threads
    for large WRITEs, as the pages advise over TCP.
    """
    if connector != STOCK or module_path is not None:
        extra = {"verify": 1.0 if connector == LAYERWISE else 0} | extra
    else:
        extra = {"num_threads": 0} | extra
    fields: dict[str, Any] = {"kv_connector": connector}
    if on_failed_load is not None:
        fields["kv_load_failure_policy"] = on_failed_load
    if kv_role is not None:
        fields["kv_role"] = kv_role
    if module_path is not None:
        fields["kv_connector_module_path"] = module_path
    if extra:
        fields["kv_connector_extra_config"] = extra
    return json.dumps(fields, sort_keys=True)


def beside_store(inner: str, kv_role: str, *, first: bool, **store: Any) -> str:
    """A MultiConnector around the connector of ``inner``, as `transfer` makes it, and a `MemoryStore`.

    ``first``: the store is asked before the connector. ``store`` is its kv_connector_extra_config.
    """
    child = json.loads(inner) | {"kv_role": kv_role}
    outer = {name: child.pop(name) for name in ("kv_load_failure_policy",) if name in child}
    other = {
        "kv_connector": "MemoryStore",
        "kv_connector_module_path": "tests.e2e.memorystore",
        "kv_role": "kv_both",
        "kv_connector_extra_config": store,
    }
    children = {"connectors": [other, child] if first else [child, other]}
    outer |= {"kv_connector": "MultiConnector", "kv_connector_extra_config": children}
    return json.dumps(outer, sort_keys=True)


def beside_example(connector: str, kv_role: str, *, store: str, **extra: Any) -> str:
    """A MultiConnector around a connector, and an ExampleConnector with the folder ``store``."""
    folder = {"shared_storage_path": store}
    inner = [
        {"kv_connector": connector, "kv_role": kv_role, "kv_connector_extra_config": extra},
        {"kv_connector": "ExampleConnector", "kv_role": "kv_both", "kv_connector_extra_config": folder},
    ]
    outer = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": inner}}
    return json.dumps(outer, sort_keys=True)
