"""A request whose load has failed waits behind those whose loads have succeeded.

vLLM's scheduler serves requests that hold blocks first, in a queue of their own. A request whose load has failed gives
its blocks back when it is at the head of that queue, and stays there. If the blocks that it needs now are not free, it
blocks the queue: requests behind it have their KV and could run, and would give blocks back, but never get a turn. It
may need more free blocks than it gave back: those that a prefill engine may still write are set aside, and a layer with
a sliding window computes tokens whose KV it would not have loaded. ``install`` wraps ``Scheduler.schedule``, which then
moves such a request to the front of the other queue. If the scheduler is paused for new requests, it waits with them.

A load that gives its blocks to another request ends as a failed one (``core.postponed_loads``). Its request waits for
blocks again, whatever ``kv_load_failure_policy`` is: ``install`` wraps ``Scheduler._handle_failed_recving``, too.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from layerpush.core.postponed_loads import PostponedLoads

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

    plain_failed = Scheduler._handle_failed_recving

    @functools.wraps(plain_failed)
    def handle_failed(self: Scheduler, failed: set[str]) -> set[str]:
        waits = {request_id for request_id in failed if _gives_way(self, request_id)}
        for request_id in waits & self.requests.keys():
            if self.requests[request_id].status == RequestStatus.WAITING_FOR_REMOTE_KVS:
                self.requests[request_id].num_computed_tokens = 0
                self.failed_recving_kv_req_ids.add(request_id)
        affected: set[str] = plain_failed(self, failed - waits)
        return affected

    schedule.requeues_failed_loads = True  # type: ignore[attr-defined]
    Scheduler.schedule, Scheduler._handle_failed_recving = schedule, handle_failed


def _gives_way(scheduler: Scheduler, request_id: str) -> bool:
    connector = scheduler.connector
    for each in getattr(connector, "_connectors", (connector,)):
        postponed = getattr(getattr(each, "connector_scheduler", None), "postponed", None)
        if isinstance(postponed, PostponedLoads) and postponed.is_asked(request_id):
            return True
    return False


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
