"""Every change that layerpush makes to code of vLLM at run time, in one table.

``install`` applies the patches of a process: those of the front end when vLLM loads the plugin, the others when vLLM
makes the connector. A module that vLLM imports later is patched right after its import. This file imports neither vLLM
nor a wrapper, so it is cheap in processes that need no patch.
"""

from __future__ import annotations

import enum
import logging
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pkgutil import resolve_name
from types import ModuleType
from typing import Any, NamedTuple

from layerpush.compat.import_hook import ImportHook
from layerpush.core.config import ConfigError

VARIABLE = "LAYERPUSH_WITHOUT_PATCHES"
MARK = "patched_by_layerpush"
"""An attribute of each function that is in the place of vLLM's: the names of its patches."""

logger = logging.getLogger(f"vllm.{__name__}")


class Process(enum.StrEnum):
    FRONT_END = "front end"
    ENGINE_CORE = "engine core"
    WORKER = "worker"


class Target(NamedTuple):
    """``path`` and ``wrapper`` are ``module:name`` or ``module:Class.name``.

    ``wrapper`` gets vLLM's function and returns the one for its place. If ``is_new``, vLLM has no such function and
    the wrapper gets None.
    """

    process: Process
    path: str
    wrapper: str
    is_new: bool = False

    @property
    def module(self) -> str:
        return self.path.partition(":")[0]

    def owner_in(self, module: ModuleType) -> tuple[Any, str]:
        """The object of ``module`` that has the function, None if there is none, and the name of the function there."""
        *owners, name = self.path.partition(":")[2].split(".")
        owner: Any = module
        for each in owners:
            owner = getattr(owner, each, None)
        return owner, name


@dataclass(frozen=True, slots=True)
class Patch:
    """``reason`` is why layerpush needs it, ``lost`` the behaviour without it, ``setting`` the key that turns it on."""

    name: str
    targets: tuple[Target, ...]
    reason: str
    lost: str
    setting: str = ""


_COMPAT = "layerpush.compat"
_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_OPENAI = "vllm.entrypoints.openai"
_FRONT_END, _ENGINE_CORE, _WORKER = Process

PATCHES = (
    Patch(
        "request-checks",
        (
            Target(
                _FRONT_END,
                "vllm.v1.engine.input_processor:InputProcessor.process_inputs",
                f"{_COMPAT}.admission:checking",
            ),
        ),
        "A client with bad `kv_transfer_params` gets the reason in an answer with status 400.",
        "Requests with bad `kv_transfer_params` run without a KV transfer; the engine core logs the reason.",
    ),
    Patch(
        "refusals",
        (
            Target(
                _FRONT_END,
                "vllm.entrypoints.generate.base.serving:GenerateBaseServing._with_kv_transfer_rejection_cleanup",
                f"{_COMPAT}.refusals:reporting_bodies",
            ),
            Target(
                _FRONT_END,
                "vllm.entrypoints.scale_out.token_in_token_out.serving:ServingTokens.serve_tokens",
                f"{_COMPAT}.refusals:reporting_tokens",
            ),
            Target(
                _FRONT_END,
                "vllm.entrypoints.serve.exception_handling.register:validation_exception_handler",
                f"{_COMPAT}.refusals:reporting_invalid_bodies",
            ),
            Target(
                _FRONT_END, "vllm.v1.engine.async_llm:AsyncLLM.add_request", f"{_COMPAT}.refusals:reporting_requests"
            ),
        ),
        "An engine learns at once that the other one's front end has refused the request.",
        "If P refuses a request, D's load fails only after `unknown_request_timeout_s`. If D refuses a stream, or "
        "several prompts or answers, P keeps its blocks for `kv_lease_duration`.",
    ),
    Patch(
        "rank-notices",
        (
            Target(
                _FRONT_END,
                "vllm.v1.engine.core_client:DPLBAsyncMPClient.add_request_async",
                f"{_COMPAT}.other_ranks:notifying",
            ),
            Target(
                _ENGINE_CORE,
                "vllm.v1.engine.core:EngineCore.layerpush_rank_is_other",
                f"{_COMPAT}.other_ranks:notice_receiver",
                is_new=True,
            ),
        ),
        "A data-parallel rank learns of the requests of other ranks, and refuses registrations for them at once.",
        "A registration with the wrong data-parallel rank fails only after `unknown_request_timeout_s`.",
    ),
    Patch(
        "early-answers",
        (
            Target(
                _FRONT_END,
                f"{_OPENAI}.completion.protocol:CompletionRequest.to_sampling_params",
                f"{_COMPAT}.early_answer:marking",
            ),
            Target(
                _FRONT_END,
                f"{_OPENAI}.chat_completion.protocol:ChatCompletionRequest.to_sampling_params",
                f"{_COMPAT}.early_answer:marking",
            ),
            Target(_FRONT_END, "vllm.v1.engine.async_llm:AsyncLLM.generate", f"{_COMPAT}.early_answer:answering_early"),
        ),
        "P answers a router that asks P first before it has computed the prompt.",
        "`answer_early` has no effect: P answers after it has computed the prompt.",
        "answer_early",
    ),
    Patch(
        "withdrawals",
        (Target(_ENGINE_CORE, f"{_SCHEDULER}.update_from_output", f"{_COMPAT}.early_answer:aborting_withdrawn"),),
        "P aborts a request that it has answered early and that D does not want any more.",
        "P computes such a request to its end, and keeps its blocks until their lease ends.",
        "answer_early",
    ),
    Patch(
        "failed-loads",
        (
            Target(_ENGINE_CORE, f"{_SCHEDULER}.schedule", f"{_COMPAT}.failed_loads:requeueing"),
            Target(_ENGINE_CORE, f"{_SCHEDULER}._handle_failed_recving", f"{_COMPAT}.failed_loads:postponing"),
        ),
        "On a full D, a request whose load has failed or gives way does not block the requests behind it.",
        'With `kv_load_failure_policy: "recompute"` D refuses to start, because it could stop for ever. Two full '
        "engines that wait for each other go on only when `push_registration_timeout` ends a load.",
    ),
    Patch(
        "places",
        (Target(_ENGINE_CORE, f"{_SCHEDULER}._handle_blocked_waiting_request", f"{_COMPAT}.failed_loads:passing_by"),),
        "On a full D, a step looks at the first prompt that waits for blocks, and passes by the others at no cost.",
        "A step of a full D looks for each waiting prompt in the prefix cache.",
        "awaited_share",
    ),
    Patch(
        "cache-resets",
        (Target(_ENGINE_CORE, f"{_SCHEDULER}.reset_prefix_cache", f"{_COMPAT}.cache_resets:lending"),),
        "vLLM resets D's prefix cache although D keeps turns, and they end. A pause for new weights resets it.",
        "While D keeps a turn, it cannot reset its prefix cache: `pause_generation` raises `RuntimeError`.",
        "bidirectional_kv_xfer",
    ),
    Patch(
        "first-tokens",
        (
            Target(_ENGINE_CORE, f"{_SCHEDULER}.update_from_output", f"{_COMPAT}.first_tokens:starting"),
            Target(_ENGINE_CORE, f"{_SCHEDULER}.schedule", f"{_COMPAT}.first_tokens:amending"),
        ),
        "D starts a request with P's first token.",
        'D computes every first token itself, as with `first_token: "decode"`.',
        "first_token",
    ),
    Patch(
        "early-revocation",
        (
            Target(
                _WORKER,
                "vllm.v1.worker.gpu.model_runner:GPUModelRunner.finish_requests",
                f"{_COMPAT}.early_revocation:revoking",
            ),
        ),
        "P learns of preempted blocks before vLLM's V2 model runner overwrites them.",
        "P pushes whole requests where vLLM uses its V2 model runner: a push by layer could carry wrong KV.",
    ),
    Patch(
        "handshakes",
        (
            Target(
                _WORKER,
                "vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker:zmq_ctx",
                f"{_COMPAT}.handshake_executor:answering",
            ),
        ),
        "Handshakes with several hosts run at the same time, and read answers of a limited size only.",
        "Handshakes run one after the other: a silent host delays those with other hosts by 5 s for each of its ranks. "
        "P and D need equal block sizes.",
    ),
)
"""If several patches have one target, vLLM's function is wrapped once, in this order: the first is the innermost. So a
step's outputs get the aborts before the first tokens. Failed loads are requeued before ``schedule``, and first tokens
are shown to the model runner after it.
"""


def left_out() -> frozenset[str]:
    """The names in ``LAYERPUSH_WITHOUT_PATCHES``. Raises ``ConfigError`` for an unknown one."""
    wanted = {name.strip() for name in os.environ.get(VARIABLE, "").split(",")} - {""}
    known = [patch.name for patch in PATCHES]
    if unknown := sorted(wanted - set(known)):
        raise ConfigError(f"environment variable {VARIABLE}: no patch {', '.join(unknown)}; known: {', '.join(known)}")
    return frozenset(wanted)


def is_on(name: str) -> bool:
    """Whether the patch ``name`` is not left out."""
    assert name in {patch.name for patch in PATCHES}
    return name not in left_out()


def check_failure_policy(policy: str) -> None:
    """Raises ``ConfigError`` if a decode engine needs a patch for this `kv_load_failure_policy` that is left out."""
    if policy != "fail" and not is_on("failed-loads"):
        raise ConfigError(
            f"environment variable {VARIABLE} leaves out failed-loads, but a decode engine needs it with "
            'kv_load_failure_policy "recompute": a request whose load fails could block all others for ever. '
            'Set kv_load_failure_policy to "fail", or leave failed-loads in'
        )


def install(process: Process) -> None:
    """Apply the patches of ``process`` in this one. Later calls do nothing.

    Logs each patch that is left out or whose target vLLM lacks, and what is lost, when its module is imported. Raises
    ``ConfigError`` for an unknown name in ``LAYERPUSH_WITHOUT_PATCHES``.
    """
    installed = [hook for hook in sys.meta_path if isinstance(hook, PatchHook) and hook.process is process]
    (installed or [PatchHook(process)])[0].install()


class PatchHook(ImportHook):
    """Applies the patches of ``process`` to the modules that have their targets."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self._left_out = left_out()
        self._logged: set[str] = set()
        self.names = frozenset(target.module for patch in PATCHES for target in patch.targets if self._is_mine(target))

    def _is_mine(self, target: Target) -> bool:
        return target.process is self.process

    def patch(self, module: ModuleType) -> None:
        wanted: dict[str, list[tuple[Patch, Target]]] = {}
        for patch in PATCHES:
            for target in patch.targets:
                if not self._is_mine(target) or target.module != module.__name__:
                    continue
                if patch.name in self._left_out:
                    self._log_once(patch, f"{VARIABLE} leaves out {patch.name}")
                else:
                    wanted.setdefault(target.path, []).append((patch, target))
        for path, patches in wanted.items():
            self._wrap(module, path, patches)

    def _wrap(self, module: ModuleType, path: str, patches: list[tuple[Patch, Target]]) -> None:
        owner, name = patches[0][1].owner_in(module)
        wrapped = getattr(owner, name, None)
        if hasattr(wrapped, MARK):
            return
        for patch, target in patches:
            if owner is None or (wrapped is None and not target.is_new):
                self._log_once(patch, f"{path} does not exist in this vLLM")
                return
            wrapped = resolve_name(target.wrapper)(wrapped)
        setattr(wrapped, MARK, tuple(patch.name for patch, _ in patches))
        setattr(owner, name, wrapped)

    def _log_once(self, patch: Patch, problem: str) -> None:
        if patch.name not in self._logged:
            self._logged.add(patch.name)
            logger.warning("layerpush: %s. %s", problem, patch.lost)


def our_connectors(connector: Any, metadata: Any = None) -> Iterator[tuple[Any, Any]]:
    """layerpush's connectors, alone or in a ``MultiConnector``, each with its own part of a step's ``metadata``."""
    if getattr(connector, "is_layerpush", None) is True:
        yield connector, metadata
    inner = getattr(connector, "_connectors", ())
    if not isinstance(inner, list | tuple):  # of a connector that is not vLLM's
        return
    for each, its in zip_longest(inner, getattr(metadata, "metadata", ())):
        yield from our_connectors(each, its)
