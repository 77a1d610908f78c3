"""``LayerwiseMetadata``: the scheduler's message to its workers in a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata

from layerpush.core.first_token import Sampled
from layerpush.core.request_names import Arrived
from layerpush.core.step_plan import StepPlan
from layerpush.core.wire import Decline
from layerpush.transport.peers import Address

ABORTED = "aborted"
"""The reason to cancel a load whose request the engine has finished. Any other reason is a deadline."""


@dataclass(frozen=True, slots=True)
class RankIsOther:
    """A request went to another data-parallel ``rank`` of this prefill engine."""

    request_id: str
    rank: int


@dataclass(frozen=True, slots=True)
class PromptRefused:
    """The front end of this prefill engine has refused a request. ``transfer_id``: its router's name of it, if any."""

    request_id: str
    transfer_id: str | None


@dataclass(frozen=True, slots=True)
class PushDeclined:
    """This decode engine computes a request itself although the prefill engine at ``address`` has it."""

    address: Address
    message: Decline


@dataclass(frozen=True, slots=True)
class LoadCancelled:
    """This decode engine cancels a load. ``reason`` is ``ABORTED``, or names the deadline."""

    request_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class LoadPostponed:
    """P cannot begin this load of this decode engine, and other requests need its blocks."""

    request_id: str


@dataclass(frozen=True, slots=True)
class TraceHeaders:
    """W3C headers of a request's OpenTelemetry trace."""

    request_id: str
    headers: Mapping[str, str]


Notice = RankIsOther | PromptRefused | PushDeclined | LoadCancelled | LoadPostponed | TraceHeaders
News = Arrived | Notice


class LayerwiseMetadata(NixlConnectorMetadata):
    """vLLM's metadata of a step, extended by layerpush's. Lasts for one step."""

    step_plan: StepPlan = StepPlan()
    news: Sequence[News] = ()
    """Since the last step, in the order of events."""
    sampled: Mapping[str, Sampled] = MappingProxyType({})
    """First tokens of the requests in ``push_finished_blocks``, by request id."""
    prompt_tokens: Mapping[str, int] = MappingProxyType({})
    """The lengths of these requests' prompts, by request id. 0: blocks of a window lie behind the prompt."""
    short_of_blocks: bool = False
    """Whether the first request in the queue could not get its blocks in this step."""

    @classmethod
    def extending(cls, metadata: NixlConnectorMetadata) -> LayerwiseMetadata:
        """vLLM's ``metadata``, and these fields, still empty. Copies no container."""
        extended = cls.__new__(cls)
        extended.__dict__.update(metadata.__dict__)
        return extended
