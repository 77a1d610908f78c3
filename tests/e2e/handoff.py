"""One prompt through a P and a D engine: the order of their starts, the outcome, and the checks of every test."""

import dataclasses
import math
import random
import uuid
from collections.abc import Sequence
from typing import Any, Literal

from layerpush.core.prefill_identity import TO_PREFILL, PrefillIdentity
from tests.e2e import probes
from tests.e2e.enginehost import MAX_TOKENS, EngineHost, Request
from tests.e2e.enginespec import PREFILL_TOKENS_PER_STEP
from tests.e2e.models import VOCABULARY
from tests.e2e.pushtrace import Push, wait_for_pushes
from tests.metrics_scrape import Scrape

Order = Literal["early", "mid", "after_last_step", "late", "together"]


def prompt(length: int, seed: int = 0) -> list[int]:
    """Random token ids; two prompts of different seed or length share no block."""
    return random.Random(f"{length}/{seed}").choices(VOCABULARY, k=length)


def new_id() -> str:
    return str(uuid.uuid4())


@dataclasses.dataclass(frozen=True)
class Handoff:
    """A request on its way through P and D."""

    request_id: str
    token_ids: list[int]
    p: EngineHost
    d: EngineHost
    max_tokens: int = MAX_TOKENS
    mode: str | None = None
    """The mode in P's request."""

    def to_p(self) -> Request:
        params: dict[str, Any] = dict(TO_PREFILL)
        if self.mode is not None:
            params["layerpush_mode"] = self.mode
        return Request(self.request_id, self.token_ids, params, max_tokens=1)

    def to_d(self, params: dict[str, Any] | None = None) -> Request:
        """D's request: with P's returned params (sequential dispatch), or with those that a proxy knows in advance."""
        if params is None:
            identity = PrefillIdentity(self.p.engine_id, "127.0.0.1", self.p.port, self.p.spec.ranks)
            params = identity.to_decode(self.request_id)
        return Request(self.request_id, self.token_ids, params, self.max_tokens)

    def await_registration(self) -> None:
        self.d.poll_until(probes.registration_sent, self.request_id)

    def outcome(self) -> "Outcome":
        """Wait for both engines and for the transfer's clean-up on both."""
        at_p = self.p.wait_output(self.request_id)
        at_d = self.d.wait_output(self.request_id)
        self.p.wait_idle()
        self.d.wait_idle()
        return Outcome(self, at_p.token_ids, at_d.token_ids)

    def differing_cells(self) -> list[tuple[int, int]]:
        """(layer, block) of the prompt's KV where D's bytes are not P's."""
        return self.p.digest(self.request_id).differing(self.d.digest(self.request_id))

    def push(self) -> Push:
        """P's record of this request's push; P has one rank."""
        (push,) = wait_for_pushes(self.p.trace_dir, self.request_id)
        return push


@dataclasses.dataclass(frozen=True)
class Outcome:
    handoff: Handoff
    p_tokens: tuple[int, ...]
    d_tokens: tuple[int, ...]


class Reference:
    """Greedy tokens of one plain engine, remembered."""

    def __init__(self, host: EngineHost) -> None:
        self.host = host
        self._known: dict[tuple[tuple[int, ...], int], tuple[int, ...]] = {}

    def tokens(self, token_ids: Sequence[int], max_tokens: int = MAX_TOKENS) -> tuple[int, ...]:
        key = (tuple(token_ids), max_tokens)
        if key not in self._known:
            request_id = new_id()
            self.host.add(Request(request_id, list(token_ids), None, max_tokens))
            self._known[key] = self.host.wait_output(request_id).token_ids
        return self._known[key]


def send(
    p: EngineHost,
    d: EngineHost,
    token_ids: list[int],
    order: Order,
    *,
    after_steps: int = 2,
    max_tokens: int = MAX_TOKENS,
    mode: str | None = None,
) -> Handoff:
    """Start one handoff.

    early: P has D's registration before it gets the prompt; a stock P may still have to read it.
    mid: P has computed `after_steps` chunks and goes on when it has the registration.
    after_last_step: P has just computed its last chunk; it goes on when the registration has left D.
    late: P has finished, D gets P's params (sequential dispatch).
    together: both at once, as a proxy does (concurrent dispatch).
    """
    handoff = Handoff(new_id(), token_ids, p, d, max_tokens, mode)
    match order:
        case "early":
            (decode_id,) = d.add(handoff.to_d())
            handoff.await_registration()
            p.poll_until(probes.has_registration, decode_id)
            p.add(handoff.to_p())
        case "mid":
            assert len(token_ids) > after_steps * PREFILL_TOKENS_PER_STEP, "the prompt would be finished by then"
            p.hold()
            p.add(handoff.to_p())
            p.step(after_steps)
            assert p.call(probes.computed_tokens, handoff.request_id) == after_steps * PREFILL_TOKENS_PER_STEP
            (decode_id,) = d.add(handoff.to_d())
            p.poll_until(probes.is_mentioned, decode_id)
            p.run()
        case "after_last_step":
            p.hold()
            p.add(handoff.to_p())
            p.step(math.ceil(len(token_ids) / PREFILL_TOKENS_PER_STEP))
            p.peek_output(handoff.request_id)
            d.add(handoff.to_d())
            handoff.await_registration()
            p.run()
        case "late":
            p.add(handoff.to_p())
            finished = p.peek_output(handoff.request_id)
            assert finished.kv_transfer_params is not None
            p.hold()
            p.step()  # this step reports the end of the request to P's worker, if no earlier step has
            p.poll_until(probes.has_taken_steps)
            p.run()
            d.add(handoff.to_d(finished.kv_transfer_params))
        case "together":
            d.add(handoff.to_d())
            p.add(handoff.to_p())
    return handoff


def started_on_p(d: EngineHost) -> float:
    """How many answers of this engine have started with P's token."""
    return Scrape(d.call(probes.metrics)).value("first_tokens_total", origin="prefill")


def introduce(p: EngineHost, d: EngineHost) -> None:
    """Push once if none of the two knows the other: the first push waits for their handshake. Later ones stream."""
    if d not in p.met:
        send(p, d, prompt(33, seed=1 << 20), "late").outcome()
        p.met.add(d)


def check(outcome: Outcome, reference: Reference) -> None:
    """The tokens are the plain engine's, and every byte of the prompt's KV on D is P's."""
    differing = outcome.handoff.differing_cells()
    assert differing == [], f"KV differs at (layer, block) {differing[:20]}"
    check_tokens(outcome, reference)


def check_tokens(outcome: Outcome, reference: Reference) -> None:
    """Check only the tokens, for engines whose KV the test cannot read."""
    expected = reference.tokens(outcome.handoff.token_ids, outcome.handoff.max_tokens)
    assert outcome.d_tokens == expected
    assert outcome.p_tokens == expected[:1]
