"""A request whose load has failed waits behind those whose loads have succeeded.

vLLM's scheduler serves requests that hold blocks first, in a queue of their own. A request whose load has failed gives
its blocks back when it is at the head of that queue, and stays there. If the blocks that it needs now are not free, it
blocks the queue: requests behind it have their KV and could run, and would give blocks back, but never get a turn. It
may need more free blocks than it gave back: those that a prefill engine may still write are set aside, and a layer with
a sliding window computes tokens whose KV it would not have loaded. ``install`` wraps ``Scheduler.schedule``, which then
moves such a request to the front of the other queue. If the scheduler is paused for new requests, it waits with them.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


def install() -> None:
    """Have every scheduler of this process move such requests. Later calls do nothing."""
    plain = Scheduler.schedule
    if hasattr(plain, "requeues_failed_loads"):
        return

    @functools.wraps(plain)
    def schedule(self: Scheduler, *args: Any, **kwargs: Any) -> SchedulerOutput:
        requeue(self)
        output: SchedulerOutput = plain(self, *args, **kwargs)
        return output

    schedule.requeues_failed_loads = True  # type: ignore[attr-defined]
    Scheduler.schedule = schedule


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
