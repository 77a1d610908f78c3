"""How much of what is taken or remembered, with the numbers that the code has."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from pathlib import Path

from scripts.docgen.tables import table

_OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Pow: operator.pow,
    ast.LShift: lambda left, right: int(left) << int(right),
}
_UNITS = ((1 << 20, "MiB"), (1 << 10, "KiB"))

_FORGOTTEN, _DROPPED, _NO_ANSWER = "the oldest is forgotten", "dropped, logged", "counts as no answer"

# What is limited; the constant, its unit; what becomes of the rest.
MESSAGES = (
    ("a notification", "core.wire.MAX_NOTIFICATION_BYTES", "bytes", _DROPPED),
    ("an id, an engine's name", "core.wire.MAX_ID_CHARS", "characters", _DROPPED),
    ("a host", "core.wire.MAX_HOST_CHARS", "characters", _DROPPED),
    ("blocks of a registration", "core.wire.MAX_BLOCKS", "", _DROPPED),
    ("KV cache groups of a registration", "core.wire.MAX_GROUPS", "", _DROPPED),
    ("ids of a heartbeat", "core.wire.MAX_HEARTBEAT_IDS", "", _DROPPED),
    ("parts of an `Unpack`", "core.wire.MAX_PARTS", "", _DROPPED),
    ("a staging ring", "core.wire.MAX_RING_BYTES", "bytes", _DROPPED),
    ("a `Fail`'s reason", "core.wire.MAX_REASON_CHARS", "characters", "cut"),
    ("a handshake query", "worker.side_channel.MAX_QUERY_BYTES", "bytes", "the connection is closed"),
    ("the answer to a probe", "worker.side_channel_probe.MAX_ANSWER_BYTES", "bytes", _NO_ANSWER),
    ("how long a probe takes", "worker.side_channel_probe.TIMEOUT_S", "seconds", _NO_ANSWER),
    ("`tp_size` of a request or registration", "core.request_params.MAX_TP_SIZE", "", "refused"),
    ("`pp_size` of a request", "core.request_params.MAX_PP_SIZE", "", "refused"),
    (
        "lines of one kind of complaint",
        "telemetry.peer_errors.QUIET_S",
        "seconds apart",
        "counted; the next line says how many",
    ),
    ("kinds of complaint", "telemetry.peer_errors.MAX_KINDS", "", "counted as one kind, `other`"),
)

# Whose; what is remembered; how many; for how long; what then.
TABLES = (
    (
        "P",
        "registrations without a request",
        "core.pending_registrations.KEPT",
        "core.pending_registrations.KEPT_S",
        "the oldest is refused",
    ),
    ("P", "registrations that a push belongs to", "prefill.registrations.REMEMBERED", "", _FORGOTTEN),
    ("P", "who sent a registration that is over", "prefill.registrations.REMEMBERED", "", _FORGOTTEN),
    ("P", "last answers to registrations", "prefill.registrations.REMEMBERED", "", _FORGOTTEN),
    (
        "P",
        "registrations withdrawn early",
        "prefill.registrations.REMEMBERED",
        "core.pending_registrations.KEPT_S",
        _FORGOTTEN,
    ),
    (
        "P",
        "answers to a D whose connection was lost",
        "prefill.decode_peers.HELD",
        "prefill.decode_peers.ANSWERS_KEPT_S",
        "forgotten",
    ),
    ("P", "why a request ended without a completion", "", "prefill.registrations.ENDED_S", "forgotten"),
    (
        "P",
        "registrations of a D that may have been replaced",
        "prefill.decode_peers.HELD",
        "",
        "the newest is dropped",
    ),
    ("P", "digests of prompts", "worker.worker.DIGESTS_KEPT", "", _FORGOTTEN),
    ("both", "trace headers of requests", "telemetry.spans.HEADERS_KEPT", "", _FORGOTTEN),
    (
        "both",
        "records that wait for the trace file",
        "telemetry.trace_file.QUEUE_LIMIT",
        "",
        "the newest is dropped, counted",
    ),
    (
        "both",
        "chunks, layers and WRITEs in them",
        "telemetry.trace_file.ROWS_LIMIT",
        "",
        "the newest is dropped, counted",
    ),
    ("D", "agents that speak layerpush", "decode.prefill_peers.IDENTIFIED_KEPT", "", _FORGOTTEN),
    (
        "D",
        "messages about requests not yet registered",
        "decode.early_messages.KEPT",
        "decode.early_messages.KEPT_S",
        _DROPPED,
    ),
    ("D", "answers to `Unpack`", "transport.packing.unpacker.ANSWERS_KEPT", "", _FORGOTTEN),
    ("both", "probes that wait", "worker.side_channel_probe.MAX_PENDING", "", _NO_ANSWER),
    ("both", "label values of a counter", "telemetry.metrics.tally.MAX_LABEL_VALUES", "", "counted as one, `other`"),
    ("both", "geometry of engines that were disconnected", "compat.push_worker.DEPARTED_KEPT", "", _FORGOTTEN),
)


def messages(root: Path) -> str:
    rows = [(what, _shown(constant(root, name), unit), rest) for what, name, unit, rest in MESSAGES]
    return table(("what", "at most", "beyond"), rows)


def tables(root: Path) -> str:
    rows = [
        (
            side,
            what,
            _shown(constant(root, number), "") if number else "",
            _shown(constant(root, age), "seconds") if age else "",
            then,
        )
        for side, what, number, age, then in TABLES
    ]
    return table(("side", "what is remembered", "entries", "for at most", "then"), rows)


def constant(root: Path, name: str) -> float:
    """A module's constant, e.g. ``core.config.LIMIT``: read, not imported, since some modules import vLLM.

    Raises:
        LookupError: there is no such constant, or it is no plain number.
    """
    module, _, wanted = name.rpartition(".")
    file = root / "layerpush" / f"{module.replace('.', '/')}.py"
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == [wanted]:
            return _number(node.value)
    raise LookupError(f"{file} defines no {wanted}")


def _number(node: ast.expr) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_number(node.left), _number(node.right))
    raise LookupError(f"{ast.unparse(node)} is no plain number")


def _shown(number: float, unit: str) -> str:
    if unit == "bytes":
        for size, name in _UNITS:
            if number >= size and number % size == 0:
                return f"{number // size} {name}"
    shown = f"{number:,}" if isinstance(number, int) else f"{number:g}"
    return f"{shown} s{unit.removeprefix('seconds')}" if unit.startswith("seconds") else f"{shown} {unit}".strip()
