"""Faults of wires, as the soak arms them inside an engine host (`Engine.call`); the first argument is the HostedEngine.

Arming sets faults of the next WRITEs, notifications or handshakes. ``count`` returns how often they struck.
"""

from __future__ import annotations

import dataclasses
import random
import sys
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from layerpush.telemetry.metrics.catalog import LOADS, VERIFIED_PARTS, VERIFY_MISMATCHES
from tests.e2e import probes, wirefaults

if TYPE_CHECKING:
    from tests.e2e.hostmain import HostedEngine


RETURNED = "returned_turns"
"""The number of turns that P has loaded from D."""


@dataclasses.dataclass
class Armed:
    """A scripted fault. ``struck`` returns the number of its effects."""

    kind: str
    struck: Callable[[], int]
    disarm: Callable[[], None]


class Handshakes:
    """Wraps a worker's handshakes: the next ``left`` ones fail."""

    def __init__(self, worker: Any) -> None:
        self._real = worker._nixl_handshake
        self.left = 0
        worker._nixl_handshake = self.shake

    def shake(self, *args: Any, **kwargs: Any) -> Any:
        if self.left > 0:
            self.left -= 1
            raise ConnectionError("scripted: the peer cannot be reached")
        return self._real(*args, **kwargs)


# This process hosts one engine.
_armed: list[Armed] = []
_effects: Counter[str] = Counter()
_handshakes: list[Handshakes] = []


def install(host: HostedEngine) -> None:
    """Call this once per process, before its first request."""
    preempt = host.scheduler._preempt_request

    def count_preemption(*args: Any, **kwargs: Any) -> Any:
        _effects["preempt"] += 1
        return preempt(*args, **kwargs)

    host.scheduler._preempt_request = count_preemption
    if (worker := probes.nixl_worker()) is not None:  # workers of tensor parallel ranks are in other processes
        wirefaults.watch(host)
        _handshakes.append(Handshakes(worker))


def end_writer(_: HostedEngine) -> None:
    """The worker's writer thread ends by an error that nothing catches."""
    worker = probes.nixl_worker()
    assert worker is not None
    worker.task(sys.exit, "a scripted error")


def arm_posts(host: HostedEngine, kind: str, fault: wirefaults.PostFault, first: int, count: int) -> None:
    """The fault strikes ``count`` WRITEs, after the next ``first`` ones."""
    faults = wirefaults._faults(host)
    wirefaults.on_posts(host, fault, first, count)
    rule = faults.post_rules[-1]

    def disarm() -> None:
        faults.post_rules = [other for other in faults.post_rules if other is not rule]

    _armed.append(Armed(kind, lambda: count - rule.left, disarm))


def arm_messages(host: HostedEngine, kind: str, fault: wirefaults.MessageFault, message: str, count: int) -> None:
    """The fault strikes this engine's next ``count`` messages of a kind."""
    faults = wirefaults._faults(host)
    wirefaults.on_messages(host, fault, message, "", count)
    rule = faults.rules[-1]

    def disarm() -> None:
        faults.rules = [other for other in faults.rules if other is not rule]

    _armed.append(Armed(kind, lambda: count - rule.left, disarm))


def arm_handshakes(host: HostedEngine, kind: str, count: int) -> None:
    """This engine's next ``count`` handshakes fail."""
    [handshakes] = _handshakes
    handshakes.left = count

    def disarm() -> None:
        handshakes.left = 0

    _armed.append(Armed(kind, lambda: count - handshakes.left, disarm))


def count(host: HostedEngine) -> dict[str, int]:
    """How often each kind has struck so far, and metrics of loads."""
    counts = Counter(_effects)
    for armed in _armed:
        counts[armed.kind] += armed.struck()
    for line in probes.metrics(host).splitlines():
        metric = line.removeprefix("vllm:layerpush_").partition("_total{")[0]
        if metric in (VERIFIED_PARTS.key, VERIFY_MISMATCHES.key):
            counts[metric] += round(float(line.split()[-1]))
        elif metric == LOADS.key and host.spec.role == "P" and 'outcome="loaded"' in line:
            counts[RETURNED] += round(float(line.split()[-1]))
    return dict(counts)


def settle(host: HostedEngine) -> None:
    """End all scripts: held WRITEs go out, and no further fault strikes."""
    for armed in _armed:
        _effects[armed.kind] += armed.struck()
        armed.disarm()
    if _armed:
        wirefaults.lift(host)
    _armed.clear()


def throw_garbage(host: HostedEngine, count: int, seed: float) -> None:
    """Send invalid notifications to every known peer of this engine."""
    send = wirefaults._faults(host)._real["send_notif"]  # the wrapper accepts known kinds only
    rng = random.Random(seed)
    agents = [agent for ranks in list(wirefaults._worker()._remote_agents.values()) for agent in list(ranks.values())]
    for agent in agents:
        for _ in range(count):
            try:
                send(agent, garbage(rng))
            except Exception:  # noqa: BLE001, S112  a dead peer gets none; NIXL builds differ in their errors
                continue
            _effects["garbage-notes"] += 1


def garbage(rng: random.Random) -> bytes:
    """Bytes that are no message about a known request: cut, mistyped, huge, out of range, or merely unknown."""
    noise = rng.randbytes(rng.choice((0, 1, 7, 100, 5000)))
    nobody = f"nobody-{rng.getrandbits(64):x}".encode()
    return rng.choice(
        (
            noise,
            b"LAYERPUSH:" + noise,
            b"LAYERPUSH:\x82\xa4kind\xa6Cancel\xaarequest_id" + bytes([0xA0 | len(nobody)]) + nobody,
            b"PUSH_REG:" + noise,
            b"PUSH_REG:\x81\xaarequest_id\xa3abc",
            b"PUSH_REG:\xdd\xff\xff\xff\xff",
            nobody + b":1",
            nobody + b":" + b"9" * 30,
            nobody + b":-1",
            b":",
            b"HB:" + nobody,
            b"HB:" + b"," * 1000,
            b"\xff\xfe:1",
        )
    )
