"""Functions that tests run inside an engine host (`EngineHost.call`); the first argument is the HostedEngine."""

from __future__ import annotations

import logging
import queue
import re
import threading
import time
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from layerpush.compat.patches import our_connectors
from tests.support.waiting import until

if TYPE_CHECKING:
    from tests.e2e.hostmain import HostedEngine

OUR_MODULES = ("layerpush.", "vllm.distributed.kv_transfer.", "tests.")
BOUNDED_MEMORIES = (
    "._served",
    "._over",
    ".unwanted",
    "._withheld",
    "._ended",
    "._elsewhere",
    "._heartbeats",
)
"""Attributes that remember the last few thousand finished requests on purpose."""


def free_blocks(host: HostedEngine) -> int:
    count: int = host.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    return count


def owned_blocks(host: HostedEngine, block_ids: list[int]) -> int:
    """How many of these blocks requests hold. No other request can get them."""
    blocks = host.scheduler.kv_cache_manager.block_pool.blocks
    return sum(blocks[number].ref_cnt > 0 for number in block_ids)


def metrics(host: HostedEngine) -> str:
    """The text of the engine's ``/metrics``."""
    from prometheus_client import generate_latest
    from vllm.v1.metrics.prometheus import get_prometheus_registry

    return generate_latest(get_prometheus_registry()).decode()


def threads(host: HostedEngine) -> list[str]:
    """The names of Python's threads, without numbers."""
    return sorted(re.sub(r"\d+", "", thread.name) for thread in threading.enumerate())


def choose(host: HostedEngine, variant: int) -> None:
    """Give the next requests this one of the two adapters, embeddings or images."""
    host.variant = variant


def reset_prefix_cache(host: HostedEngine) -> bool:
    done: bool = host.llm.reset_prefix_cache()
    return done


def pause_generation(host: HostedEngine) -> None:
    """As for new weights: vLLM clears its caches, and schedules no request from now on."""
    host.llm.engine_core.engine_core.pause_scheduler("abort", clear_cache=True)


def resume_generation(host: HostedEngine) -> None:
    host.llm.engine_core.engine_core.resume_scheduler()


def registration_sent(host: HostedEngine, base_request_id: str) -> bool:
    return host.notifications.registered(base_request_id)


def computed_tokens(host: HostedEngine, request_id: str) -> int:
    """The number of computed tokens of a live request. -1: the scheduler no longer knows the request."""
    request = host.scheduler.requests.get(host.internal_id(request_id))
    return -1 if request is None else int(request.num_computed_tokens)


def count_scheduled_tokens(host: HostedEngine) -> None:
    """Count the tokens that the scheduler gives to each request from now on, in place of the last counts."""
    if host.scheduled_tokens is not None:
        host.scheduled_tokens.clear()
        return
    counts, schedule = Counter[str](), host.scheduler.schedule
    host.scheduled_tokens = counts

    def counted(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        counts.update(output.num_scheduled_tokens)
        return output

    host.scheduler.schedule = counted


def scheduled_tokens(host: HostedEngine, base_request_id: str) -> int:
    """The tokens that a request was given since ``count_scheduled_tokens``."""
    counts = host.scheduled_tokens or {}
    return sum(count for name, count in counts.items() if name.startswith(base_request_id))


def all_scheduled_tokens(host: HostedEngine) -> int:
    """The tokens that all requests were given since ``count_scheduled_tokens``."""
    return sum((host.scheduled_tokens or {}).values())


def preempt_all(host: HostedEngine) -> bool:
    """Preempt all requests that run."""
    done: bool = host.llm.reset_prefix_cache(reset_running_requests=True)
    return done


def record_drafts(host: HostedEngine) -> None:
    """Keep the tokens that the drafter proposes, step by step, for ``take_drafts``."""
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    propose = SpecDecodeBaseProposer.propose

    def recorded(*args: Any, **kwargs: Any) -> Any:
        drafts = propose(*args, **kwargs)
        host.drafts.append(drafts.tolist())
        return drafts

    SpecDecodeBaseProposer.propose = recorded


def take_drafts(host: HostedEngine) -> list[list[list[int]]]:
    drafts, host.drafts = host.drafts, []
    return drafts


def preemptions(host: HostedEngine, request_id: str) -> int:
    return int(host.scheduler.requests[host.internal_id(request_id)].num_preemptions)


def await_tokens(host: HostedEngine, seconds: float) -> None:
    """From now on a complete load waits so long for P's token: a busy machine may send the token late."""
    from layerpush.decode import load_session

    load_session.TOKEN_WAIT_S = seconds


def compiled_graphs(host: HostedEngine) -> int:
    """The number of graphs that torch.compile has captured in this process."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def request_statuses(host: HostedEngine) -> dict[str, str]:
    return {request_id: request.status.name for request_id, request in host.scheduler.requests.items()}


def connector_class(host: HostedEngine) -> str:
    return type(host.scheduler.connector).__name__


def mentions(host: HostedEngine, texts: list[str], skipped: Collection[str] = ()) -> list[str]:
    """Attribute paths at which the connector (scheduler side and worker side) still holds one of the texts.

    So tests check that no table keeps an entry of a finished request, without the tables' names. Paths with one of
    ``skipped`` are left out.
    """
    return mentions_in(connectors(host), texts, skipped)


def connectors(host: HostedEngine) -> dict[str, Any]:
    """The connector's two sides, as far as they are in this process."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    roots = {"scheduler": host.scheduler.connector}
    if has_kv_transfer_group():  # else there is no connector, or the workers are other processes
        roots["worker"] = get_kv_transfer_group()
    return roots


def mentions_in(roots: Mapping[str, Any], texts: Collection[str], skipped: Collection[str] = ()) -> list[str]:
    found = []
    for name, root in roots.items():
        strings = _strings(root, name, set(), skipped)
        found += [path for path, text in strings if any(needle in text for needle in texts)]
    return found


def is_mentioned(host: HostedEngine, text: str) -> bool:
    return bool(mentions(host, [text]))


def has_registration(host: HostedEngine, decode_id: str) -> bool:
    """Whether this P has a registration that waits for its prompt, by D's own request id. True for a P whose worker is
    out of sight, or stock.
    """
    return connector_worker() is None or bool(mentions(host, [decode_id], BOUNDED_MEMORIES))


def has_taken_steps(host: HostedEngine) -> bool:
    """Whether P's writer thread has taken the events of all steps. It takes messages that come later after them. True
    for a P whose worker is out of sight, or stock.
    """
    worker = connector_worker()
    return worker is None or not worker.step_events.pending


def log_an_error(host: HostedEngine) -> None:
    logging.getLogger("vllm.engine").error("this is a test of the log check")


def wait_until_forgotten(host: HostedEngine, texts: list[str], skipped: tuple[str, ...], timeout: float) -> list[str]:
    """Poll `mentions` until none is left, or time is over: other threads clean up a bit later."""
    if not texts:
        return []  # the test did not use this engine
    deadline = time.monotonic() + timeout
    while found := mentions(host, texts, skipped):
        if time.monotonic() > deadline:
            break
        time.sleep(0.005)
    return found


def nixl_worker() -> Any:
    """This process's NIXL worker, also behind a MultiConnector. None without one, and for other processes."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    if not has_kv_transfer_group():
        return None
    group: Any = get_kv_transfer_group()
    workers = (getattr(one, "connector_worker", None) for one in getattr(group, "sub_connectors", [group]))
    return next((worker for worker in workers if worker is not None), None)


def connector_worker() -> Any:
    """This process's NIXL worker if it is layerpush's, else None."""
    worker = nixl_worker()
    return worker if hasattr(worker, "transport") else None


def end_writer(host: HostedEngine) -> None:
    """As ``WriterFault.end_writer``. Returns when the engine's next step is to find it."""
    WriterFault().end_writer()
    until(lambda: connector_worker().threads._failure, "the end of the writer thread")


class WriterFault:
    """What a worker of vLLM learns by ``--worker-extension-cls``."""

    def end_writer(self) -> None:
        """A defect that nobody expects ends the writer thread of this process."""

        def end() -> bool:
            raise SystemExit("a defect")

        connector_worker()._writer_thread._inbox.deliver = end


def verify(host: HostedEngine, share: float) -> None:
    """From now on this share of the pushes has checksums."""
    connector_worker().pushes._services.sampler._share = share


def damage(host: HostedEngine, what: str, verified: float) -> None:
    """From now on pushes of `Corrupting` have this damage, and this share of them has checksums."""
    from tests.e2e.corrupting import Corrupting

    Corrupting.damage = what
    verify(host, verified)


def fence(host: HostedEngine, on: bool) -> None:
    """Whether pushes of `Late` wait for its stream from now on. Without fences they wait for nothing, as on a CPU."""
    import torch

    from layerpush.prefill.fences import FencePool

    connector_worker().step_events._fences = FencePool(torch.device("cpu")) if on else None


def idle_connections_of(worker: Any) -> Any:
    from layerpush.transport.idle_connections import IdleConnections

    return next(each for each in worker._writer_thread._timed if isinstance(each, IdleConnections))


def look_after_idle_engines(host: HostedEngine, every_s: float) -> None:
    """Ping idle engines so often, and those that become idle at once."""
    from layerpush.core.liveness import PeerWatch
    from layerpush.transport import idle_connections

    idle_connections.CHECK_EVERY_S = every_s / 2
    idle = idle_connections_of(connector_worker())

    def restart() -> None:
        idle._idle.clear()
        idle._watch, idle._delay, idle._next_check = PeerWatch(4 * every_s), lambda: 0.0, 0.0

    connector_worker().task(restart)


def tables_of_peers(host: HostedEngine) -> dict[str, list[str]]:
    """The names of engines in each table of the connections of this worker."""
    worker = connector_worker()
    names = (
        "_remote_agents", "dst_xfer_side_handles", "kv_caches_base_addr", "dst_num_blocks", "tp_mappings",
        "_engine_clock_offset", "_engine_last_active",
    )  # fmt: skip
    tables = {name: list(getattr(worker, name)) for name in names}
    peers = worker.peers._peers
    tables["connections"] = [engine_id for engine_id in list(peers) if peers[engine_id].is_used]
    tables["links"] = [engine_id for engine_id in list(peers) if peers[engine_id].link is not None]
    tables["idle"] = list(idle_connections_of(worker)._idle)
    return {name: [each for each in table if each != worker.engine_id] for name, table in tables.items()}


def knows_no_peer(host: HostedEngine) -> bool:
    return not any(tables_of_peers(host).values())


def open_front_door(host: HostedEngine) -> None:
    """From now on every request reaches the engine core, even one that a front end would refuse."""
    processor = host.llm.input_processor
    unchecked = type(processor).process_inputs.__wrapped__
    processor.process_inputs = partial(unchecked, processor)


def close_front_door(host: HostedEngine) -> None:
    del host.llm.input_processor.process_inputs


def report_refused(host: HostedEngine, request_id: str, params: Any) -> None:
    """As `vllm serve` on D after a refusal: report the request, because the connector may hold resources for it."""
    from vllm import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

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
    return not connector_worker()._handshake_futures


def _strings(value: Any, path: str, seen: set[int], skipped: Collection[str]) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield path, value
        return
    if isinstance(value, (bytes, bytearray)):
        yield path, value.decode("latin-1")
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    for step, inner in _contents(value):
        inner_path = path + step
        if any(part in inner_path for part in skipped):
            seen.add(id(inner))  # other paths may lead to it, too
        else:
            yield from _strings(inner, inner_path, seen, skipped)


def _copied(items: Iterable[Any]) -> list[Any]:
    """Copy a table. The writer thread may change it meanwhile: then the copy begins again."""
    while True:
        try:
            return list(items)
        except (RuntimeError, KeyError):
            continue


def _contents(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, inner in _copied(value.items()):
            yield "{key}", key
            yield f"[{key!r:.40}]", inner
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        if value and isinstance(next(iter(value)), int):
            return
        for number, inner in enumerate(_copied(value)):
            yield f"[{number}]", inner
    elif isinstance(value, (queue.Queue, queue.SimpleQueue)):
        yield ".queue", list(getattr(value, "queue", ()))
    elif type(value).__module__.startswith(OUR_MODULES):
        for name in _attributes(value):
            yield f".{name}", getattr(value, name, None)


def _attributes(value: Any) -> Iterator[str]:
    yield from list(getattr(value, "__dict__", ()))
    for cls in type(value).__mro__:
        yield from getattr(cls, "__slots__", ())


def end_kept_turns(host: HostedEngine) -> None:
    """Let the time of every turn that this engine keeps end now, and wait until its ranks have ended them."""
    release_turns(host)
    while any(each.connector_scheduler._turns.needs_steps for each, _ in our_connectors(host.scheduler.connector)):
        host._step()


def release_turns(host: HostedEngine) -> None:
    """Let the time of every turn that this engine keeps end now."""
    for each, _ in our_connectors(host.scheduler.connector):
        assert each.connector_scheduler.reset_cache(lambda: True)
