"""A decode engine's real scheduler and the connector in it. The tests write the workers' reports.

However a load ends, no other request gets a block that a prefill engine may still write.
"""

from __future__ import annotations

import logging
import pickle
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, TypeVar

import pytest
import torch

from layerpush.compat.metadata import ABORTED, LoadCancelled, LoadPostponed, PushDeclined
from layerpush.compat.push_scheduler import VllmPushScheduler
from layerpush.compat.worker_report import TurnEnded, WorkerReport
from layerpush.core.load_news import (
    LoadCleared,
    LoadKept,
    LoadParked,
    LoadQueued,
    LoadToken,
    LoadUnregistered,
)
from layerpush.core.prefill_identity import TO_PREFILL, PrefillIdentity
from layerpush.core.prefixes import Prefixes
from layerpush.core.request_names import Arrived
from layerpush.core.wire import PROTOCOL_VERSION
from layerpush.engine.scheduler.scheduler import LayerwisePushScheduler
from layerpush.telemetry.metrics.catalog import KEPT_TOKENS, NO_LABEL, Metric
from tests.connector.conftest import PORTS
from tests.connector.engine import BLOCK_SIZE, BLOCKS, HEAD_SIZE, HEADS, NAMES, cache_config, config_of

TOKENS = 200  # seven blocks
CACHED = 3 * BLOCK_SIZE
IDLE = BLOCKS - 1  # one is the null block
WINDOW = 2 * BLOCK_SIZE
OTHERS = range(50_000, 60_000)
"""Token ids that no awaited prompt has."""


Attention = Literal["full", "window", "chunk", "state"]
T = TypeVar("T")


def windowed_config(attention: Attention, window: int = WINDOW) -> Any:
    """Half of the layers attend to a sliding window only, or to their own chunk of the prompt, or have a state."""
    import torch
    from vllm.v1.kv_cache_interface import (
        ChunkedLocalAttentionSpec,
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        KVCacheTensor,
        MambaSpec,
        SlidingWindowSpec,
    )

    shape: dict[str, Any] = {
        "block_size": BLOCK_SIZE, "num_kv_heads": HEADS, "head_size": HEAD_SIZE, "dtype": torch.float32,
    }  # fmt: skip
    full = FullAttentionSpec(**shape)
    page = full.page_size_bytes
    part = {
        "window": lambda: SlidingWindowSpec(sliding_window=window, **shape),
        "chunk": lambda: ChunkedLocalAttentionSpec(attention_chunk_size=window, **shape),
        "state": lambda: MambaSpec(
            block_size=BLOCK_SIZE,
            shapes=((3, 8), (8, 8)),
            dtypes=(torch.float32,) * 2,
            page_size_padded=page,
            mamba_cache_mode="align",
        ),
    }[attention]()
    tensor = KVCacheTensor(
        size=2 * page * BLOCKS, layers=NAMES[:2], offset=0, layer_stride=page * BLOCKS, block_stride=page
    )
    groups = [KVCacheGroupSpec(NAMES[:2], full), KVCacheGroupSpec(NAMES[2:], part)]
    return KVCacheConfig(BLOCKS, [tensor], groups, kv_cache_layout="LBHNC")


class Decode:
    """``step`` is one iteration of the engine's loop. Its arguments are the joint report of all workers."""

    def __init__(self, config: Any, caches: Any) -> None:
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.structured_output import StructuredOutputManager

        config.cache_config.num_gpu_blocks = BLOCKS
        self.scheduler = Scheduler(config, caches, StructuredOutputManager(config), BLOCK_SIZE)
        self.requests: dict[str, Any] = {}
        self.reasons: dict[str, str] = {}
        self.answers: dict[str, Any] = {}
        """The ``kv_transfer_params`` of each request that has finished."""
        self.metadata: Any = None

    @property
    def free_blocks(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def add(
        self,
        request_id: str,
        tokens: list[int],
        params: dict[str, Any] | None = None,
        max_tokens: int = 2,
        priority: int = 0,
        salt: str | None = None,
    ) -> Any:
        from vllm import SamplingParams
        from vllm.v1.request import Request

        from tests.connector.engine import block_hasher

        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args={"kv_transfer_params": params})
        sampling.update_from_generation_config({}, None)
        hasher = block_hasher() if self.scheduler.cache_config.enable_prefix_caching else None
        self.requests[request_id] = Request(
            request_id, tokens, sampling, None, block_hasher=hasher, priority=priority, cache_salt=salt
        )
        self.scheduler.add_request(self.requests[request_id])
        return self.requests[request_id]

    def decode(self, request_id: str, tokens: int = TOKENS, priority: int = 0, salt: str | None = None) -> Any:
        params = PrefillIdentity("p", "127.0.0.1", 1, 1).to_decode(f"{request_id}-on-p")
        return self.add(request_id, list(range(3, 3 + tokens)), params, priority=priority, salt=salt)

    def step(
        self,
        *received: str,
        failed: tuple[str, ...] = (),
        report: WorkerReport | None = None,
        sent: tuple[str, ...] = (),
    ) -> Any:
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        output = self.scheduler.schedule()
        self.metadata = pickle.loads(pickle.dumps(output.kv_connector_metadata))
        ids = list(output.num_scheduled_tokens)
        done = [self.requests[one].num_computed_tokens >= self.requests[one].num_prompt_tokens for one in ids]
        runner = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={one: index for index, one in enumerate(ids)},
            sampled_token_ids=[[7] if ready else [] for ready in done],
            kv_connector_output=KVConnectorOutput(
                finished_sending=set(sent),
                finished_recving={*received, *failed},
                failed_recving=set(failed),
                kv_connector_worker_meta=report,
            ),
        )
        for outputs in self.scheduler.update_from_output(output, runner).values():
            for one in outputs.outputs:
                if one.finish_reason is not None:
                    self.reasons[one.request_id] = str(one.finish_reason)
                    self.answers[one.request_id] = one.kv_transfer_params
        return output

    def answer(self, request_id: str, tokens: int = TOKENS, salt: str | None = None) -> dict[str, Any]:
        """A request is loaded and answered. Returns the params for the conversation's next turn."""
        self.decode(request_id, tokens, salt=salt)
        self.step()
        self.step(request_id)
        self.run(request_id)
        params: dict[str, Any] = self.answers[request_id]
        return params

    def run(self, request_id: str) -> None:
        for _ in range(10):
            if request_id in self.reasons:
                return
            self.step()
        raise AssertionError(f"{request_id} has not finished")

    def finish(self) -> None:
        for _ in range(200):
            self.step()
            if not self.scheduler.has_unfinished_requests():
                self.step()  # the workers hear which have finished
                return
        raise AssertionError("requests are left over")

    def news(self, kind: type[T]) -> list[T]:
        """What the last step's metadata says of this kind."""
        return [each for each in self.metadata.news if isinstance(each, kind)]

    @property
    def cancelled(self) -> dict[str, str]:
        """The loads that the last step cancels, with the reasons."""
        return {each.request_id: each.reason for each in self.news(LoadCancelled)}

    def registered(self) -> set[int]:
        """The blocks that the last step's metadata registers."""
        (registration,) = self.metadata.push_registrations.values()
        return {block for group in registration["local_block_ids"] for block in group}

    def owned(self, but: str | None = None) -> set[int]:
        """The blocks of all the scheduler's requests, except those of request ``but``."""
        tables = [self.scheduler.kv_cache_manager.get_block_ids(one) for one in self.scheduler.requests if one != but]
        return {block for table in tables for group in table for block in group}

    def crowd(self) -> None:
        """Other requests take every free block, and finish."""
        for number in range(8):
            first = OTHERS[number * 500]
            self.add(f"other-{len(self.requests)}", list(range(first, first + 4 * BLOCK_SIZE)))

    def abort(self, request_id: str) -> None:
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)


Build = Callable[..., Decode]


@pytest.fixture
def decode(world: None, model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Build]:
    engines: list[Decode] = []

    def build(
        extra: dict[str, Any] | None = None,
        *,
        role: str = "kv_consumer",
        policy: str = "recompute",
        caching: bool = False,
        attention: Attention = "full",
        window: int = WINDOW,
        scheduling: str = "fcfs",
    ) -> Decode:
        port = PORTS.next_free()
        monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(port))
        config = config_of(
            model, role, f"{role}-{port}", extra, enable_prefix_caching=caching, max_num_seqs=16,
            max_num_batched_tokens=1024, disable_hybrid_kv_cache_manager=False, scheduling_policy=scheduling,
        )  # fmt: skip
        config.kv_transfer_config.kv_load_failure_policy = policy
        caches = cache_config() if attention == "full" else windowed_config(attention, window)
        engines.append(Decode(config, caches))
        return engines[-1]

    yield build
    for one in engines:
        one.scheduler.shutdown()


@pytest.fixture(params=["recompute", "fail"])
def policy(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["one group", "one group, prefix hit", "sliding window", "sliding window, prefix hit"])
def waiting(request: pytest.FixtureRequest, decode: Build, policy: str) -> tuple[Decode, set[int]]:
    """An engine that awaits "r", and the blocks that it registered for it."""
    hit = "hit" in request.param
    d = decode(policy=policy, caching=hit, attention="window" if "window" in request.param else "full")
    if hit:
        d.add("warm", list(range(3, 3 + CACHED)))
        d.run("warm")
        d.step()
    d.decode("r")
    d.step()
    registered = d.registered()
    full = 7 - (CACHED // BLOCK_SIZE if hit else 0)
    window = 3 if "window" in request.param else 0
    assert len(registered) == full + window
    assert d.free_blocks == IDLE - len(registered) - (CACHED // BLOCK_SIZE if hit else 0)
    return d, registered


def test_no_request_gets_the_blocks_of_a_parked_load(waiting: tuple[Decode, set[int]], policy: str) -> None:
    d, registered = waiting
    d.step(report=WorkerReport([LoadParked("r", 0)]), failed=("r",))
    for _ in range(12):
        d.crowd()
        d.step()
        assert not d.owned() & registered
    d.run("r")
    assert d.reasons["r"] == ("length" if policy == "recompute" else "error")
    d.finish()
    assert d.free_blocks == IDLE - len(registered)
    assert d.scheduler.has_requests(), "the engine must step until the workers clear the load"

    d.step(report=WorkerReport([LoadCleared("r", 0)]))
    assert d.free_blocks == IDLE
    d.step()
    assert not d.scheduler.has_requests()


@pytest.mark.parametrize("parked", [True, False])
def test_recomputing_takes_other_blocks_only_because_of_our_reference(decode: Build, parked: bool) -> None:
    """Nothing in vLLM keeps the blocks of a failed load apart."""
    d = decode()
    d.decode("r")
    d.step()
    registered = d.registered()
    d.step(report=WorkerReport([LoadParked("r", 0)]) if parked else None, failed=("r",))
    d.step()
    assert d.requests["r"].status.name == "RUNNING"
    assert len(d.owned()) == 7
    assert bool(d.owned() & registered) is not parked


def test_a_received_load_is_decoded_and_its_blocks_returned(waiting: tuple[Decode, set[int]]) -> None:
    d, _ = waiting
    d.step("r")
    d.run("r")
    assert d.reasons["r"] == "length"
    d.step()
    assert d.free_blocks == IDLE
    assert not d.scheduler.has_requests()
    assert len(d.scheduler.connector.connector_scheduler.awaited) == 0


def test_a_failed_load_does_not_hold_up_complete_ones(decode: Build) -> None:
    """The failed one needs new blocks, for its first ones are parked. Only the end of the others frees some."""
    d = decode(policy="recompute")
    names = [f"r{number}" for number in range(5)]
    for name in names:
        d.decode(name)
    d.step()
    assert d.free_blocks < 7
    first, *others = names
    d.step(report=WorkerReport([LoadParked(first, 0)]), failed=(first,))
    d.step(*others)
    d.finish()
    assert set(d.reasons) == set(names)
    assert set(d.reasons.values()) == {"length"}


def test_failed_loads_reserve_no_blocks_that_they_do_not_hold(decode: Build) -> None:
    """A request of a higher priority comes first. All blocks are free, so it must get some."""
    d = decode(policy="recompute", scheduling="priority")
    for name in ("r0", "r1"):
        d.decode(name, 480, priority=1)
    d.step()
    d.decode("urgent", 480)
    d.step(failed=("r0", "r1"))
    d.step()
    d.step("urgent")
    d.finish()
    assert set(d.reasons) == {"r0", "r1", "urgent"}


def test_a_load_gives_its_blocks_to_a_request_whose_prompt_p_holds(decode: Build, policy: str) -> None:
    """Its own request waits for that one, whatever the policy is, and is registered again."""
    d = decode(policy=policy)
    ours, counted = d.scheduler.connector.connector_scheduler, []
    ours.first_tokens._count = counted.append
    d.decode("r", 480)
    d.decode("busy", 480)
    d.step()
    d.decode("o", 481)  # 9 blocks are free
    d.step(report=WorkerReport([LoadQueued("r", frozenset(ours.prompt_names(d.requests["o"])))]))
    d.step()
    assert d.news(LoadPostponed) == [LoadPostponed("r")]
    d.step(report=WorkerReport([LoadKept("r", 0), LoadUnregistered("r", 0)]), failed=("r",))
    d.step("busy")
    assert list(d.metadata.push_registrations) == ["o"]
    assert counted == ["failed_load"], "the load of busy had no token; that of r is not over"
    d.run("busy")
    d.step()
    registration = d.metadata.push_registrations["r"]
    assert registration["attempt"] == 1
    d.step("o", "r")
    d.finish()
    assert d.reasons == dict.fromkeys(("r", "busy", "o"), "length")


def test_parked_blocks_stay_until_every_rank_has_cleared(decode: Build) -> None:
    """Ranks report in different steps. The failure reaches the engine with the last rank's report."""
    d = decode(policy="fail")
    d.decode("r")
    d.step()
    d.step(report=WorkerReport([LoadParked("r", 1)]))
    d.step(report=WorkerReport([LoadParked("r", 0)]), failed=("r",))
    assert d.reasons["r"] == "error"
    d.step(report=WorkerReport([LoadCleared("r", 0)]))
    assert d.free_blocks == IDLE - 7
    d.step(report=WorkerReport([LoadCleared("r", 1)]))
    assert d.free_blocks == IDLE


def test_a_rank_may_clear_before_the_last_rank_fails(decode: Build) -> None:
    d = decode(policy="fail")
    d.decode("r")
    d.step()
    d.step(report=WorkerReport([LoadParked("r", 1)]))
    d.step(report=WorkerReport([LoadCleared("r", 1)]))
    assert d.free_blocks == IDLE - 7
    d.step(failed=("r",))
    assert d.free_blocks == IDLE


def test_an_aborted_requests_blocks_stay_until_the_workers_report(waiting: tuple[Decode, set[int]]) -> None:
    d, registered = waiting
    d.abort("r")
    d.step()
    assert d.cancelled == {"r": ABORTED}
    for _ in range(5):
        d.crowd()
        d.step()
        assert d.cancelled == {}
        assert not d.owned(but="r") & registered
    d.finish()
    assert d.scheduler.has_requests()
    d.step(failed=("r",))
    d.step()
    assert d.free_blocks == IDLE
    assert not d.scheduler.has_requests()


def test_an_aborted_request_may_be_parked_too(waiting: tuple[Decode, set[int]]) -> None:
    d, registered = waiting
    d.step(report=WorkerReport([LoadParked("r", 0)]))
    d.abort("r")
    d.step(failed=("r",))
    assert d.free_blocks == IDLE - len(registered)
    assert "r" not in d.scheduler.requests
    d.step(report=WorkerReport([LoadCleared("r", 0)]))
    assert d.free_blocks == IDLE


def test_an_abort_after_a_failed_load_cancels_nothing(decode: Build) -> None:
    d = decode()
    d.decode("r")
    d.step()
    d.step(report=WorkerReport([LoadParked("r", 0)]), failed=("r",))
    d.abort("r")
    assert d.free_blocks == IDLE - 7
    d.step(report=WorkerReport([LoadCleared("r", 0)]))
    assert d.cancelled == {}, "the workers have reported the failure themselves"
    assert d.free_blocks == IDLE


def test_a_load_without_a_push_is_cancelled_after_the_timeout(decode: Build, caplog: pytest.LogCaptureFixture) -> None:
    d = decode({"push_registration_timeout": 0})
    with caplog.at_level(logging.WARNING, "vllm"):
        d.decode("r")
        d.step()
    assert d.cancelled == {"r": "no push within 0 s (push_registration_timeout)"}
    assert d.registered(), "the registration goes out all the same: the workers get both"
    assert not [record for record in caplog.records if "timed out" in record.getMessage()], "vLLM's own watch is off"
    d.step()
    assert d.cancelled == {}
    d.step(failed=("r",))
    d.run("r")
    assert d.reasons["r"] == "length"


def test_the_default_registration_timeout_is_vllms(decode: Build) -> None:
    d = decode()
    assert d.scheduler.connector.connector_scheduler._push_registration_timeout == 480
    d.decode("r")
    d.step()
    assert d.cancelled == {}


def test_a_load_failed_by_policy_is_not_cancelled_as_well(decode: Build) -> None:
    """The scheduler finishes the request before the connector gets the workers' report."""
    d = decode(policy="fail")
    d.decode("r")
    d.step()
    d.step(failed=("r",))
    d.step()
    assert d.cancelled == {}
    assert not d.scheduler.has_requests()


def test_a_request_aborted_before_its_first_step_registers_nothing(decode: Build) -> None:
    d = decode()
    d.decode("r")
    d.abort("r")
    d.step()
    assert d.metadata.reqs_to_recv == {}
    assert d.metadata.push_registrations == {}
    assert d.cancelled == {}
    assert not d.scheduler.has_requests()


def test_a_failed_load_is_never_reported_by_block_ids(engine: Callable[..., Any]) -> None:
    """Another request may have the blocks by then, and vLLM would count that request's tokens as lost."""
    d = engine("kv_consumer")
    d.worker.connector_worker._invalid_block_ids.put({1, 2})
    assert d.worker.get_block_ids_with_load_errors() == set()
    assert d.worker.connector_worker._invalid_block_ids.empty()


def test_a_registration_has_ps_request_id_and_the_prompt_digest(decode: Build) -> None:
    d = decode()
    for name, tokens in (("a", 100), ("b", 100), ("c", 101)):
        d.decode(name, tokens)
    d.step()
    sent = d.metadata.push_registrations
    assert sent["a"]["layerpush"] == PROTOCOL_VERSION
    assert sent["a"]["prefill_request_id"] == "a-on-p"
    assert len(sent["a"]["prompt_digest"]) == 32
    assert sent["a"]["prompt_digest"] == sent["b"]["prompt_digest"] != sent["c"]["prompt_digest"]
    d.step("a", "b", "c")


@pytest.mark.parametrize("backoff", [0, 1, 3])
def test_p_and_d_compute_the_same_prompt_digest(decode: Build, monkeypatch: pytest.MonkeyPatch, backoff: int) -> None:
    """Also where vLLM's P drops the last tokens of a prompt."""
    monkeypatch.setattr(LayerwisePushScheduler, "_prefill_backoff", lambda scheduler: backoff)
    p = decode(role="kv_producer")
    asked = {length: decode() for length in (1, 2, 3, 4, 99, 100, 101)}
    digests = {}
    for length, d in asked.items():
        d.decode("r", length)
        d.step()
        (registration,) = d.metadata.push_registrations.values()
        digests[length] = registration["prompt_digest"]
    assert len(set(digests.values())) == len(asked)
    for length, digest in digests.items():
        p.add(f"r{length}", list(range(3, 3 + length)), dict(TO_PREFILL), max_tokens=1)
        p.step()
        assert p.news(Arrived) == [Arrived(f"r{length}", None, digest)]
    p.step()
    assert p.news(Arrived) == []


def test_a_paused_p_reports_its_queued_requests(decode: Build) -> None:
    """Else P's workers would refuse the registrations: no step schedules the requests, and no later step comes."""
    from vllm.v1.core.sched.interface import PauseState

    p = decode(role="kv_producer")
    p.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    p.add("r", list(range(3, 103)), {**TO_PREFILL, "transfer_id": "t"}, max_tokens=1)
    assert p.scheduler.has_requests(), "the engine steps once more"
    assert p.step().num_scheduled_tokens == {}
    assert [(each.request_id, each.transfer_id) for each in p.news(Arrived)] == [("r", "t")]
    assert not p.scheduler.has_requests(), "the engine takes no second step"


@pytest.mark.parametrize(
    ("attention", "tokens", "first"),
    [
        ("chunk", 255, 192),
        ("chunk", 256, 192),
        ("chunk", 257, 256),
        ("window", 94, 0),
        ("window", 95, 0),
        ("window", 96, 32),
    ],
)
@pytest.mark.parametrize("first_token", [None, 9])
def test_d_registers_all_blocks_that_the_last_token_attends_to(
    decode: Build, attention: Attention, tokens: int, first: int, first_token: int | None
) -> None:
    """D may compute the last token again. This attends to tokens from ``first`` on, so D registers their blocks."""
    d = decode(attention=attention)
    d.decode("r", tokens)
    d.step()
    (registration,) = d.metadata.push_registrations.values()
    end = -(-tokens // BLOCK_SIZE)
    assert list(map(len, registration["local_block_ids"])) == [end, end - first // BLOCK_SIZE]
    d.step("r", report=None if first_token is None else WorkerReport([LoadToken("r", first_token)]))
    scheduled = d.step().scheduled_new_reqs[0]
    assert scheduled.num_computed_tokens == (tokens - 1 if first_token is None else tokens)
    if first_token is None:
        assert all(scheduled.block_ids[1][first // BLOCK_SIZE : end]), "the null block holds nobody's tokens"
    d.run("r")


def test_d_computes_a_prompt_if_p_would_count_its_blocks_differently(decode: Build) -> None:
    """The last token's window begins a block before the next token's. The last token has a block for itself."""
    d = decode(attention="window", window=WINDOW + 2)
    d.decode("r", 3 * BLOCK_SIZE + 1)
    output = d.step()
    assert output.num_scheduled_tokens == {"r": 3 * BLOCK_SIZE + 1}
    assert d.metadata.push_registrations == {}
    d.run("r")


@pytest.mark.parametrize(("attention", "tokens", "first"), [("chunk", 256, 192), ("window", 95, 0)])
def test_p_keeps_all_blocks_that_the_last_token_attends_to(
    decode: Build, attention: Attention, tokens: int, first: int
) -> None:
    """vLLM drops blocks that the next token does not need. D has registered them for the last token."""
    p = decode(role="kv_producer", attention=attention)
    p.add("r", list(range(3, 3 + tokens)), dict(TO_PREFILL), max_tokens=1)
    p.step()
    p.step()
    end = -(-tokens // BLOCK_SIZE)
    blocks = p.metadata.push_finished_blocks["r"]
    assert all(blocks[0][-end:])
    assert all(blocks[1][-(end - first // BLOCK_SIZE) :])
    assert p.free_blocks == IDLE - len(set(blocks[0] + blocks[1]) - {0})
    p.step(sent=("r",))
    assert p.free_blocks == IDLE
    assert len(p.scheduler.connector.connector_scheduler.last_windows) == 0


def test_an_abort_frees_the_last_windows_blocks_on_p(decode: Build) -> None:
    p = decode(role="kv_producer", attention="chunk")
    p.add("r", list(range(3, 259)), dict(TO_PREFILL), max_tokens=2)
    p.step()
    assert len(p.scheduler.connector.connector_scheduler.last_windows) == 1
    p.abort("r")
    p.step()
    assert p.free_blocks == IDLE
    assert len(p.scheduler.connector.connector_scheduler.last_windows) == 0


def test_d_declines_the_push_of_a_prompt_that_it_computes(decode: Build) -> None:
    """P's lease gets no heartbeat either."""
    d = decode()
    request = d.decode("r")
    request.skip_reading_prefix_cache = True
    d.step()
    (declined,) = d.news(PushDeclined)
    address, decline = declined.address, declined.message
    assert (address.engine_id, address.host, address.port, address.tp_size) == ("p", "127.0.0.1", 1, 1)
    assert (decline.request_id, decline.prefill_request_id, len(decline.prompt_digest)) == ("r", "r-on-p", 32)
    scheduler = d.scheduler.connector.connector_scheduler
    assert scheduler._heartbeat_req_engine == {}
    d.step()
    assert d.news(PushDeclined) == []
    d.run("r")


def test_d_declines_the_push_of_a_request_aborted_in_the_queue(decode: Build) -> None:
    d = decode()
    d.decode("r")
    d.abort("r")
    assert d.scheduler.has_requests(), "the workers must get the decline"
    d.step()
    assert [each.message.request_id for each in d.news(PushDeclined)] == ["r"]
    assert not d.scheduler.has_requests()


def test_the_digest_covers_all_that_a_prompt_is(world: None) -> None:
    """Tokens, embeddings, the places of embeddings among tokens, the adapter, images."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.v1.request import Request

    def image(identifier: str) -> MultiModalFeatureSpec:
        return MultiModalFeatureSpec(None, "image", identifier, PlaceholderRange(offset=0, length=2))

    numbers = torch.arange(48, dtype=torch.bfloat16).reshape(6, 8)
    scheduler: Any = SimpleNamespace(_prefill_backoff=lambda: 0, _hashes_inputs=True)

    def digest(backoff: int = 0, **changes: Any) -> str | None:
        prompt = {"prompt_token_ids": [3, 4, 5, 6, 7, 8]} | changes
        scheduler._prefill_backoff = lambda: backoff
        request = Request("r", sampling_params=SamplingParams(max_tokens=1), pooling_params=None, **prompt)
        found: str | None = VllmPushScheduler.prompt_digest(scheduler, request)
        return found

    places = [True, False] * 3
    prompts: list[dict[str, Any]] = [
        {},
        {"prompt_token_ids": [3, 4, 5, 6, 7, 9]},
        {"prompt_token_ids": None, "prompt_embeds": numbers},
        {"prompt_token_ids": None, "prompt_embeds": numbers + 1},
        {"prompt_embeds": numbers, "prompt_is_token_ids": places},
        {"prompt_embeds": numbers, "prompt_is_token_ids": places[::-1]},
        {"lora_request": LoRARequest("a", 1, "/adapter")},
        {"lora_request": LoRARequest("b", 1, "/adapter")},
        {"cache_salt": "a"},
        {"cache_salt": "b"},
        {"cache_salt": "a", "lora_request": LoRARequest("a", 1, "/adapter")},
        {"cache_salt": "a", "prompt_token_ids": None, "prompt_embeds": numbers},
        {"mm_features": [image("image")]},
        {"mm_features": [image("another image")]},
        {"mm_features": [image("image"), image("another image")]},
    ]
    assert len({digest(**one) for one in prompts} - {None}) == len(prompts)
    assert digest(**prompts[3]) == digest(prompt_token_ids=None, prompt_embeds=(numbers + 1).clone())
    assert digest(backoff=1, prompt_embeds=numbers) is None, "P may have dropped the last of them"
    scheduler._hashes_inputs = False
    assert digest(**prompts[-1]) is None, "vLLM has numbered the images"
    assert digest() == "4ab55daeeae7edb541e0398ba8553db4", "as in earlier releases"


def test_vllm_hashes_inputs_for_a_cache_of_them(decode: Build) -> None:
    """With neither cache, equal images have other names on P and D, and others may have the same."""
    scheduler = decode().scheduler.connector.connector_scheduler
    caches, model = scheduler.vllm_config.cache_config, scheduler.vllm_config.model_config
    assert scheduler._hashes_inputs, "a model without other inputs"
    for gigabytes, prefixes, hashes in ((0, True, True), (4, False, True), (0, False, False)):
        model.multimodal_config = SimpleNamespace(mm_processor_cache_gb=gigabytes)
        caches.enable_prefix_caching = prefixes
        assert scheduler._hashes_inputs == hashes


def counts(d: Decode, metric: Metric) -> list[int]:
    """A list that gets each later count of this metric."""
    recorder, counted = d.scheduler.connector.connector_scheduler.metrics.recorder, []
    count = recorder.count

    def listed(which: Metric, value: str = NO_LABEL, number: int = 1) -> None:
        if which is metric:
            counted.append(number)
        count(which, value, number)

    recorder.count = listed
    return counted


def number_of(d: Decode) -> int:
    (registration,) = d.metadata.push_registrations.values()
    return int(registration["number"])


@pytest.mark.parametrize(("policy", "ended"), [("fail", "failed"), ("fail", "parked"), ("recompute", "aborted")])
def test_what_has_landed_of_a_failed_load_is_in_the_prefix_cache(decode: Build, policy: str, ended: str) -> None:
    d = decode(policy=policy, caching=True)
    counted = counts(d, KEPT_TOKENS)
    d.decode("r")
    d.step()
    if ended == "aborted":
        d.abort("r")
    parked = [LoadParked("r", 0)] if ended == "parked" else []
    d.step(report=WorkerReport([*parked, LoadKept("r", CACHED + 1)]), failed=("r",))
    d.add("again", list(range(3, 3 + TOKENS)))
    assert d.step().num_scheduled_tokens["again"] == TOKENS - CACHED, "only full blocks are kept"
    d.run("again")
    if ended == "parked":
        d.step(report=WorkerReport([LoadCleared("r", 0)]))
    d.finish()
    assert d.free_blocks == IDLE
    assert counted == [CACHED]


def test_kept_tokens_count_without_those_that_were_in_the_cache(decode: Build) -> None:
    d = decode(policy="fail", caching=True)
    counted = counts(d, KEPT_TOKENS)
    d.add("warm", list(range(3, 3 + CACHED)))
    d.run("warm")
    for request_id, landed in (("none", 0), ("old", CACHED), ("new", CACHED + BLOCK_SIZE)):
        d.decode(request_id)
        d.step()
        assert len(d.registered()) == 7 - CACHED // BLOCK_SIZE
        d.step(report=WorkerReport([LoadKept(request_id, landed)]), failed=(request_id,))
    assert counted == [BLOCK_SIZE]


@pytest.mark.parametrize(("second", "least"), [(None, CACHED), (0, 0), (CACHED - BLOCK_SIZE, CACHED - BLOCK_SIZE)])
def test_ranks_keep_the_least_of_what_has_landed_on_each(decode: Build, second: int | None, least: int) -> None:
    """A rank that reports nothing has the whole prompt."""
    d = decode(caching=True)
    d.decode("r")
    d.step(report=WorkerReport([LoadKept("r", CACHED)]))
    d.step(report=None if second is None else WorkerReport([LoadKept("r", second)]), failed=("r",))
    assert d.step().num_scheduled_tokens["r"] == TOKENS - least


def test_numbers_of_registrations_differ(decode: Build) -> None:
    d = decode(caching=True)
    d.decode("r")
    d.step()
    first = number_of(d)
    d.decode("s")
    d.step()
    assert number_of(d) != first


@pytest.mark.parametrize(
    ("caching", "attention"), [(False, "full"), (True, "window"), (True, "chunk"), (True, "state")]
)
def test_d_asks_for_no_prefix_that_is_of_no_use(decode: Build, caching: bool, attention: Attention) -> None:
    d = decode(caching=caching, attention=attention)
    d.decode("r")
    d.step()
    assert number_of(d) == 0


# Conversations: D keeps an answered turn, and P loads what the next prompt shares with it.

TURNS = {"bidirectional_kv_xfer": True}
FULL = (TOKENS + 1) // BLOCK_SIZE
"""Blocks of the turn that "r" is with its answer of two tokens: the last one has no KV."""


def test_d_keeps_an_answered_turn_until_it_is_sent(decode: Build) -> None:
    d = decode(TURNS)
    params = d.answer("r")
    d.step()
    (kept,) = d.news(Arrived)
    blocks = d.metadata.push_finished_blocks["r"]
    assert (params["do_remote_decode"], params["do_remote_prefill"], params["remote_request_id"]) == (True, False, "r")
    assert (params["remote_num_tokens"], params["remote_block_ids"]) == (FULL * BLOCK_SIZE, blocks)
    assert params["remote_prefixes"] == kept.prefixes.shown
    assert kept.prefixes.digest(FULL * BLOCK_SIZE) is not None
    assert d.metadata.prompt_tokens["r"] == FULL * BLOCK_SIZE
    assert [len(group) for group in blocks] == [FULL]
    assert d.metadata.reqs_to_send["r"] - d.metadata.scheduler_clock == pytest.approx(480, abs=5)
    assert "r" in d.metadata.reqs_in_batch
    assert not d.scheduler.has_requests(), "an idle engine does not step while it keeps turns"
    assert d.free_blocks == IDLE - FULL
    d.step(report=WorkerReport([TurnEnded("r", 0)]))
    assert d.free_blocks == IDLE


def test_p_answers_for_a_prompt_without_blocks_as_vllm_does(decode: Build) -> None:
    from vllm.v1.request import RequestStatus

    p = decode(role="kv_producer")
    request = p.add("r", [3, 4, 5], dict(TO_PREFILL))
    request.status, request.num_computed_tokens = RequestStatus.FINISHED_LENGTH_CAPPED, 3
    sends, params = p.scheduler.connector.connector_scheduler.request_finished(request, ([],))
    assert (sends, params["remote_request_id"]) == (False, "r")


@pytest.mark.parametrize("extra", [{}, {"bidirectional_kv_xfer": False}])
def test_d_keeps_nothing_unless_it_is_asked_to(decode: Build, extra: dict[str, Any]) -> None:
    d = decode(extra)
    assert d.answer("r") is None
    assert d.free_blocks == IDLE


@pytest.mark.parametrize("why", ["aborted", "short", "one of several", "a window"])
def test_d_keeps_no_other_turns(decode: Build, why: str) -> None:
    d = decode(TURNS, attention="window" if why == "a window" else "full")
    name = "0_r" if why == "one of several" else "r"
    if why == "aborted":
        d.decode(name)
        d.step()
        d.step(name)
        d.abort(name)
    else:
        assert d.answer(name, BLOCK_SIZE - 2 if why == "short" else TOKENS) is None
    d.step()
    assert d.metadata.push_finished_blocks == {}
    assert d.free_blocks == IDLE


def test_kept_turns_give_way_to_requests(decode: Build) -> None:
    """The oldest first, when less than an eighth of the blocks is free."""
    d = decode(TURNS)
    released: list[str] = []
    plain, over = d.step, set[str]()

    def step(*received: str) -> Any:
        """The workers end the turns that give way."""
        output = plain(*received, report=WorkerReport([TurnEnded(name, 0) for name in over]) if over else None)
        until = d.metadata.reqs_to_send
        over.clear()
        over.update(name for name in until if until[name] <= d.metadata.scheduler_clock)
        released.extend(over)
        return output

    d.step = step
    for number in range(6):
        d.answer(f"r{number}")
    step()
    assert released == ["r0"]
    d.add("large", list(OTHERS[: 15 * BLOCK_SIZE]))
    d.run("large")
    assert released == ["r0", "r1", "r2"]
    assert d.reasons["large"] == "length"


def turn_on_p(
    decode: Build,
    shared: int,
    policy: str = "fail",
    salts: tuple[str | None, str | None] = (None, None),
    **changes: Any,
) -> tuple[Decode, Any]:
    """A P with a prompt whose first ``shared`` tokens are those of a turn of which a D keeps six blocks: it ends with
    P's token, 7, twice. ``salts``: D's and P's ``cache_salt``.
    """
    params = decode(TURNS).answer("r", salt=salts[0]) | changes
    p = decode(TURNS, role="kv_producer", policy=policy)
    text = [*range(3, 3 + TOKENS), 7, 7]
    return p, p.add("q", [*text[:shared], *OTHERS[: 300 - shared]], params, max_tokens=1, salt=salts[1])


@pytest.mark.parametrize(("shared", "blocks"), [(TOKENS + 2, FULL), (TOKENS, FULL), (100, 3), (70, 2)])
def test_p_registers_for_what_its_prompt_shares_with_the_turn(decode: Build, shared: int, blocks: int) -> None:
    p, request = turn_on_p(decode, shared)
    p.step()
    (registration,) = p.metadata.push_registrations.values()
    assert registration["prefix_tokens"] == blocks * BLOCK_SIZE
    assert [len(group) for group in registration["local_block_ids"]] == [blocks]
    assert (registration["request_id"], registration["prefill_request_id"]) == ("q", "r")
    assert len(registration["prompt_digest"]) == 32
    assert registration.get("transfer_id") is None
    assert request.status.name == "WAITING_FOR_REMOTE_KVS"
    assert "q" not in p.metadata.reqs_in_batch, "a completion would count as the end of the push to D"

    p.step("q")
    output = p.step()
    assert output.num_scheduled_tokens["q"] == 300 - blocks * BLOCK_SIZE
    assert "q" in p.metadata.reqs_in_batch
    cached, computed = p.metadata.step_plan.chunks
    assert (cached.cached, cached.end, cached.epoch) == (True, blocks * BLOCK_SIZE, computed.epoch)
    assert (computed.start, computed.end) == (blocks * BLOCK_SIZE, 300)
    assert p.reasons["q"] == "length"


def test_p_computes_the_last_block_of_a_prompt_that_is_the_turn(decode: Build) -> None:
    """It samples from the last token, so it computes that token."""
    params = decode(TURNS).answer("r")
    p = decode(TURNS, role="kv_producer")
    p.add("q", list(range(3, 3 + FULL * BLOCK_SIZE)), params, max_tokens=1)
    p.step()
    (registration,) = p.metadata.push_registrations.values()
    assert registration["prefix_tokens"] == (FULL - 1) * BLOCK_SIZE
    p.step("q")
    assert p.step().num_scheduled_tokens["q"] == BLOCK_SIZE


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_p_computes_its_prompt_if_the_load_fails(decode: Build, policy: str) -> None:
    """Whatever the policy is. Blocks that D may still write are parked."""
    p, _ = turn_on_p(decode, TOKENS, policy)
    p.step()
    registered = p.registered()
    p.step(report=WorkerReport([LoadParked("q", 0)]), failed=("q",))
    assert p.step().num_scheduled_tokens["q"] == 300
    assert not p.owned() & registered
    p.run("q")
    assert p.reasons["q"] == "length"
    p.step(report=WorkerReport([LoadCleared("q", 0)]), sent=("q",))
    assert p.free_blocks == IDLE


def test_an_aborted_load_of_p_is_cancelled_and_its_blocks_stay(decode: Build) -> None:
    p, _ = turn_on_p(decode, TOKENS)
    p.step()
    p.abort("q")
    p.step()
    assert p.cancelled == {"q": ABORTED}
    assert p.free_blocks == IDLE - FULL
    p.step(failed=("q",))
    assert p.free_blocks == IDLE


@pytest.mark.parametrize("ended", ["computed", "aborted"])
@pytest.mark.parametrize(
    ("shared", "changes", "declined"),
    [
        (BLOCK_SIZE, {}, ["r"]),
        (TOKENS, {"remote_num_tokens": BLOCK_SIZE, "remote_prefixes": ""}, ["r"]),
        (0, {}, []),
        (TOKENS, {"remote_prefixes": "0" * 48}, []),
        (TOKENS, {"salts": (None, "b")}, []),
        (TOKENS, {"salts": ("a", None)}, []),
        (TOKENS, {"salts": ("a", "b")}, []),
    ],
    ids=[
        "below the threshold",
        "a short turn",
        "another conversation",
        "forged",
        "P's salt",
        "D's salt",
        "other salts",
    ],
)
def test_a_turn_that_p_does_not_load_is_declined_if_it_is_the_prompts(
    decode: Build, shared: int, changes: dict[str, Any], declined: list[str], ended: str
) -> None:
    """Who knows the name of another's turn, or the tokens of one with another salt, neither gets nor ends it."""
    p, _ = turn_on_p(decode, shared, **changes)
    if ended == "aborted":
        p.abort("q")
        p.step()
    else:
        assert p.step().num_scheduled_tokens["q"] == 300
    assert p.metadata.push_registrations == {}
    messages = [each.message for each in p.news(PushDeclined)]
    assert [each.prefill_request_id for each in messages] == declined
    turn = Prefixes.of(range(3, 3 + TOKENS), BLOCK_SIZE)
    assert all(turn.has(each.prompt_digest) for each in messages)


def test_a_turn_with_the_prompts_salt_is_loaded(decode: Build) -> None:
    p, _ = turn_on_p(decode, TOKENS, salts=("a", "a"))
    p.step()
    (registration,) = p.metadata.push_registrations.values()
    assert registration["prefix_tokens"] == FULL * BLOCK_SIZE
    turn = Prefixes.of(range(3, 3 + TOKENS), BLOCK_SIZE, salt="a")
    assert registration["prompt_digest"] == turn.digest(FULL * BLOCK_SIZE)


def test_without_digests_d_decides(decode: Build) -> None:
    """A router may pass on only the keys of vLLM's pull connector."""
    p, _ = turn_on_p(decode, 40, remote_prefixes="")
    p.step()
    (registration,) = p.metadata.push_registrations.values()
    assert registration["prefix_tokens"] == FULL * BLOCK_SIZE


def test_a_p_without_the_setting_ignores_the_turn(decode: Build) -> None:
    params = decode(TURNS).answer("r")
    p = decode({}, role="kv_producer")
    p.add("q", list(OTHERS[:300]), params, max_tokens=1)
    assert p.step().num_scheduled_tokens["q"] == 300
    assert p.metadata.push_registrations == {}
    assert p.news(PushDeclined) == []


def test_an_engine_that_cannot_keep_turns_says_why(decode: Build, caplog: pytest.LogCaptureFixture) -> None:
    decode(TURNS, attention="window")
    assert "bidirectional_kv_xfer has no effect on this engine: the model has layers with windows or states" in (
        caplog.text
    )


@pytest.mark.parametrize("ids", [True, 5, "x", {"a": 1}, [[1] * 1000]])
def test_block_ids_of_a_client_stay_in_the_scheduler(decode: Build, ids: object) -> None:
    """A worker takes their length."""
    p, _ = turn_on_p(decode, TOKENS, remote_block_ids=ids)
    p.step()
    assert p.metadata.reqs_to_recv["q"].remote.block_ids == ()
    assert p.registered()


@pytest.mark.parametrize(
    "changes", [{"remote_port": "5600"}, {"transfer_mode": "pull"}, {"remote_prefixes": 7}, {"remote_num_tokens": None}]
)
def test_p_computes_its_prompt_if_a_turn_is_named_badly(decode: Build, changes: dict[str, Any]) -> None:
    p, _ = turn_on_p(decode, TOKENS, **changes)
    assert p.step().num_scheduled_tokens["q"] == 300
    assert p.metadata.push_registrations == {}


def test_p_waits_for_a_turn_half_a_minute_at_most(decode: Build) -> None:
    p, _ = turn_on_p(decode, TOKENS)
    p.step()
    awaited = p.scheduler.connector.connector_scheduler.awaited
    assert awaited.take_cancelled(time.perf_counter() + 29) == {}
    assert awaited.take_cancelled(time.perf_counter() + 31) == {"q": "no push within 30 s"}


@pytest.mark.parametrize("how", [{}, {"reset_running_requests": True, "reset_connector": True}])
def test_a_reset_ends_kept_turns(decode: Build, how: dict[str, bool]) -> None:
    """vLLM resets its cache only if all blocks are free. Those of the turn are, for it, but nobody gets them."""
    d = decode(TURNS, caching=True)
    d.answer("r")
    d.step()
    assert d.scheduler.reset_prefix_cache(**how)
    assert d.free_blocks == IDLE - FULL
    assert d.scheduler.has_requests(), "the workers must end the turn"
    d.step()
    assert d.metadata.reqs_to_send["r"] <= d.metadata.scheduler_clock
    d.step(report=WorkerReport([TurnEnded("r", 0)]))
    assert not d.scheduler.has_requests()
    assert d.free_blocks == IDLE
    d.add("again", list(range(3, 3 + TOKENS)))
    assert d.step().num_scheduled_tokens["again"] == TOKENS, "nothing is in the prefix cache"


def test_a_reset_that_fails_ends_no_turn(decode: Build) -> None:
    """A request has blocks."""
    d = decode(TURNS, caching=True)
    d.answer("r")
    d.decode("waits", CACHED)
    d.step()
    free = d.free_blocks
    assert not d.scheduler.reset_prefix_cache()
    with pytest.raises(RuntimeError, match="waiting for remote KV transfer"):
        d.scheduler.reset_prefix_cache(reset_running_requests=True)
    d.step()
    assert d.metadata.reqs_to_send == {}
    assert d.free_blocks == free


def test_a_second_turn_of_an_id_is_not_kept(decode: Build) -> None:
    """A client may give two requests one id, where vLLM does not make it unique."""
    d = decode(TURNS)
    d.answer("r")
    del d.reasons["r"]
    assert d.answer("r") is None
    assert d.free_blocks == IDLE - FULL
    d.step(report=WorkerReport([TurnEnded("r", 0)]))
    assert d.free_blocks == IDLE


def is_placed(d: Decode, request_id: str) -> bool:
    """Whether a prompt has its blocks, and its registration leaves."""
    return request_id in d.scheduler.connector.connector_scheduler.awaited.block_holds


def test_requests_to_this_engine_alone_pass_prompts_that_wait_for_blocks(decode: Build) -> None:
    """Awaited prompts hold half of the cache. The others have no blocks, and hold nobody up."""
    d = decode({"awaited_share": 0.5})
    names = [f"r{number}" for number in range(5)]
    for name in names:
        d.decode(name)
    d.step()
    assert [name for name in names if is_placed(d, name)] == names[:2]
    d.add("alone", list(OTHERS[:200]), max_tokens=3)
    d.step()
    assert d.requests["alone"].num_computed_tokens == 200
    for name in names:
        assert is_placed(d, name)
        d.step(name)
        d.step()
    d.finish()
    assert set(d.reasons.values()) == {"length"}
    assert d.free_blocks == IDLE


def test_a_prompt_that_does_not_fit_beside_what_runs_gets_no_blocks(decode: Build) -> None:
    d = decode()
    running = [d.add(f"a{number}", list(OTHERS[:450]), max_tokens=60) for number in range(2)]
    d.step()
    d.decode("r", 300)
    d.add("alone", list(OTHERS[:30]), max_tokens=3)
    while not all(request.is_finished() for request in running):
        assert not is_placed(d, "r")
        d.step()
    assert d.reasons["alone"] == "length"
    d.step()
    assert is_placed(d, "r")


def test_awaited_prompts_give_their_blocks_to_running_requests(decode: Build) -> None:
    """No running request is preempted for a prompt that P has not begun."""
    d = decode()
    answers = [d.add(f"a{number}", list(OTHERS[:64]), max_tokens=340) for number in range(2)]
    d.step()
    for name in ("old", "new"):
        d.decode(name, 300)
    d.step()
    assert is_placed(d, "old")
    assert is_placed(d, "new")
    asked: list[str] = []
    while not all(request.is_finished() for request in answers):
        d.step()
        for each in d.news(LoadPostponed):
            asked.append(each.request_id)
            d.step(failed=(each.request_id,), report=WorkerReport([LoadUnregistered(each.request_id, 0)]))
    assert asked[0] == "new"
    assert [request.num_preemptions for request in answers] == [0, 0]
    d.step("old")
    d.step("new")
    d.finish()
    assert set(d.reasons.values()) == {"length"}
    assert d.free_blocks == IDLE


def test_a_step_looks_up_the_first_waiting_prompt_only(decode: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    d = decode({"awaited_share": 0}, caching=True)
    for number in range(6):
        d.decode(f"r{number}")
    d.step()
    looked: list[str] = []
    manager = d.scheduler.kv_cache_manager
    plain = manager.get_computed_blocks
    monkeypatch.setattr(manager, "get_computed_blocks", lambda each: (looked.append(each.request_id), plain(each))[1])
    d.step()
    assert looked == ["r1"]
