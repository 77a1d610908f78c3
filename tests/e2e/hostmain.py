"""The process that hosts one vLLM engine: builds it, obeys commands from a pipe, reports finished requests.

Protocol (pickled tuples). In: (seq, method, args). Out: ("reply", seq, value), ("error", seq, traceback),
("output", request id, Finished), ("ready", free KV blocks, None),
("crash", traceback, None). One engine step at a time, on this thread only, between commands.
"""

import faulthandler
import os
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.kv_cache_interface import MambaSpec

from bench.servers.forkserver import end_with_parent, fork_children
from tests.e2e.enginespec import SCHEDULER_BLOCK_SIZE, EngineSpec
from tests.e2e.kvwatch import KvWatch, watched_layers
from tests.e2e.models import ADAPTERS
from tests.e2e.notifwatch import NotificationWatch
from tests.e2e.preload import ENVIRONMENT
from tests.e2e.results import Finished
from tests.e2e.wirefaults import WireFaults
from tests.support import libfabric, lmcache

SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.001, 0.02


def prepare_process(log_path: str, port: int) -> None:
    """Environment, logging and parent-death signal. Must run before NIXL is imported."""
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
    os.environ.update(ENVIRONMENT, VLLM_NIXL_SIDE_CHANNEL_PORT=str(port))
    fork_children()


class HostedEngine:
    """The engine and the commands. The parent may call public methods by name."""

    def __init__(self, spec: EngineSpec, engine_id: str, model: str, trace_dir: str, pipe: Connection) -> None:
        self.spec = spec
        self.pipe = pipe
        self.free_running = True
        self.notifications = NotificationWatch()
        self.faults: WireFaults | None = None
        self.scheduled_tokens: Counter[str] | None = None
        self.drafts: list[list[list[int]]] = []
        fields = spec.transfer_fields(trace_dir)
        config = None if fields is None else KVTransferConfig(engine_id=engine_id, **fields)
        options = spec.engine_options(model)
        if not options["enforce_eager"]:
            os.environ.pop("TORCH_COMPILE_DISABLE", None)  # vLLM reads it now; torch has read it
            torch._dynamo.config.disable = False
        self.variant = 0
        """Of the adapters, embeddings or images: those of the next requests."""
        self.adapters: Sequence[LoRARequest | None] = [None, None]
        if options.get("enable_lora"):
            self.adapters = [LoRARequest(name, number, f"{model}/{name}") for number, name in enumerate(ADAPTERS, 1)]
        self.embeddings: torch.Tensor | None = None
        self.images: torch.Tensor | None = None
        size = options.pop(SCHEDULER_BLOCK_SIZE, None)
        engine = EngineArgs(model=model, kv_transfer_config=config, **options).create_engine_config()
        engine.cache_config.block_size = size or engine.cache_config.block_size
        if options.get("enable_prompt_embeds"):  # not the model's own
            shape = 2, engine.model_config.get_vocab_size(), engine.model_config.get_hidden_size()
            self.embeddings = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        if engine.model_config.is_multimodal_model:
            self.images = torch.randint(256, (2, 32, 32, 3), generator=torch.Generator().manual_seed(1)).byte()
        self.llm = LLMEngine.from_vllm_config(engine)
        self.scheduler = self.llm.engine_core.engine_core.scheduler
        self.watch: KvWatch | None = None
        if self.llm.vllm_config.parallel_config.world_size == 1:  # else the caches are in other processes
            layers = watched_layers(self.llm.vllm_config, self.scheduler.kv_cache_config)
            specs = [group.kv_cache_spec for group in self.scheduler.kv_cache_config.kv_cache_groups]
            # The configured size may differ: some attention backends demand another. Blocks of states have their own.
            block_size = next(spec.block_size for spec in specs if not isinstance(spec, MambaSpec))
            self.watch = KvWatch(self.scheduler, layers, block_size)
        self._internal: dict[str, str] = {}
        self._ambiguous: set[str] = set()
        self._idle_waiters: list[int] = []

    # Commands

    def add(self, requests: list[tuple[str, list[int], dict[str, Any] | None, int, dict[str, Any]]]) -> list[str]:
        """Add requests (id, token ids, kv_transfer_params, max_tokens, more sampling parameters); returns the engine's
        own ids. With ``enable_prompt_embeds`` each token is a row of random numbers. A multimodal model has an image
        before the tokens.
        """
        for request_id, token_ids, params, max_tokens, more in requests:
            chosen: dict[str, Any] = {"temperature": 0, "ignore_eos": True, **more}
            sampling = SamplingParams(
                max_tokens=max_tokens,
                detokenize=False,
                extra_args={"kv_transfer_params": params} if params else None,
                **chosen,
            )
            if self._internal.get(request_id) in self.scheduler.requests:
                self._ambiguous.add(request_id)  # the engine keeps them apart, its outputs do not
            prompt: Any = {"prompt_token_ids": token_ids}
            if self.embeddings is not None:
                prompt = {"prompt_embeds": self.embeddings[self.variant, token_ids]}
            if self.images is not None:
                prompt["multi_modal_data"] = {"image": self.images[self.variant].numpy()}
            adapter = self.adapters[self.variant]
            self._internal[request_id] = self.llm.add_request(request_id, prompt, sampling, lora_request=adapter)
        return [self._internal[request[0]] for request in requests]

    def run_freely(self, on: bool) -> None:
        """On: the engine steps whenever it has work. Off: only `step` moves it."""
        self.free_running = on

    def step(self, count: int) -> int:
        """Make `count` engine steps, or fewer if the scheduler runs out of work. Returns their number."""
        for done in range(count):
            if not self.scheduler.has_requests():
                return done
            self._step()
        return count

    def abort(self, request_id: str) -> None:
        self.llm.abort_request([request_id])

    def digest(self, request_id: str) -> Any:
        """The KvDigest of a request, by the id at `add`. None: no digest was taken."""
        return None if self.watch is None else self.watch.digests.get(self._internal[request_id])

    def call(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Run a module-level function here. Its first argument is this object."""
        return function(self, *args)

    def internal_id(self, request_id: str) -> str:
        """The engine's own id of a request, by the id at `add`."""
        return self._internal[request_id]

    # Loop

    def serve(self) -> None:
        pause = SHORTEST_PAUSE_S
        while True:
            busy = self.free_running and self.scheduler.has_requests()
            if not busy:  # the same answer decides: an engine may stop having requests by the clock alone
                self._answer_idle_waiters()
            while self.pipe.poll(0 if busy else None):
                seq, method, args = self.pipe.recv()
                if method == "stop":
                    return
                self._obey(seq, method, args)
                pause = SHORTEST_PAUSE_S
                busy = self.free_running and self.scheduler.has_requests()
                if not busy:
                    self._answer_idle_waiters()
            self._step()
            # While requests only wait for a peer, pauses grow. A command ends a pause.
            pause = SHORTEST_PAUSE_S if self.scheduler.running else min(1.5 * pause, LONGEST_PAUSE_S)
            if not self.scheduler.running:
                self.pipe.poll(pause)

    def _obey(self, seq: int, method: str, args: tuple[Any, ...]) -> None:
        if method == "wait_idle":
            self._idle_waiters.append(seq)
            return
        try:
            value = getattr(self, method)(*args)
        except Exception:  # the test gets a command's failure, but a failed step ends the engine
            if method == "step":
                raise
            self.pipe.send(("error", seq, traceback.format_exc()))
        else:
            self.pipe.send(("reply", seq, value))

    def _answer_idle_waiters(self) -> None:
        if self.scheduler.has_requests():
            return
        for seq in self._idle_waiters:
            self.pipe.send(("reply", seq, None))
        self._idle_waiters.clear()

    def _step(self) -> None:
        finished = [output for output in self.llm.step() if output.finished]
        if self.watch is not None:
            known = self._internal.keys() - self._ambiguous  # the soak may have forgotten a doubled one
            clear = [output.request_id for output in finished if output.request_id in known]
            self.watch.after_step([self._internal[request_id] for request_id in clear])
        for output in finished:
            tokens, reason = tuple(output.outputs[0].token_ids), output.outputs[0].finish_reason
            result = Finished(output.request_id, tokens, output.kv_transfer_params, reason)
            self.pipe.send(("output", output.request_id, result))


def main(
    spec: EngineSpec, engine_id: str, port: int, model: str, log_path: str, trace_dir: str, pipe: Connection
) -> None:
    prepare_process(log_path, port)
    if "LIBFABRIC" in (spec.transfer or ""):
        libfabric.load()
    if "LMCache" in (spec.transfer or ""):
        lmcache.load()
    try:
        host = HostedEngine(spec, engine_id, model, trace_dir, pipe)
        pipe.send(("ready", host.scheduler.kv_cache_manager.block_pool.get_num_free_blocks(), None))
        host.serve()
        host.llm.engine_core.shutdown()
        os._exit(0)  # taking the interpreter down would cost seconds
    except EOFError:
        sys.exit("the test process is gone")
    except BaseException:
        pipe.send(("crash", traceback.format_exc(), None))
        raise
