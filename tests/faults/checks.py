"""The checks at the end of every row, and waits with a deadline instead of a sleep."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

from tests.e2e import probes, stagingfaults, wirefaults
from tests.e2e.conftest import check_nothing_left
from tests.e2e.enginehost import MAX_TOKENS, EngineHost
from tests.e2e.enginespec import EngineSpec
from tests.e2e.fixtures import COMPLAINTS
from tests.e2e.fleet import Fleet
from tests.e2e.handoff import Handoff, Order, Reference, check, new_id, prompt, send
from tests.e2e.pushtrace import Push
from tests.e2e.results import Finished
from tests.faults import engines
from tests.support.waiting import until

THREADS = {
    "MainThread",
    "layerpush-probe",
    "layerpush-trace",
    "layerpush-trace-scheduler",
    "nixl-push-writer",
    "nixl_handshake_listener",
    "tqdm_monitor",
    "vllm-nixl-handshake-initiator_",
}
FEW = 1
"""WRITEs, messages or copies before a fault in the middle of a push. A push has few, because layers share WRITEs."""
WARM_UP_S = 30.0
PAUSE_S = 0.02
"""Between two looks at an engine: a look takes the time of its main thread."""
LONG_PAUSE_S = 0.1
"""Between two looks of a wait for seconds."""
ENDED = "(dead|died|gone|ended|lost|restarted|shut|nothing came)"
"""Why a load failed after P's end. On a busy machine, `peer_timeout_s` can pass before a probe finds the end."""
SERIOUS = re.compile(r"\b(WARNING|ERROR|CRITICAL)\b")
VLLM_ECHO = "Skipping KV post-processing for failed request"


def early(p: EngineHost, d: EngineHost, length: int, seed: int, *, max_tokens: int = MAX_TOKENS) -> Handoff:
    """A handoff whose registration has reached P. P does not have the prompt yet."""
    d.call(wirefaults.watch)
    handoff = Handoff(new_id(), prompt(length, seed=seed), p, d, max_tokens)
    (decode_id,) = d.add(handoff.to_d())
    handoff.await_registration()
    p.poll_until(probes.has_registration, decode_id)
    return handoff


def warm_up(p: EngineHost, d: EngineHost) -> None:
    """Push prompts until P knows its speed and that of its link to D. From then on several layers share a WRITE.

    Then P has no scripts, and counts from 0.
    """

    def shares_writes() -> bool:
        handoff = send(p, d, prompt(700, seed=1 << 20), "early", max_tokens=1)
        handoff.outcome()
        push = handoff.push()
        return push.mode == "auto" and 2 * len(push.writes) <= len(push.layer_chunks)

    until(shares_writes, f"layers of {p.engine_id} share WRITEs", WARM_UP_S)
    p.call(wirefaults.reset)


def spoil_writes(p: EngineHost, order: Order, fault: wirefaults.PostFault, count: int = wirefaults.ALL) -> None:
    """Spoil WRITEs in the middle of a push, from one of several layers on. In a whole push: from its first WRITE on."""
    if order == "late":
        p.call(wirefaults.on_posts, fault, 0, count)
    else:
        p.call(wirefaults.on_merged_posts, fault, FEW, count)


def step_merged(p: EngineHost, chunks: int) -> None:
    """Compute chunks of the only prompt while the writer posts its first WRITE. The other layers share one WRITE."""
    p.call(wirefaults.gate, "post")
    assert p.step(chunks) == chunks
    p.poll_until(wirefaults.is_at_gate)
    p.call(wirefaults.open_gates, "post")


def run_merged(p: EngineHost, handoff: Handoff) -> None:
    """Give P the prompt. A WRITE of several layers follows the first one, on a busy machine as well."""
    p.hold()
    p.add(handoff.to_p())
    step_merged(p, 2)
    p.run()


def start(p: EngineHost, d: EngineHost, length: int, seed: int, order: Order) -> Handoff:
    """As `send`, but with `run_merged` if the registration is early."""
    if order != "early":
        return send(p, d, prompt(length, seed=seed), order)
    handoff = early(p, d, length, seed)
    run_merged(p, handoff)
    return handoff


def hold_midway(p: EngineHost, d: EngineHost, length: int, seed: int) -> Handoff:
    """A push under way: its WRITEs from one of several layers on stay on the wire."""
    warm_up(p, d)
    spoil_writes(p, "early", "hold")
    handoff = early(p, d, length, seed)
    run_merged(p, handoff)
    p.poll_until(wirefaults.held_posts)
    check_under_way(p)
    return handoff


def pause_midway(
    p: EngineHost, d: EngineHost, length: int, seed: int, chunks: int = 3, seen: str = "post:merged"
) -> Handoff:
    """A push under way: P has computed some chunks and is on hold. ``seen``: an event of a WRITE of several layers."""
    warm_up(p, d)
    p.hold()
    handoff = early(p, d, length, seed)
    p.add(handoff.to_p())
    step_merged(p, chunks)
    p.poll_until(wirefaults.seen, seen)
    return handoff


def check_merged(handoff: Handoff) -> None:
    """Check that several layers of an ended push shared a WRITE."""
    assert handoff.push().has_merged_write


def described(value: object) -> str:
    """A parameter's part of a test's name."""
    return value.name if isinstance(value, EngineSpec) else str(value)


def check_load_failed(handoff: Handoff, reference: Reference, timeout: float) -> Finished:
    """Check that D got no KV. By its policy, D computed the prompt itself or failed the request. No token is wrong."""
    output = handoff.d.wait_output(handoff.request_id, timeout)
    if "D-fail" in handoff.d.spec.name:
        assert (output.finish_reason, output.token_ids) == ("error", ())
    else:
        assert output.token_ids == reference.tokens(handoff.token_ids, handoff.max_tokens)
    return output


def check_serves(p: EngineHost, d: EngineHost, reference: Reference, seed: int) -> None:
    """Check that both go on: a push is right byte for byte, goes by layer, and has P's forced plan."""
    handoff = send(p, d, prompt(350, seed=seed), "early")
    check(handoff.outcome(), reference)
    push = check_planned(handoff)
    assert push.outcome == "completed"
    assert push.mode == "auto"


def check_planned(handoff: Handoff) -> Push:
    """Check that every WRITE of an ended push had P's forced plan. Returns the push."""
    push, plan = handoff.push(), engines.forced_plan(handoff.p.spec)
    if plan is not None:
        assert {write["plan"] for write in push.writes} == {plan}
    return push


def check_under_way(p: EngineHost) -> None:
    """Check that P has unended WRITEs, all with its forced plan."""
    plan = engines.forced_plan(p.spec)
    p.poll_until(stagingfaults.plans_under_way)
    if plan is not None:
        assert p.call(stagingfaults.plans_under_way) == [plan]


def check_idle_soon(host: EngineHost, seconds: float = engines.GRACE_S) -> None:
    """Check that all blocks are free long before a lease would free them."""
    all_free = f"{host.engine_id} has freed all blocks"
    until(lambda: host.call(probes.free_blocks) == host.idle_blocks, all_free, seconds, PAUSE_S)


def check_owned(host: EngineHost, blocks: list[int]) -> None:
    """Check that requests hold these blocks: no other request can get them."""
    assert blocks
    assert host.call(probes.owned_blocks, blocks) == len(blocks), "blocks that a WRITE may still reach are free"


def all_along(true: Callable[[], bool], seconds: float, what: str) -> None:
    """Check for so long that `true` stays true."""
    started = time.monotonic()
    while time.monotonic() - started < seconds:
        assert true(), f"not all along: {what}"
        time.sleep(LONG_PAUSE_S)


class LogView:
    """Hosts' logs since the test began."""

    def __init__(self) -> None:
        self.tracebacks_expected = False
        """vLLM logs a traceback of a failed handshake."""

    def lines(self, host: EngineHost) -> list[str]:
        return host.log()[host.log_start :].splitlines()

    def serious(self, host: EngineHost, mentioning: str) -> list[str]:
        """Warnings and errors with this text, except the line by which vLLM repeats a failed load."""
        lines = [line for line in self.lines(host) if mentioning in line and SERIOUS.search(line)]
        return [line for line in lines if VLLM_ECHO not in line]

    def check_one(self, host: EngineHost, request_id: str, cause: str, level: str | None = None) -> None:
        """Check that one warning or error names the request and gives the cause (a regular expression)."""
        lines = self.serious(host, request_id)
        assert len(lines) == 1, f"{host.engine_id} should report the end of {request_id} once:\n" + "\n".join(lines)
        assert re.search(cause, lines[0]), f"{host.engine_id} does not name the cause ({cause}):\n{lines[0]}"
        assert level is None or level in lines[0]

    def check_none(self, host: EngineHost, request_id: str) -> None:
        assert self.serious(host, request_id) == []

    def check_no_errors(self, *hosts: EngineHost) -> None:
        """Check that no host has logged an error or a traceback."""
        for host in hosts:
            found = [line for line in self.lines(host) if any(words in line for words in COMPLAINTS)]
            assert found == [], f"{host.engine_id} complained:\n" + "\n".join(found)


def check_clean(host: EngineHost, log: LogView) -> None:
    """Check that a host is idle, without blocks, table entries, open handles, unknown threads or tracebacks."""
    host.wait_idle(timeout=20)
    check_nothing_left(host, (*probes.BOUNDED_MEMORIES, "._early"))
    until(lambda: host.call(wirefaults.open_handles) == 0, f"{host.engine_id} has no open handle", pause_s=PAUSE_S)
    assert host.call(stagingfaults.open_writes) == 0
    threads = host.call(probes.threads)
    assert set(threads) <= THREADS, f"{host.engine_id} has threads {threads}"
    assert all(threads.count(name) == 1 for name in THREADS.intersection(threads)), threads
    if log.tracebacks_expected:
        return
    tracebacks = [line for line in log.lines(host) if "Traceback (most recent call last)" in line]
    assert tracebacks == [], f"{host.engine_id} has tracebacks in its log:\n{host.log_tail()}"


def restart(fleet: Fleet, host: EngineHost, *, same_id: bool) -> EngineHost:
    """Kill a host and start another process in its place."""
    host.kill()
    return fleet.respawn(host, same_id=same_id)
