"""Runs inside an engine host: scripted faults on the NIXL agent of its worker.

WRITEs can be held, fail to post or end in an error; notifications can be dropped, doubled, held back or changed; the
writer thread can be stopped at a named moment. Each fault counts from the call that sets it. WRITEs without blocks, by
which an engine times the link, do not count. The module-level functions are for `EngineHost.call`; the rest runs on
the threads that call NIXL.

Moments are post, landed, send:KIND and got:KIND. A WRITE of a push by layer that carries several layers has two more,
post:merged and landed:merged.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from tests.e2e import probes

if TYPE_CHECKING:
    from layerpush.core.write import Write
    from tests.e2e.hostmain import HostedEngine

REGISTRATION = b"PUSH_REG:"
HEARTBEAT = b"HB:"
PEER_MESSAGE = b"LAYERPUSH:"
WRAPPED = (
    "make_prepped_xfer",
    "transfer",
    "check_xfer_state",
    "release_xfer_handle",
    "send_notif",
    "get_new_notifs",
)
ALL = 1 << 30
REMEMBERED = 4096

PostFault = Literal["hold", "fail", "err"]
MessageFault = Literal["drop", "duplicate", "hold", "raise"]
Direction = Literal["out", "in"]
Change = Literal["one block less at the start", "one block less at the end", "one block more", "a port that is closed"]


def kind_of(payload: bytes) -> str:
    """The kind of a message: registration, heartbeat, completion, garbage, or layerpush's own kind. A completion may
    have checksums.
    """
    if payload.startswith(REGISTRATION):
        return "registration"
    if payload.startswith(HEARTBEAT):
        return "heartbeat"
    if not payload.startswith(PEER_MESSAGE):
        return "completion"
    try:
        kind = str(msgspec.msgpack.decode(payload[len(PEER_MESSAGE) :])["kind"])
        return "completion" if kind == "completed" else kind
    except (msgspec.MsgspecError, KeyError, TypeError, UnicodeDecodeError, RecursionError):
        return "garbage"


@dataclasses.dataclass(eq=False)
class PostRule:
    """A fault of the next `left` WRITEs from number `first` on, or from the first `merged` one after that on."""

    fault: PostFault
    first: int
    left: int
    merged: bool = False

    def takes(self, number: int, merged: bool) -> bool:
        if self.left == 0 or number < self.first or (self.merged and not merged):
            return False
        self.merged = False
        self.left -= 1
        return True


@dataclasses.dataclass
class MessageRule:
    """A fault of the next `left` notifications of a kind that mention a text."""

    fault: MessageFault
    kind: str
    mentioning: bytes
    left: int
    direction: Direction

    def takes(self, payload: bytes, direction: Direction) -> bool:
        if direction != self.direction or self.left == 0:
            return False
        if self.kind not in ("any", kind_of(payload)) or self.mentioning not in payload:
            return False
        self.left -= 1
        return True


class WireFaults:
    """Lies between a worker's threads and its locked NIXL agent. `writes`: the worker's, if it pushes by layer."""

    def __init__(self, agent: Any, writes: Any) -> None:
        self._lock = threading.Lock()
        self._real: dict[str, Callable[..., Any]] = {name: getattr(agent, name) for name in WRAPPED}
        self._error = _backend_error(agent)
        self.open: set[Any] = set()
        self._merged: set[Any] = set()
        self._layers: set[int] = set()
        self.counts: Counter[str] = Counter()
        self.sent: deque[tuple[str, bytes, str]] = deque(maxlen=REMEMBERED)
        self._held: set[Any] = set()
        self._orphans: set[Any] = set()
        self._kept_back: list[tuple[Direction, str, bytes]] = []
        self.clear()
        for name in WRAPPED:
            setattr(agent, name, getattr(self, name))
        if writes is not None:
            self._post_write, writes.post = writes.post, self.post_write

    def clear(self) -> None:
        """Forget every script, and release all held WRITEs and notifications."""
        self.post_rules: list[PostRule] = []
        self.rules: list[MessageRule] = []
        self.change: Change | None = None
        self.gates: dict[tuple[str, int], threading.Event] = getattr(self, "gates", {})
        self.reached: list[tuple[str, int]] = []
        self.errs: set[Any] = set()
        self.landed: set[Any] = set()
        self.carries_completion: set[Any] = set()
        self.never_started: set[Any] = set()
        for gate in self.gates.values():
            gate.set()
        self.gates = {}
        self.counts.clear()
        self.lift()

    def lift(self) -> None:
        """Release held WRITEs and notifications, both at the writer's next turn."""
        with self._lock:
            self._lifted = set(self._held)
            for sender in [entry for entry in self._kept_back if entry[0] == "out"]:
                self._kept_back.remove(sender)
                self._real["send_notif"](sender[1], sender[2])
            self._deliver = True

    # Called by the worker.

    def post_write(self, write: Write, link: Any) -> Iterator[Any]:
        """Notes the layers of this WRITE for its NIXL transfers. On a CPU, the call makes all of them."""
        self._layers = {layer for part in write.segments for layer in range(part.layers.start, part.layers.stop)}
        try:
            yield from self._post_write(write, link)
        finally:
            self._layers = set()

    def make_prepped_xfer(self, *args: Any, **kwargs: Any) -> Any:
        handle = self._real["make_prepped_xfer"](*args, **kwargs)
        self.open.add(handle)
        if len(self._layers) > 1:
            self._merged.add(handle)
        if kwargs.get("notif_msg"):
            self.carries_completion.add(handle)
        return handle

    def transfer(self, handle: Any, *args: Any, **kwargs: Any) -> Any:
        number = self._reach("post", handle)
        rules = [rule for rule in self.post_rules if rule.takes(number, handle in self._merged)]
        fault = rules[0].fault if rules else None
        if fault == "fail":
            raise self._error("scripted: this WRITE cannot be posted")
        if fault == "hold":
            with self._lock:
                self._held.add(handle)
            return "PROC"
        if fault == "err":
            self.errs.add(handle)
            if (
                handle in self.carries_completion
            ):  # NIXL sends no completion of a failed transfer, so this one does not start
                self.never_started.add(handle)
                return "PROC"
        return self._real["transfer"](handle, *args, **kwargs)

    def check_xfer_state(self, handle: Any) -> Any:
        if handle in self._held:
            return self._start_if_lifted(handle)
        if handle in self.never_started:
            return "ERR"
        state = self._real["check_xfer_state"](handle)
        if state == "DONE" and handle not in self.landed:
            self.landed.add(handle)
            self._reach("landed", handle)
        return "ERR" if state == "DONE" and handle in self.errs else state

    def release_xfer_handle(self, handle: Any) -> None:
        if handle in self._held:  # as in NIXL: a release is no cancel, the bytes still go
            with self._lock:
                self._orphans.add(handle)
            return
        self._real["release_xfer_handle"](handle)
        self.open.discard(handle)
        self._merged.discard(handle)

    def send_notif(self, agent: str, notif_msg: bytes, *args: Any, **kwargs: Any) -> None:
        kind = kind_of(notif_msg)
        self._reach(f"send:{kind}")
        if kind == "registration" and self.change is not None:
            notif_msg = _changed(notif_msg, self.change)
        self.sent.append((kind, notif_msg, agent))
        rule = next((rule for rule in self.rules if rule.takes(notif_msg, "out")), None)
        if rule is not None and rule.fault == "raise":
            raise self._error("scripted: this notification cannot be sent")
        if rule is not None and rule.fault == "hold":
            with self._lock:
                self._kept_back.append(("out", agent, notif_msg))
            return
        copies = {"drop": 0, "duplicate": 2}.get(rule.fault, 1) if rule is not None else 1
        for _ in range(copies):
            self._real["send_notif"](agent, notif_msg, *args, **kwargs)

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        self._drive_orphans()
        arrived: dict[str, list[bytes]] = {}
        for agent, payloads in self._real["get_new_notifs"]().items():
            for payload in payloads:
                arrived.setdefault(agent, []).extend(self._arrived(agent, payload))
        if self._deliver:
            with self._lock:
                self._deliver = False
                held, self._kept_back = self._kept_back, [e for e in self._kept_back if e[0] == "out"]
            for direction, agent, payload in held:
                if direction == "in":
                    arrived.setdefault(agent, []).append(payload)
        return arrived

    # Inside.

    def _arrived(self, agent: str, payload: bytes) -> list[bytes]:
        self.counts[f"got:{kind_of(payload)}"] += 1
        rule = next((rule for rule in self.rules if rule.takes(payload, "in")), None)
        if rule is None:
            return [payload]
        if rule.fault == "hold":
            with self._lock:
                self._kept_back.append(("in", agent, payload))
            return []
        return [payload] * {"drop": 0, "duplicate": 2}[rule.fault]

    def _start_if_lifted(self, handle: Any) -> Any:
        with self._lock:
            if handle not in self._lifted:
                return "PROC"
            self._held.discard(handle)
        return self._real["transfer"](handle)

    def _drive_orphans(self) -> None:
        for handle in list(self._orphans):
            if handle in self._held:
                self._start_if_lifted(handle)
            elif self._real["check_xfer_state"](handle) != "PROC":
                self._orphans.discard(handle)
                self._merged.discard(handle)
                self._real["release_xfer_handle"](handle)
                self.open.discard(handle)

    def _reach(self, moment: str, handle: Any = None) -> int:
        """Count a moment, with ``handle`` that of a WRITE. Stop at a gate for it. Returns the moment's number."""
        moments = [moment, f"{moment}:merged"] if handle in self._merged else [moment]
        with self._lock:
            numbers = [(moment, self.counts[moment]) for moment in moments]
            self.counts.update(moments)
            reached = [number for number in numbers if number in self.gates]
            gates = [self.gates[number] for number in reached]
            self.reached += reached
        for gate in gates:
            gate.wait()
        return numbers[0][1]


# For EngineHost.call.


def on_posts(host: HostedEngine, fault: PostFault, first: int = 0, count: int = ALL) -> None:
    """hold: stay in PROC until `lift`, which sends the bytes. fail: cannot be posted. err: end in ERR."""
    faults = _faults(host)
    faults.post_rules.append(PostRule(fault, faults.counts["post"] + first, count))


def on_merged_posts(host: HostedEngine, fault: PostFault, first: int = 0, count: int = ALL) -> None:
    """As `on_posts`, but beginning with a WRITE of several layers, after `first` WRITEs or more."""
    faults = _faults(host)
    faults.post_rules.append(PostRule(fault, faults.counts["post"] + first, count, merged=True))


def on_messages(
    host: HostedEngine,
    fault: MessageFault,
    kind: str,
    mentioning: str = "",
    count: int = ALL,
    direction: Direction = "out",
) -> None:
    _faults(host).rules.append(MessageRule(fault, kind, mentioning.encode(), count, direction))


def change_registrations(host: HostedEngine, change: Change | None) -> None:
    _faults(host).change = change


def forge_first_tokens(host: HostedEngine, token: int | None) -> None:
    """From now on P sends ``token`` in the place of every sampled first token. None: the sampled tokens."""
    from layerpush.core.wire import FirstToken, encode
    from layerpush.prefill import decode_peers

    def forged(message: Any) -> bytes:
        if not isinstance(message, FirstToken):
            return encode(message)
        return PEER_MESSAGE + msgspec.msgpack.encode({**msgspec.to_builtins(message), "token": token})

    decode_peers.encode = encode if token is None else forged


def gate(host: HostedEngine, moment: str, number: int = 0) -> None:
    """Stop the thread at the `number`th moment of this name from now, counted from 0. Not for got:KIND."""
    faults = _faults(host)
    with faults._lock:
        faults.gates[(moment, faults.counts[moment] + number)] = threading.Event()


def is_at_gate(host: HostedEngine) -> bool:
    return bool(_faults(host).reached)


def open_gates(host: HostedEngine, moment: str | None = None) -> None:
    """Open all gates, or those of one moment."""
    faults = _faults(host)
    with faults._lock:
        opened = {place: gate for place, gate in faults.gates.items() if moment in (None, place[0])}
        faults.gates = {place: gate for place, gate in faults.gates.items() if place not in opened}
        faults.reached = [place for place in faults.reached if place not in opened]
    for gate in opened.values():
        gate.set()


def lift(host: HostedEngine) -> None:
    """Stop holding: release held WRITEs and notifications, and hold no later ones."""
    faults = _faults(host)
    faults.post_rules = [rule for rule in faults.post_rules if rule.fault != "hold"]
    faults.rules = [rule for rule in faults.rules if rule.fault != "hold"]
    faults.lift()


def reset(host: HostedEngine) -> None:
    """End all faults, and release held WRITEs and notifications."""
    if host.faults is not None:
        host.faults.clear()
    if (worker := probes.nixl_worker()) is not None:
        worker.__dict__.pop("_nixl_handshake", None)


def watch(host: HostedEngine) -> None:
    """Count from now on, without any fault."""
    _faults(host)


def seen(host: HostedEngine, moment: str, at_least: int = 1) -> bool:
    """Whether a moment has come ``at_least`` times."""
    return _faults(host).counts[moment] >= at_least


def count_of(host: HostedEngine, moment: str) -> int:
    return _faults(host).counts[moment]


def held_posts(host: HostedEngine, at_least: int = 1) -> bool:
    return len(_faults(host)._held) >= at_least


def sent_kinds(host: HostedEngine, mentioning: str) -> list[str]:
    """The kinds of messages that mention a request, in the order of sending."""
    return [kind for kind, payload, _ in _faults(host).sent if mentioning.encode() in payload]


def registered_blocks(host: HostedEngine, mentioning: str) -> list[int]:
    """The blocks in D's registrations of a request."""
    found: set[int] = set()
    for kind, payload, _ in _faults(host).sent:
        if kind == "registration" and mentioning.encode() in payload:
            groups = msgspec.msgpack.decode(payload[len(REGISTRATION) :])["local_block_ids"]
            found.update(block for group in groups for block in group)
    return sorted(found)


def overwrite_block(host: HostedEngine, mentioning: str, index: int) -> None:
    """Change one block of D's KV cache: that with this index in D's registration of a request, in the last layer."""
    worker = _worker()
    sent = [payload for kind, payload, _ in _faults(host).sent if kind == "registration"]
    payload = next(payload for payload in sent if mentioning.encode() in payload)
    blocks = msgspec.msgpack.decode(payload[len(REGISTRATION) :])["local_block_ids"][0]
    cache = list(worker.device_kv_caches.values())[-1]
    cache[blocks[index] * worker._physical_blocks_per_logical_kv_block].add_(1)


def send_again(host: HostedEngine, kind: str, mentioning: str) -> None:
    """Send the last message of a kind about a request again."""
    faults = _faults(host)
    payload, agent = next(
        (payload, agent)
        for sent, payload, agent in reversed(faults.sent)
        if sent == kind and mentioning.encode() in payload
    )
    faults._real["send_notif"](agent, payload)


def open_handles(host: HostedEngine) -> int:
    """The number of unreleased transfer handles."""
    return 0 if host.faults is None else len(host.faults.open)


def fail_handshakes(host: HostedEngine, count: int) -> None:
    """The worker's next ``count`` handshakes cannot reach the peer. 0: no further failures."""
    worker = _worker()
    worker.__dict__.pop("_nixl_handshake", None)
    real = worker._nixl_handshake
    left = [count]

    def handshake(*args: Any, **kwargs: Any) -> Any:
        if left[0] == 0:
            return real(*args, **kwargs)
        left[0] -= 1
        raise ConnectionError("scripted: the peer cannot be reached")

    if count:
        worker._nixl_handshake = handshake


def claim_another_model(host: HostedEngine, on: bool) -> None:
    """From now on handshakes show another configuration than the peers'. Off: the true one."""
    worker = _worker()
    worker.compat_hash = ("not " if on else "") + worker.compat_hash.removeprefix("not ")


def forget_peers(host: HostedEngine) -> None:
    """Drop the worker's connections, so that the next request shakes hands again."""
    worker = _worker()
    for engine_id in list(worker._remote_agents):
        worker._cleanup_remote_engine(engine_id)


def _faults(host: HostedEngine) -> WireFaults:
    if host.faults is None:
        worker = _worker()
        host.faults = WireFaults(worker.nixl_wrapper, worker.pushes._writes if hasattr(worker, "pushes") else None)
    return host.faults


def _worker() -> Any:
    worker = probes.nixl_worker()
    assert worker is not None
    return worker


def _backend_error(agent: Any) -> type[Exception]:
    from layerpush.transport.nixl import _errors_of

    return next(error for error in _errors_of(agent) if error.__name__ == "nixlBackendError")


def _changed(payload: bytes, change: Change) -> bytes:
    fields = msgspec.msgpack.decode(payload[len(REGISTRATION) :])
    groups = [list(group) for group in fields["local_block_ids"]]
    if change == "one block less at the start":
        groups = [group[1:] for group in groups]
    elif change == "one block less at the end":
        groups = [group[:-1] for group in groups]
    elif change == "one block more":
        groups = [[*group, max(group) + 1] for group in groups]
    else:
        fields["decode_port"] = 1
    fields["local_block_ids"] = groups
    return REGISTRATION + msgspec.msgpack.encode(fields)
