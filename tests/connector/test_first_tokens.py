"""D's real schedulers start requests with P's token, under vLLM's real bookkeeping of its first model runner.

The tests write the workers' reports. ``Runner`` has no model: it derives a token from all tokens before it that it
knows. So an answer is right only if scheduler and runner agree on every token.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from layerpush.compat.worker_report import WorkerReport
from layerpush.core.first_token import Missing
from layerpush.core.load_news import LoadToken
from layerpush.core.prefill_identity import PrefillIdentity
from tests.connector.conftest import PORTS
from tests.connector.engine import BLOCK_SIZE, BLOCKS, cache_config, config_of

VOCABULARY, EOS = 1024, 1000
SCHEDULERS = ("Scheduler", "AsyncScheduler")


def follows(tokens: Sequence[int]) -> int:
    """The next token of a text."""
    return (sum(tokens) * 31 + 7 * len(tokens)) % 997 + 3


def answer(prompt: Sequence[int], count: int) -> list[int]:
    text = list(prompt)
    for _ in range(count):
        text.append(follows(text))
    return text[len(prompt) :]


class Runner:
    """vLLM's first model runner without a model: its own ``_update_states`` on its own batch."""

    def __init__(self, config: Any, caches: Any, *, runs_ahead: bool) -> None:
        import torch
        from vllm.v1.worker.gpu_input_batch import InputBatch
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        size = caches.kv_cache_groups[0].kv_cache_spec.block_size
        longest = config.model_config.max_model_len
        device = torch.device("cpu")
        self.batch = InputBatch(
            max_num_reqs=16, max_model_len=longest, max_num_batched_tokens=1024, device=device,
            vocab_size=VOCABULARY, block_sizes=[size], max_num_blocks_per_req=[longest // size],
        )  # fmt: skip
        self._update_states = GPUModelRunner._update_states
        self.state = SimpleNamespace(
            requests={}, num_prompt_logprobs={}, input_batch=self.batch, device=device, speculative_config=None,
            is_pooling_model=False, uses_mrope=False, use_async_scheduling=runs_ahead, use_async_spec_decode=False,
            late_interaction_runner=SimpleNamespace(on_requests_finished=id, register_request=lambda *_: None),
            _on_request_state_removed=lambda *_: None, _process_encoder_cache_scheduler_output=id,
            _may_reorder_batch=id, _zero_block_ids=id,
        )  # fmt: skip

    def run(self, output: Any, connector_output: Any) -> Any:
        from vllm.v1.outputs import ModelRunnerOutput

        self._update_states(self.state, output)
        batch, ids = self.batch, list(output.num_scheduled_tokens)
        sampled: list[list[int]] = []
        for one in ids:
            row = batch.req_id_to_index[one]
            end = int(batch.num_computed_tokens_cpu[row]) + output.num_scheduled_tokens[one]
            known = int(batch.num_tokens_no_spec[row])
            assert end <= known, f"{one} computes a token that the runner does not know"
            sampled.append([])
            if end == known:
                token = follows(batch.token_ids_cpu[row, :end].tolist())
                batch.token_ids_cpu[row, end] = token
                batch.num_tokens_no_spec[row] = end + 1
                self.state.requests[one].output_token_ids.append(token)
                sampled[-1].append(token)
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={one: index for index, one in enumerate(ids)},
            sampled_token_ids=sampled,
            kv_connector_output=connector_output,
        )


class Decode:
    """A decode engine. With an ``AsyncScheduler`` it schedules a step before it has the last step's output."""

    def __init__(self, config: Any, scheduler: str) -> None:
        from vllm.v1.core.sched import async_scheduler
        from vllm.v1.core.sched import scheduler as synchronous
        from vllm.v1.structured_output import StructuredOutputManager

        config.cache_config.num_gpu_blocks = BLOCKS
        caches = cache_config()
        kinds = {"Scheduler": synchronous.Scheduler, "AsyncScheduler": async_scheduler.AsyncScheduler}
        self.scheduler: Any = kinds[scheduler](
            config, caches, StructuredOutputManager(config), BLOCK_SIZE, log_stats=True
        )
        self._ahead = int(scheduler == "AsyncScheduler")
        self._runner = Runner(config, caches, runs_ahead=bool(self._ahead))
        self._results: deque[tuple[Any, Any]] = deque()
        self._reports: deque[Any] = deque()
        self.steps: list[Any] = []
        self.outputs: defaultdict[str, list[Any]] = defaultdict(list)
        self.requests: dict[str, Any] = {}
        self.registrations: dict[str, Any] = {}
        self.origins: Counter[str] = Counter()
        """Numbers of requests by the origin of their first token."""
        if self.ours.first_tokens is not None:
            count = self.ours.first_tokens._count
            self.ours.first_tokens._count = lambda origin: (count(origin), self.origins.update([origin]))

    @property
    def ours(self) -> Any:
        return self.scheduler.connector.connector_scheduler

    def tokens(self, request_id: str) -> list[int]:
        return [token for output in self.outputs[request_id] for token in output.new_token_ids]

    def ask(
        self,
        request_id: str = "r",
        tokens: int = 200,
        *,
        from_p: bool = True,
        prompt: list[int] | None = None,
        **sampling: Any,
    ) -> list[int]:
        """Returns the prompt."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        from tests.connector.engine import block_hasher

        params = PrefillIdentity("p", "127.0.0.1", 1, 1).to_decode(f"{request_id}-on-p")
        extra = {"kv_transfer_params": params} if from_p else None
        chosen: dict[str, Any] = {"temperature": 0, "max_tokens": 6, "extra_args": extra, **sampling}
        sampling_params = SamplingParams(**chosen)
        sampling_params.update_from_generation_config({"eos_token_id": EOS}, EOS)
        first = 3 + 17 * len(self.requests)
        prompt = prompt or list(range(first, first + tokens))
        hasher = block_hasher() if self.scheduler.cache_config.enable_prefix_caching else None
        request = Request(request_id, prompt, sampling_params, None, block_hasher=hasher)
        self.requests[request_id] = request
        self.scheduler.add_request(request)
        return prompt

    def step(self, *received: str, failed: Sequence[str] = (), **first_tokens: int | Missing) -> Any:
        """One iteration of the engine's loop. The arguments are the workers' report."""
        from vllm.v1.outputs import KVConnectorOutput

        output = self.scheduler.schedule()
        self.steps.append(output)
        self.registrations.update(output.kv_connector_metadata.push_registrations)
        report = KVConnectorOutput(
            finished_sending=set(),
            finished_recving={*received, *failed},
            failed_recving=set(failed),
            kv_connector_worker_meta=WorkerReport([LoadToken(*each) for each in first_tokens.items()])
            if first_tokens
            else None,
        )
        self._results.append((output, self._runner.run(output, report)))
        while len(self._results) > self._ahead:
            self._update()
        return output

    def settle(self) -> None:
        """Take the outputs of all steps."""
        while self._results:
            self._update()

    def _update(self) -> None:
        for outputs in self.scheduler.update_from_output(*self._results.popleft()).values():
            for output in outputs.outputs:
                self.outputs[output.request_id].append(output)

    def run(self) -> None:
        for _ in range(300):
            self.step()
            if not self.scheduler.has_unfinished_requests():
                self.settle()
                return
        raise AssertionError("requests are left over")

    def load(self, request_id: str, first_token: int | Missing | None = None) -> None:
        """The request's KV arrives with P's token, or with the reason for its absence."""
        self.step(request_id, **({} if first_token is None else {request_id: first_token}))
        self.settle()


Build = Callable[..., Decode]


@pytest.fixture(params=SCHEDULERS)
def scheduler(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def decode(world: None, model: Path, monkeypatch: pytest.MonkeyPatch, scheduler: str) -> Iterator[Build]:
    engines: list[Decode] = []

    def build(
        first_token: str = "prefill",
        policy: str = "recompute",
        role: str = "kv_consumer",
        extra: dict[str, Any] | None = None,
        **options: Any,
    ) -> Decode:
        port = PORTS.next_free()
        monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(port))
        chosen = {"max_num_seqs": 16, "max_num_batched_tokens": 1024, **options}
        config = config_of(model, role, f"e-{port}", {"first_token": first_token, **(extra or {})}, **chosen)
        config.kv_transfer_config.kv_load_failure_policy = policy
        config.scheduler_config.async_scheduling = scheduler == "AsyncScheduler"
        engines.append(Decode(config, scheduler))
        return engines[-1]

    yield build
    for one in engines:
        one.scheduler.shutdown()


def test_p_s_token_is_the_first_of_the_answer(decode: Build) -> None:
    d = decode()
    prompt = d.ask()
    d.step()
    assert d.registrations["r"]["sampling"] is not None
    first, *_ = answer(prompt, 1)
    d.load("r", first)
    assert d.tokens("r") == [first], "the token leaves as soon as the load is complete"
    assert d.origins == {"prefill": 1}
    assert len(d.ours._hand_overs) == 0, "the hand-over ends with the token, not with the next step"
    step = d.step()
    assert step.num_scheduled_tokens == {"r": 1}
    assert step.scheduled_new_reqs[0].num_computed_tokens == len(prompt)
    d.run()
    assert d.tokens("r") == answer(prompt, 6)
    assert d.outputs["r"][-1].finish_reason is not None
    assert d.origins == {"prefill": 1}, "once for each request"


@pytest.mark.parametrize(("tokens", "answered"), [(1, 6), (31, 6), (32, 2), (33, 6), (192, 6)])
def test_prompts_up_to_the_end_of_a_block_and_short_answers(decode: Build, tokens: int, answered: int) -> None:
    d = decode()
    prompt = d.ask(tokens=tokens, max_tokens=answered)
    d.step()
    d.load("r", answer(prompt, 1)[0])
    d.run()
    assert d.tokens("r") == answer(prompt, answered)
    assert d.origins == {"prefill": 1}


def test_a_follow_up_prompt_hits_the_answer_in_the_prefix_cache(decode: Build) -> None:
    """P's token is in the hash of its block, as any other token."""
    d = decode(enable_prefix_caching=True)
    prompt = d.ask(tokens=190)
    d.step()
    d.load("r", answer(prompt, 1)[0])
    d.run()
    again = d.ask("again", prompt=[*prompt, *answer(prompt, 6)], from_p=False)
    d.run()
    assert d.tokens("again") == answer(again, 6)
    assert d.outputs["again"][0].prefill_stats.num_cached_tokens == 192


def test_without_the_setting_d_requests_no_first_token(decode: Build) -> None:
    d = decode("decode")
    prompt = d.ask()
    d.step()
    assert "sampling" not in d.registrations["r"]
    d.load("r")
    d.run()
    assert d.tokens("r") == answer(prompt, 6)
    assert d.origins == {}


def test_preempted_answers_are_computed_again(decode: Build) -> None:
    """The scheduler then has P's token as any other. No runner forgets the token or counts it twice."""
    d = decode()
    prompts = {name: d.ask(name, tokens=330 + number, max_tokens=150) for number, name in enumerate("abc")}
    d.step()
    for name, prompt in prompts.items():
        d.load(name, answer(prompt, 1)[0])
    d.run()
    assert any(request.num_preemptions for request in d.requests.values())
    assert {name: d.tokens(name) for name in prompts} == {name: answer(prompts[name], 150) for name in prompts}
    assert d.origins == {"prefill": 3}


def test_the_v2_runner_gets_every_token_of_a_new_request(decode: Build) -> None:
    d = decode()
    prompt = d.ask()
    d.step()
    d.load("r", 77)
    d.scheduler.use_v2_model_runner = True
    (new,) = d.scheduler.schedule().scheduled_new_reqs
    assert new.prompt_token_ids == prompt
    assert list(new.prefill_token_ids) == [*prompt, 77]
    assert new.num_computed_tokens == len(prompt)
    old = d.scheduler.schedule().scheduled_cached_reqs
    if old.req_ids:  # the request was scheduled ahead
        assert old.num_output_tokens == [2]


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("logprobs", {"logprobs": 1}),
    ("logprobs", {"prompt_logprobs": 1, "skip_reading_prefix_cache": False}),
    ("penalties", {"presence_penalty": 0.5}),
    ("penalties", {"frequency_penalty": 0.5}),
    ("penalties", {"repetition_penalty": 1.1}),
    ("penalties", {"min_tokens": 2}),
    ("seed", {"temperature": 1.0, "seed": 7}),
    ("ends", {"max_tokens": 1}),
    ("ends", {"tokens": 511}),  # the prompt and its first token fill the context
]


@pytest.mark.parametrize(("reason", "sampling"), REFUSED, ids=str)
def test_d_computes_the_first_token_of_some_requests(decode: Build, reason: str, sampling: dict[str, Any]) -> None:
    d = decode()
    d.ask(**sampling)
    d.step()
    assert "sampling" not in d.registrations["r"]
    assert d.origins == {reason: 1}
    d.load("r")
    assert d.tokens("r") == []
    d.run()
    assert len(d.tokens("r")) == (1 if reason == "ends" else 6)


def test_one_of_several_answers_does_not_use_p_s_token(decode: Build) -> None:
    d = decode()
    d.ask("1_cmpl-7")
    d.step()
    assert d.origins == {"n": 1}


def test_a_request_with_a_grammar_does_not_use_p_s_token(decode: Build) -> None:
    from layerpush.compat import first_tokens

    d = decode()
    d.ask()
    d.requests["r"].structured_output_request = SimpleNamespace()
    assert first_tokens._refusal(d.requests["r"], 512) == "structured_output"


def test_a_greedy_request_with_a_seed_uses_p_s_token(decode: Build) -> None:
    d = decode()
    d.ask(temperature=0, seed=7)
    d.step()
    assert d.registrations["r"]["sampling"] is not None


def test_one_ranks_token_is_every_ranks(decode: Build) -> None:
    """Another rank's reason comes later, but before the last rank's load is over."""
    d = decode()
    first, *_ = answer(d.ask(), 1)
    d.step(r=first)
    d.step(r="late")
    d.load("r", None)
    assert d.tokens("r") == [first]
    assert d.origins == {"prefill": 1}


@pytest.mark.parametrize("missing", ["not_promised", "late", "other_sampling"])
def test_d_computes_a_missing_first_token(decode: Build, missing: Missing) -> None:
    d = decode()
    prompt = d.ask()
    d.step()
    d.load("r", missing)
    assert d.tokens("r") == []
    d.run()
    assert d.tokens("r") == answer(prompt, 6)
    assert d.origins == {missing: 1}


@pytest.mark.parametrize("token", [EOS, 900])
def test_p_s_stop_token_is_the_whole_answer(decode: Build, token: int) -> None:
    """D draws no other token in its place: answers that go on would be too many."""
    from vllm.v1.engine import FinishReason

    d = decode(enable_prefix_caching=True)
    free = d.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    prompt = d.ask(stop_token_ids=[900])
    d.step()
    d.load("r", token)
    (output,) = d.outputs["r"]
    assert (output.new_token_ids, output.finish_reason) == ([token], FinishReason.STOP)
    assert output.stop_reason == (None if token == EOS else token)
    assert output.prefill_stats.num_cached_tokens == 200
    assert d.origins == {"prefill": 1}
    assert not d.scheduler.requests
    assert not d.scheduler.has_unfinished_requests()
    assert len(d.ours._hand_overs) == 0
    first_tokens = d.ours.first_tokens
    assert not any([first_tokens._asked, first_tokens._loaded, first_tokens._started])
    d.step()
    assert d.steps[-1].finished_req_ids == {"r"}
    assert d.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == free
    d.ask("again", prompt=[*prompt, 5], from_p=False)
    d.run()
    assert d.outputs["again"][0].prefill_stats.num_cached_tokens == 192, "the prompt's whole blocks"


def test_an_answer_of_one_stop_token_returns_its_turn(decode: Build) -> None:
    d = decode(extra={"bidirectional_kv_xfer": True})
    d.ask()
    d.step()
    d.load("r", EOS)
    (output,) = d.outputs["r"]
    params = output.kv_transfer_params
    assert (params["remote_request_id"], params["remote_num_tokens"]) == ("r", 200 // BLOCK_SIZE * BLOCK_SIZE)


@pytest.mark.parametrize("token", [VOCABULARY, 2**31 - 1])
def test_d_computes_the_first_token_if_p_s_token_is_unusable(decode: Build, token: int) -> None:
    d = decode()
    prompt = d.ask()
    d.step()
    d.load("r", token)
    assert d.tokens("r") == []
    assert d.origins == {"invalid": 1}
    d.run()
    assert d.tokens("r") == answer(prompt, 6)


def test_p_s_stop_token_is_used_if_the_request_ignores_eos(decode: Build) -> None:
    d = decode()
    d.ask(ignore_eos=True)
    d.step()
    d.load("r", EOS)
    assert d.tokens("r") == [EOS]


def test_a_failed_load_does_not_use_p_s_token(decode: Build) -> None:
    """One rank has loaded everything and has the token, another one has failed."""
    d = decode()
    prompt = d.ask()
    d.step()
    d.step(r=answer(prompt, 1)[0])
    d.step(failed=["r"])
    d.settle()
    assert d.tokens("r") == []
    assert d.origins == {"failed_load": 1}
    d.run()
    assert d.tokens("r") == answer(prompt, 6)


@pytest.mark.parametrize("forbidden", [0, 1], ids=["allowed", "forbidden"])
@pytest.mark.parametrize("max_tokens", [1, 2])
def test_p_may_sample_a_stop_token(decode: Build, forbidden: int, max_tokens: int) -> None:
    """A router forbids it to P alone."""
    p = decode(role="kv_producer")
    p.ask(max_tokens=max_tokens, min_tokens=forbidden, extra_args={"kv_transfer_params": {"do_remote_decode": True}})
    (new,) = p.step().scheduled_new_reqs
    still = forbidden if max_tokens == 2 else 0  # only a P of one token may forget it
    assert new.sampling_params.min_tokens == still
    p.run()
    p.step()
    (sampled,) = [one for step in p.steps for one in step.kv_connector_metadata.sampled.values()]
    d = decode()
    d.ask()
    d.step()
    asked = d.registrations["r"]
    assert (sampled.sampling == asked["sampling"]) == (not still)
    assert sampled.differing(asked["parameters"]) == (("min_tokens",) if still else ())


def test_without_stop_tokens_min_tokens_changes_no_first_token() -> None:
    from vllm import SamplingParams

    from layerpush.compat.first_tokens import sampling_of

    assert sampling_of(SamplingParams(min_tokens=1)) == sampling_of(SamplingParams())
    stopping = SamplingParams(stop_token_ids=[5])
    assert sampling_of(stopping) == sampling_of(SamplingParams())
    assert sampling_of(SamplingParams(stop_token_ids=[5], min_tokens=1)) != sampling_of(stopping)
    ignoring = SamplingParams(ignore_eos=True, min_tokens=1)  # vLLM forbids the end of text even so
    ignoring.update_from_generation_config({"eos_token_id": EOS}, EOS)
    assert [name for name, _ in sampling_of(ignoring)[1]] == ["min_tokens"]


def test_an_aborted_request_leaves_no_first_token_behind(decode: Build) -> None:
    from vllm.v1.request import RequestStatus

    d = decode()
    for name in ("before", "after"):
        d.ask(name)
    d.step()
    d.scheduler.finish_requests("before", RequestStatus.FINISHED_ABORTED)
    d.step("before", "after", before=5, after=6)
    d.settle()
    assert d.tokens("before") == []
    assert d.tokens("after") == [6]
    d.scheduler.finish_requests("after", RequestStatus.FINISHED_ABORTED)
    d.step()
    d.settle()
    assert not d.scheduler.requests
    first_tokens = d.ours.first_tokens
    assert not any([first_tokens._asked, first_tokens._loaded, first_tokens._started])


def test_without_a_free_block_d_computes_the_first_token(decode: Build) -> None:
    """The prompt ends with a block, and no block is free: D computes the last token in a block of the request."""
    d = decode()
    full = [d.ask(f"r{number}", tokens=96) for number in range(13)]
    d.step()
    assert len(d.registrations) == 13
    assert d.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == 0
    d.load("r0", answer(full[0], 1)[0])
    assert d.origins == {"no_block": 1}
    for number in range(1, 13):
        d.load(f"r{number}", answer(full[number], 1)[0])
    d.run()
    for number, prompt in enumerate(full):
        assert d.tokens(f"r{number}") == answer(prompt, 6)


def test_the_front_end_gets_the_same_events_and_cached_tokens(decode: Build) -> None:
    """The same events and cached tokens as from an engine that computes the token."""
    from vllm.v1.engine import EngineCoreEventType

    stats = []
    for first_token in ("prefill", "decode"):
        d = decode(first_token)
        prompt = d.ask()
        d.step()
        d.load("r", answer(prompt, 1)[0] if first_token == "prefill" else None)
        d.run()
        output = d.outputs["r"][0]
        assert [event.type for event in output.events] == [
            EngineCoreEventType.QUEUED,
            EngineCoreEventType.SCHEDULED,
        ]
        assert all(output.prefill_stats is None for output in d.outputs["r"][1:])
        stats.append(output.prefill_stats)
    assert stats[0] == stats[1]
    assert stats[0].num_cached_tokens == 200


def test_an_engine_that_cannot_use_p_s_tokens_logs_it_once(decode: Build, caplog: pytest.LogCaptureFixture) -> None:
    d = decode(logits_processors=["anything:Processor"])
    for name in ("r", "s"):
        d.ask(name)
    d.step()
    assert d.origins == {"engine": 2}
    said = [record.getMessage() for record in caplog.records if "computes first tokens itself" in record.getMessage()]
    assert said == [
        "layerpush: this engine computes first tokens itself, although P could: it has logits processors of its own"
    ]


def test_reasons_for_an_engine_to_use_no_token_of_p(world: None, model: Path) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    from layerpush.compat import patches
    from layerpush.compat.first_tokens import engine_refusal

    class Overriding(Scheduler):
        def schedule(self, *args: Any, **kwargs: Any) -> Any:
            return super().schedule(*args, **kwargs)

    class Inheriting(Scheduler):
        pass

    patches.install(patches.Process.ENGINE_CORE)
    config = config_of(model, "kv_consumer", "d-0")
    assert engine_refusal(config, prefill_backoff=0) is None
    assert engine_refusal(config, prefill_backoff=1) == "P computes this model's prompts only up to their last tokens"
    config.scheduler_config.scheduler_cls = Inheriting
    assert engine_refusal(config, prefill_backoff=0) is None
    config.scheduler_config.scheduler_cls = Overriding
    reason = engine_refusal(config, prefill_backoff=0)
    assert reason is not None
    assert "Overriding has methods of its own" in reason
    config.scheduler_config.scheduler_cls = dict
    assert engine_refusal(config, prefill_backoff=0) == "its scheduler dict is not vLLM's"
    config.parallel_config.pipeline_parallel_size = 2
    assert engine_refusal(config, prefill_backoff=0) == "its layers are spread over a pipeline"
    config.speculative_config = SimpleNamespace()
    assert engine_refusal(config, prefill_backoff=0) == "it decodes speculatively"
