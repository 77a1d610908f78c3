"""A prompt's life through the real scheduler and worker classes of a prefill and a decode engine, over real NIXL."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from functools import partial

import pytest
from vllm.v1.request import Request, RequestStatus

from bench import calm
from layerpush.core.prefill_identity import TO_PREFILL, PrefillIdentity
from layerpush.core.push_mode import SHORT_PROMPT
from layerpush.prefill.claims import REFUSED
from layerpush.prefill.push_protocol import State
from layerpush.transport import cuda
from layerpush.transport.base import TransportError
from layerpush.transport.nixl import NixlTransport
from layerpush.transport.peers import Address
from tests.connector.engine import LAYERS, CallingThreads, Engine, holds_prompt
from tests.support.cudart import FakeRuntime
from tests.support.waiting import until

Build = Callable[..., Engine]
TOKENS = 200  # seven blocks, the last one partly filled; four steps
STEPS = 4


def run(engine: Engine, steps: int) -> None:
    for _ in range(steps):
        engine.step()


def step_until(*engines: Engine, done: Callable[[], object]) -> None:
    def look() -> object:
        for engine in engines:
            engine.step()
        return done()

    until(look, pause_s=0.004)


def registered(p: Engine) -> None:
    """Wait until a decode engine's registration has reached P's worker, which looks for it at every step."""
    step_until(p, done=lambda: p.worker.connector_worker.claims.pending)


def asks_first(p: Engine, d: Engine, request_id: str = "r-1", tokens: int = TOKENS) -> list[int]:
    """D registers for a prompt before P has it. Returns D's blocks once P's worker has the registration."""
    d.decode_from(p, request_id, tokens)
    d.step()
    registered(p)
    return d.blocks(request_id)


def ends_well(p: Engine, d: Engine, request_id: str = "r-1", tokens: int = TOKENS) -> None:
    """D has loaded the request. P has reported it as sent, and has its blocks back."""
    step_until(p, d, done=lambda: request_id in d.received and request_id in p.sent)
    assert p.finished == [request_id]
    assert p.sent.count(request_id) == 1
    assert p.free_blocks == p.config.cache_config.num_gpu_blocks - 1
    until(lambda: len(p.pushes) == 0)  # the writer reports the request as sent just before it closes the push
    assert p.totals.outcomes == {"completed": 1}


@pytest.mark.parametrize("outcome", ["loaded", "failed"])
def test_the_end_of_a_load_wakes_a_resting_engine(engine: Build, outcome: str) -> None:
    p, d = engine("kv_producer"), engine("kv_consumer")
    woken = threading.Event()
    calm.listen(d.engine_id, woken.set)
    asks_first(p, d)
    assert not woken.is_set()
    p.prefill("r-1", TOKENS)
    if outcome == "loaded":
        run(p, STEPS)
    else:
        p.step()
        p.abort("r-1")
    step_until(p, done=woken.is_set)
    d.step()
    assert (d.received, d.failed) == ((["r-1"], []) if outcome == "loaded" else ([], ["r-1"]))
    assert d.scheduler.finished_recving_kv_req_ids == ({"r-1"} if outcome == "loaded" else set()), "for the next step"


def test_registered_first_layers_are_in_ds_memory_before_prefill_ends(engine: Build) -> None:
    p, d = engine("kv_producer", {"granularity": "layer"}), engine("kv_consumer")
    blocks = asks_first(p, d)
    p.prefill("r-1", TOKENS)
    p.step()
    until(lambda: holds_prompt(d, blocks, 64))
    assert p.finished == []
    assert d.received == []
    run(p, STEPS - 1)
    until(lambda: holds_prompt(d, blocks, TOKENS))

    ends_well(p, d)
    assert p.totals.hooked_layers == LAYERS * STEPS
    assert p.totals.swept_layers == 0
    assert p.totals.fallbacks == {}


@pytest.mark.parametrize(("tokens", "fallbacks"), [(TOKENS - 1, {SHORT_PROMPT: 1}), (TOKENS, {})])
def test_short_prompts_go_whole(engine: Build, tokens: int, fallbacks: dict[str, int]) -> None:
    p, d = engine("kv_producer", {"layerwise_min_tokens": TOKENS}), engine("kv_consumer")
    blocks = asks_first(p, d, tokens=tokens)
    p.prefill("r-1", tokens)
    run(p, STEPS)
    ends_well(p, d, tokens=tokens)
    assert holds_prompt(d, blocks, tokens)
    assert p.totals.fallbacks == fallbacks


def test_p_reports_a_push_as_sent_only_after_the_request_has_finished(engine: Build) -> None:
    """An earlier report would crash the scheduler."""
    p, d = engine("kv_producer"), engine("kv_consumer")
    asks_first(p, d)
    p.prefill("r-1", TOKENS)
    for _ in range(STEPS):
        assert p.sent == []
        assert p.finished == []
        p.step()
    until(d.worker.connector_worker._pending_completion_notifs.qsize)
    assert p.sent == []
    ends_well(p, d)


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "BLHNC", "BLNHC", "BHLNC"])
def test_other_memory_layouts_are_pushed_by_layer(engine: Build, layout: str) -> None:
    """Layer after layer, or rows of all layers. In BHLNC a layer has a part of a row for each head."""
    p, d = engine("kv_producer", layout=layout), engine("kv_consumer", layout=layout)
    blocks = asks_first(p, d)
    p.prefill("r-1", TOKENS)
    run(p, STEPS)
    ends_well(p, d)
    assert holds_prompt(d, blocks, TOKENS)
    assert p.totals.fallbacks == {}
    for name, cache in d.caches.items():
        others = [block for block in range(cache.shape[0]) if block not in blocks]
        assert bool((cache[others] == -1.0).all()), f"{name}: a block without a registration was written"


def test_a_request_without_a_transfer_is_not_pushed(engine: Build) -> None:
    p, d = engine("kv_producer"), engine("kv_consumer")
    asks_first(p, d, tokens=64)
    p.add("local", 40, None)
    p.prefill("r-1", 64)
    outputs = [p.step() for _ in range(3)]
    planned = {chunk.request_id for output in outputs for chunk in output.kv_connector_metadata.step_plan.chunks}
    assert planned == {"r-1"}
    step_until(p, d, done=lambda: "r-1" in p.sent)
    assert sorted(p.finished) == ["local", "r-1"]
    assert p.sent == ["r-1"]


def gives_everything_back(engine: Engine) -> bool:
    return engine.free_blocks == engine.config.cache_config.num_gpu_blocks - 1


def test_p_knows_its_queued_requests_and_refuses_unknown_ones(engine: Build) -> None:
    p, d = engine("kv_producer", {"unknown_request_timeout_s": 1}), engine("kv_consumer")
    for unfetched in ("r-7", "r-8"):
        p.prefill(unfetched, 480)
    run(p, 16)
    assert p.finished == ["r-7", "r-8"]
    assert p.free_blocks < 10
    p.prefill("r-1", 320)
    for request_id in ("r-1", "r-9"):
        d.decode_from(p, request_id, 320)
    step_until(p, d, done=lambda: d.failed)
    assert d.failed == ["r-9"]
    assert p.worker.connector_worker.claims._claims.get((d.engine_id, "r-1")).waits


def test_d_knows_the_address_from_a_heartbeats_handshake(engine: Build) -> None:
    """vLLM begins the handshake. A later request with a wrong number of ranks fails alone."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import HeartbeatInfo, NixlConnectorMetadata

    p, d = engine("kv_producer"), engine("kv_consumer")
    worker, beats = d.worker.connector_worker, NixlConnectorMetadata()
    for engine_id in (p.engine_id, "another"):
        beats.heartbeat_by_engine[engine_id] = HeartbeatInfo({"r-0"}, "127.0.0.1", p.port, 1)
    worker._send_heartbeats(beats)
    assert until(lambda: worker._connections.address(p.engine_id)) == Address(p.engine_id, "127.0.0.1", p.port, 1)
    d.decode_from(p, "mistaken", TOKENS, ranks=2)
    step_until(d, done=lambda: d.failed)
    asks_first(p, d)
    p.prefill("r-1", TOKENS)
    run(p, STEPS)
    ends_well(p, d)
    peers = worker.peers
    until(lambda: peers["another"].handshake is None)  # there is no engine "another" at that address
    assert peers[p.engine_id].handshake is not None
    worker.task(partial(worker.disconnect, p.engine_id))
    until(lambda: peers[p.engine_id].handshake is None)


def test_silent_hosts_do_not_delay_a_new_decode_engine(engine: Build) -> None:
    """vLLM's one handshake thread would wait 5 s for each of them."""
    p, d = engine("kv_producer"), engine("kv_consumer")
    worker, ended = p.worker.connector_worker, list[str | None]()
    with socket.create_server(("127.0.0.2", p.port), backlog=128):
        for number in range(30):
            ghost = Address(f"ghost-{number}", "127.0.0.2", p.port, 1)
            reach = partial(worker._connections.reach, ghost, lambda error, _: ended.append(error), 0.0, tries=1)
            worker.task(reach)
        asks_first(p, d)
        p.prefill("r-1", TOKENS)
        run(p, STEPS)
        ends_well(p, d)
        assert len(ended) < 30


@pytest.mark.parametrize("known", [False, True])
def test_a_wrong_number_of_ranks_fails_the_load_in_seconds(
    engine: Build, caplog: pytest.LogCaptureFixture, known: bool
) -> None:
    p, d = engine("kv_producer"), engine("kv_consumer")
    if known:
        asks_first(p, d, "r-0")
        p.prefill("r-0", TOKENS)
        step_until(p, d, done=lambda: "r-0" in d.received)
    d.decode_from(p, "r-1", TOKENS, ranks=2)
    step_until(d, done=lambda: d.failed)
    assert ("is connected with tp_size 1" if known else "See tp_size and pp_size") in caplog.text


def load_from_elsewhere(engine: Engine, tokens: int) -> None:
    """From now on another connector loads so many tokens of each prompt, in the prompt's first step."""
    ours = engine.connector.get_num_new_matched_tokens

    def matched(request: Request, computed: int) -> tuple[int, bool]:
        ours(request, computed)
        return tokens - computed, False

    engine.connector.get_num_new_matched_tokens = matched


@pytest.mark.parametrize("elsewhere", [False, True], ids=["alone", "beside another connector"])
def test_a_completion_waits_for_the_next_step_only_beside_another_connector(engine: Build, elsewhere: bool) -> None:
    """Alone, P's engine need not step again. Beside another connector, the next step says that none was taken back."""
    p, d = engine("kv_producer", {"granularity": "layer"}), engine("kv_consumer")
    asks_first(p, d)
    if elsewhere:
        load_from_elsewhere(p, 64)
    p.prefill("r-1", TOKENS)
    steps = STEPS - elsewhere
    outputs = [p.step() for _ in range(steps)]
    chunks = [chunk for output in outputs for chunk in output.kv_connector_metadata.step_plan.chunks]
    assert [chunk.provisional for chunk in chunks] == [elsewhere] * steps
    assert p.finished == ["r-1"]
    if elsewhere:
        session = until(lambda: p.pushes._pushes.get("r-1")).session
        until(lambda: session.state is State.UNCONFIRMED)
        d.step()
        assert d.received == []
        p.step()
    step_until(d, done=lambda: d.received == ["r-1"])
    ends_well(p, d)


@pytest.mark.parametrize("tokens", [1, 3], ids=["ends", "goes on"])
def test_steps_that_vllm_takes_back_begin_a_new_epoch(engine: Build, tokens: int) -> None:
    p, d = engine("kv_producer", {"granularity": "layer"}, max_num_batched_tokens=512), engine("kv_consumer")
    p.scheduler.recompute_kv_load_failures = True
    blocks = asks_first(p, d)
    load_from_elsewhere(p, 96)
    request = p.prefill("r-1", TOKENS)
    request.max_tokens = request.sampling_params.max_tokens = tokens
    p.lost = {1}
    plan = p.step().kv_connector_metadata.step_plan
    assert [(chunk.epoch, chunk.start, chunk.provisional) for chunk in plan.chunks] == [(0, 96, True)]
    assert request.num_computed_tokens == 32
    plan = p.step().kv_connector_metadata.step_plan
    assert (plan.preempted, plan.rewound, plan.accepted) == ((), ("r-1",), ())
    assert [(chunk.epoch, chunk.start, chunk.groups[0].first) for chunk in plan.chunks] == [(1, 32, 0)]
    plan = p.step().kv_connector_metadata.step_plan
    assert plan.accepted == (() if tokens == 1 else ("r-1",)), "a request that has ended needs no other word"
    step_until(p, d, done=lambda: "r-1" in d.received)
    assert holds_prompt(d, blocks, TOKENS, first=32), "the first block was loaded from elsewhere: the engine has no KV"


def test_a_request_that_ends_by_a_step_taken_back_is_not_pushed(engine: Build) -> None:
    """vLLM with steps in flight may take a request's steps back, and end it with a token of the next step."""
    p, d = engine("kv_producer", {"granularity": "layer"}), engine("kv_consumer")
    asks_first(p, d)
    request = p.prefill("r-1", TOKENS)
    run(p, 2)
    request.num_computed_tokens = 32
    p.scheduler.finish_requests("r-1", RequestStatus.FINISHED_LENGTH_CAPPED)
    step_until(p, d, done=lambda: d.failed == ["r-1"])
    assert p.transfer_params.get("r-1") is None
    assert gives_everything_back(p)


def test_a_prefix_that_the_step_itself_computes_waits_for_its_layers(engine: Build) -> None:
    """vLLM's scheduler counts a block as cached once it has planned the step that fills the block."""
    options = {"enable_prefix_caching": True, "max_num_batched_tokens": 512}
    p, d = engine("kv_producer", {"granularity": "layer"}, **options), engine("kv_consumer")
    blocks = asks_first(p, d)
    p.prefill("r-0", TOKENS)
    p.prefill("r-1", TOKENS)
    output = p.step()
    chunks = [chunk for chunk in output.kv_connector_metadata.step_plan.chunks if chunk.request_id == "r-1"]
    assert [(chunk.cached, chunk.start) for chunk in chunks] == [(False, 192)], "a prefix hit, but no cached chunk"
    step_until(p, d, done=lambda: "r-1" in d.received)
    assert holds_prompt(d, blocks, TOKENS)


def test_the_main_thread_never_calls_nixl(engine: Build) -> None:
    p, d = engine("kv_producer", {"granularity": "layer"}), engine("kv_consumer")
    notes = []
    for one in (p, d):
        locked = one.worker.connector_worker.nixl_wrapper
        for name in [name for name in vars(locked) if not name.startswith("_")]:
            delattr(locked, name)
        locked._agent = CallingThreads(locked._agent)
        notes.append(locked._agent)
    d.decode_from(p, "r-1", TOKENS)
    p.prefill("r-1", TOKENS)
    run(d, 1)
    run(p, STEPS)
    ends_well(p, d)

    for note in notes:
        called = {name for thread, name in note.calls if thread == threading.main_thread().name}
        assert called == set()
        assert note.calls


LONG_LEASE = {"kv_lease_duration": 480}


@pytest.mark.parametrize("order", ["P first", "D first"])
@pytest.mark.parametrize("why", ["no handshake", "a misfit", "not loaded", "refused"])
def test_p_frees_its_blocks_when_d_does_not_load_them(engine: Build, why: str, order: str) -> None:
    """D refuses the load or the request, or vLLM skips the load because a request asks for its prompt's log
    probabilities.
    """
    p, d = engine("kv_producer", LONG_LEASE), engine("kv_consumer")
    worker = d.worker.connector_worker
    if order == "P first":
        p.prefill("r-1", TOKENS)
        run(p, STEPS + 1)
        assert p.finished == ["r-1"]
    if why == "refused":
        d.refuse("placeholder", PrefillIdentity(p.engine_id, "127.0.0.1", p.port, 1).to_decode("r-1"))
    else:
        request = d.decode_from(p, "r-1", TOKENS)
        request.skip_reading_prefix_cache = why == "not loaded"
    if why == "no handshake":
        worker.compat_hash = "of another model"
    elif why == "a misfit":
        worker.mismatch = lambda engine_id: f"engine {engine_id!r} does not fit"
    d.step()
    if order == "D first":
        claims = p.worker.connector_worker.claims
        step_until(p, d, done=lambda: claims._claims.unwanted)
        p.prefill("r-1", TOKENS)
    step_until(p, d, done=lambda: p.sent == ["r-1"])
    assert p.free_blocks == p.config.cache_config.num_gpu_blocks - 1
    assert d.failed == (["r-1"] if why in ("no handshake", "a misfit") else [])


@pytest.mark.parametrize("order", ["P first", "D first"])
def test_d_hears_at_once_of_a_request_that_p_refuses(
    engine: Build, caplog: pytest.LogCaptureFixture, order: str
) -> None:
    p, d = engine("kv_producer", {"unknown_request_timeout_s": 480}), engine("kv_consumer")
    if order == "P first":
        p.refuse("r-1", dict(TO_PREFILL))
        run(p, 2)
    d.decode_from(p, "r-1", TOKENS)
    if order == "D first":
        claims = p.worker.connector_worker.claims
        step_until(p, d, done=lambda: claims.pending)
        p.refuse("r-1", dict(TO_PREFILL))
    step_until(p, d, done=lambda: d.failed == ["r-1"])
    assert any("KV load of r-1" in line and REFUSED in line for line in caplog.messages)
    assert p.free_blocks == p.config.cache_config.num_gpu_blocks - 1
    assert not p.scheduler.has_requests()


@pytest.fixture
def runtimes(monkeypatch: pytest.MonkeyPatch) -> list[FakeRuntime]:
    """P's and D's runtime, of a GPU that does not order WRITEs itself. Their device is the CPU."""
    both = [FakeRuntime(), FakeRuntime()]
    made = iter(both)
    monkeypatch.setattr(cuda, "runtime", lambda _: next(made))
    return both


def test_engines_start_without_optional_calls(
    engine: Build, monkeypatch: pytest.MonkeyPatch, runtimes: list[FakeRuntime], caplog: pytest.LogCaptureFixture
) -> None:
    """An old driver, and a NIXL backend without addresses."""

    def fail(_: NixlTransport) -> bytes:
        raise TransportError("the agent has no address")

    monkeypatch.setattr(NixlTransport, "contact", fail)
    for runtime in runtimes:
        runtime.error = 1
    p, d = engine("kv_producer"), engine("kv_consumer")
    blocks = asks_first(p, d)
    p.prefill("r-1", TOKENS)
    run(p, STEPS)
    ends_well(p, d)
    assert holds_prompt(d, blocks, TOKENS)
    assert "cannot report it here: the agent has no address" in caplog.text
    assert "does not flush the writes of a NIC" in caplog.text
    assert [runtime.pending for runtime in runtimes] == [0, 0]


def test_a_flush_that_fails_costs_one_load(
    engine: Build, runtimes: list[FakeRuntime], caplog: pytest.LogCaptureFixture
) -> None:
    p, d = engine("kv_producer"), engine("kv_consumer")
    asks_first(p, d)
    runtimes[1].error = 700
    p.prefill("r-1", TOKENS)
    step_until(p, d, done=lambda: d.failed and p.sent)
    assert (d.failed, d.received, p.sent) == (["r-1"], [], ["r-1"])
    assert "KV load of r-1 from" in caplog.text
    assert "failed: WRITEs that landed cannot be made visible to the device: cudaDeviceFlush" in caplog.text
    assert gives_everything_back(d)
    runtimes[1].error = 0
    asks_first(p, d, "r-2")
    p.prefill("r-2", TOKENS)
    step_until(p, d, done=lambda: d.received)
    assert d.received == ["r-2"]


def test_only_d_flushes_writes_into_its_device(engine: Build, runtimes: list[FakeRuntime]) -> None:
    p, d = engine("kv_producer"), engine("kv_consumer")
    asks_first(p, d)
    p.prefill("r-1", TOKENS)
    run(p, STEPS)
    ends_well(p, d)
    ours, theirs = runtimes
    assert ours.flushes == []
    assert theirs.flushes
    assert threading.main_thread().name not in theirs.threads
    for runtime in runtimes:
        assert set(runtime.modes) == {"nixl-push-writer"}, "only the writer queries events while others capture graphs"
