"""Ways into a hosted engine that a front end would not let a request take (`EngineHost.call`)."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm import SamplingParams
from vllm.v1.engine import EngineCoreRequest

from tests.e2e import probes

if TYPE_CHECKING:
    from tests.e2e.hostmain import HostedEngine


def open_front_door(host: HostedEngine) -> None:
    """Whatever comes from here on reaches the engine core."""
    processor = host.llm.input_processor
    unchecked = type(processor).process_inputs.__wrapped__
    processor.process_inputs = partial(unchecked, processor)


def close_front_door(host: HostedEngine) -> None:
    del host.llm.input_processor.process_inputs


def report_refused(host: HostedEngine, request_id: str, params: Any) -> None:
    """What `vllm serve` does when it refuses a request to D: the connector may have something to give back."""
    host.llm.engine_core.add_request(
        EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=[0],
            mm_features=None,
            sampling_params=SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": params}),
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
            abort_immediately=True,
        )
    )


def handshakes_over(host: HostedEngine) -> bool:
    worker = probes.connector_worker()
    assert worker is not None
    return not worker._handshake_futures
