"""``LayerwiseMetadata``: the scheduler's message to its workers in a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata

from layerpush.core.first_token import Sampled
from layerpush.core.request_index import Arrived
from layerpush.core.step_plan import StepPlan
from layerpush.core.wire import Decline
from layerpush.transport.connections import Address

ABORTED = "aborted"
"""The reason to cancel a load whose request the engine has finished. Any other reason is a deadline."""


class LayerwiseMetadata(NixlConnectorMetadata):
    """vLLM's metadata of a step, extended by layerpush's. Lasts for one step."""

    step_plan: StepPlan = StepPlan()
    sampled: Mapping[str, Sampled] = MappingProxyType({})
    """First tokens of the requests that this prefill engine has finished, by request id."""
    cancelled: Mapping[str, str] = MappingProxyType({})
    """Loads that this decode engine cancels: request id -> reason."""
    unregistered: Sequence[str] = ()
    """Loads of this decode engine that P cannot begin, and whose blocks other requests need."""
    short_of_blocks: bool = False
    """Whether the first request in the queue could not get its blocks in this step."""
    declined: Sequence[tuple[Address, Decline]] = ()
    """Requests that this decode engine computes itself although a prefill engine has them."""
    arrived: Sequence[Arrived] = ()
    """Requests that this prefill engine is to push. Only those that came since the last step."""
    elsewhere: Mapping[str, int] = MappingProxyType({})
    """Requests that went to another data-parallel rank of this prefill engine: that rank, by request id."""
    trace_headers: Mapping[str, Mapping[str, str]] = MappingProxyType({})
    """W3C headers of an OpenTelemetry trace, by request id. Only of requests that came since the last step."""

    @classmethod
    def extending(cls, metadata: NixlConnectorMetadata) -> LayerwiseMetadata:
        """vLLM's ``metadata``, and these fields, still empty. Copies no container."""
        extended = cls.__new__(cls)
        extended.__dict__.update(metadata.__dict__)
        return extended
