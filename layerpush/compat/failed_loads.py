"""A request whose load has failed waits behind those whose loads have succeeded.

vLLM's scheduler serves requests that hold blocks first, in a queue of their own. A request whose load has failed gives
its blocks back when it is at the head of that queue, and stays there. If the blocks that it needs now are not free, it
blocks the queue: requests behind it have their KV and could run, and would give blocks back, but never get a turn. It
may need more free blocks than it gave back: those that a prefill engine may still write are parked, and a layer with
a sliding window computes tokens whose KV it would not have loaded. So ``Scheduler.schedule`` first moves such a request
to the front of the other queue. If the scheduler is paused for new requests, it waits with them.

A load that gives its blocks to another request ends as a failed one (``engine.scheduler.postponed_loads``). Its request
waits for blocks again, whatever ``kv_load_failure_policy`` is: ``Scheduler._handle_failed_recving`` does not see it.
Nor does it see a prefill engine's load of an earlier turn: that request computes its prompt.

A prompt that gets no blocks (``engine.scheduler.places``) is passed by before vLLM looks for it in the prefix cache.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.v1.request import RequestStatus

from layerpush.compat.patches import our_connectors
from layerpush.compat.push_scheduler import lacks_registration

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request


def requeueing(plain: Callable[..., SchedulerOutput]) -> Callable[..., SchedulerOutput]:
    """``Scheduler.schedule``."""

    @functools.wraps(plain)
    def schedule(self: Scheduler, *args: Any, **kwargs: Any) -> SchedulerOutput:
        if any(each.connector_scheduler.receives for each, _ in our_connectors(self.connector)):
            requeue(self)
        return plain(self, *args, **kwargs)

    return schedule


def postponing(plain: Callable[..., set[str]]) -> Callable[..., set[str]]:
    """``Scheduler._handle_failed_recving``."""

    @functools.wraps(plain)
    def handle_failed(self: Scheduler, failed: set[str], *args: Any, **kwargs: Any) -> set[str]:
        schedulers = [each.connector_scheduler for each, _ in our_connectors(self.connector)]
        waits = {request_id for request_id in failed if any(each.goes_on_without(request_id) for each in schedulers)}
        for request_id in waits & self.requests.keys():
            if self.requests[request_id].status == RequestStatus.WAITING_FOR_REMOTE_KVS:
                self.requests[request_id].num_computed_tokens = 0
                self.failed_recving_kv_req_ids.add(request_id)
        return plain(self, failed - waits, *args, **kwargs)

    return handle_failed


def passing_by(plain: Callable[..., bool]) -> Callable[..., bool]:
    """``Scheduler._handle_blocked_waiting_request``: whether a waiting request may be scheduled in this step."""

    @functools.wraps(plain)
    def may_be_scheduled(self: Scheduler, request: Request) -> bool:
        for each, _ in our_connectors(self.connector):
            if lacks_registration(request) and not each.connector_scheduler.places.has_place():
                return False
        return plain(self, request)

    return may_be_scheduled


def requeue(scheduler: Scheduler) -> None:
    """Take the blocks of failed loads back, and let their requests wait without any. Scheduler's thread."""
    ended = scheduler.failed_recving_kv_req_ids & scheduler.finished_recving_kv_req_ids
    requests = [scheduler.requests[request_id] for request_id in ended if request_id in scheduler.requests]
    for request in sorted(requests, key=lambda each: each.arrival_time, reverse=True):
        if request.status != RequestStatus.WAITING_FOR_REMOTE_KVS or request.num_computed_tokens:
            continue
        scheduler.kv_holding_waiting.remove_requests([request])
        scheduler._handle_blocked_waiting_request(request)
        scheduler.deferred_waiting.discard(request)
        scheduler._inflight_prefills.discard(request)
        scheduler.waiting.prepend_request(request)
