"""What the scheduler tells the workers in a step."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata

from layerpush.core.step_plan import StepPlan


class LayerwiseMetadata(NixlConnectorMetadata):
    """Upstream's metadata of a step, and what layerpush's scheduler has to tell its workers beside it."""

    step_plan: StepPlan = StepPlan()
    prompt_digests: Mapping[str, str] = MappingProxyType({})
    """Of requests that this prefill engine has begun with, by their ids."""
    cancelled: Mapping[str, str] = MappingProxyType({})
    """Pushes that this decode engine gives up: its request ids, and why."""
    trace_headers: Mapping[str, Mapping[str, str]] = MappingProxyType({})
    """Requests that came since the last step with the W3C headers of an OpenTelemetry trace, by their ids."""

    @classmethod
    def extending(
        cls,
        metadata: NixlConnectorMetadata,
        plan: StepPlan,
        prompt_digests: Mapping[str, str],
        cancelled: Mapping[str, str],
        trace_headers: Mapping[str, Mapping[str, str]],
    ) -> LayerwiseMetadata:
        extended = cls.__new__(cls)
        extended.__dict__.update(metadata.__dict__)
        extended.step_plan = plan
        extended.prompt_digests = prompt_digests
        extended.cancelled = cancelled
        extended.trace_headers = trace_headers
        return extended
