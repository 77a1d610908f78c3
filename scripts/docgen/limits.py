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
    ("a notification", "wire.MAX_NOTIFICATION_BYTES", "bytes", _DROPPED),
    ("an id, an engine's name", "wire.MAX_ID_CHARS", "characters", _DROPPED),
    ("a host", "wire.MAX_HOST_CHARS", "characters", _DROPPED),
    ("blocks of a registration", "wire.MAX_BLOCKS", "", _DROPPED),
    ("KV cache groups of a registration", "wire.MAX_GROUPS", "", _DROPPED),
    ("ids of a heartbeat", "wire.MAX_HEARTBEAT_IDS", "", _DROPPED),
    ("parts of an `Unpack`", "wire.MAX_PARTS", "", _DROPPED),
    ("a staging ring", "wire.MAX_RING_BYTES", "bytes", _DROPPED),
    ("a `Fail`'s reason", "wire.MAX_REASON_CHARS", "characters", "cut"),
    ("a handshake query", "listener.MAX_QUERY_BYTES", "bytes", "the connection is closed"),
    ("the answer to a probe", "probe.MAX_ANSWER_BYTES", "bytes", _NO_ANSWER),
    ("a probe", "probe.TIMEOUT_S", "seconds", _NO_ANSWER),
    ("`tp_size` of a request or registration", "door.MAX_TP_SIZE", "", "refused"),
    ("`pp_size` of a request", "door.MAX_PP_SIZE", "", "refused"),
    (
        "log lines of one kind of peer error",
        "complaints.QUIET_S",
        "seconds apart",
        "counted; the next line has the count",
    ),
    ("kinds of peer errors", "complaints.MAX_KINDS", "", "counted as one kind, `other`"),
)

# Whose; what is remembered; how many; for how long; what then.
TABLES = (
    ("P", "registrations without a request", "prefill.ledger.KEPT", "prefill.ledger.KEPT_S", "the oldest is refused"),
    ("P", "registrations that a push belongs to", "prefill.desk.REMEMBERED", "", _FORGOTTEN),
    ("P", "senders of registrations that are over", "prefill.desk.REMEMBERED", "", _FORGOTTEN),
    ("P", "last answers to registrations", "prefill.desk.REMEMBERED", "", _FORGOTTEN),
    (
        "P",
        "registrations cancelled before their request came",
        "prefill.desk.REMEMBERED",
        "prefill.ledger.KEPT_S",
        _FORGOTTEN,
    ),
    ("P", "answers to a D whose connection was lost", "prefill.desk.REMEMBERED", "prefill.desk.ENDED_S", "forgotten"),
    ("P", "reasons of requests that ended without a completion", "", "prefill.desk.ENDED_S", "forgotten"),
    ("P", "registrations of a D that may have restarted", "prefill.desk.REMEMBERED", "", "the newest is dropped"),
    ("P", "digests of prompts", "worker.DIGESTS_KEPT", "", _FORGOTTEN),
    ("both", "trace headers of requests", "spans.HEADERS_KEPT", "", _FORGOTTEN),
    ("both", "records that wait for the trace file", "tracefile.QUEUE_LIMIT", "", "the newest is dropped, counted"),
    (
        "both",
        "chunks, layers and WRITEs in those records",
        "tracefile.ROWS_LIMIT",
        "",
        "the newest is dropped, counted",
    ),
    ("D", "agents that speak layerpush", "decode.desk.SPEAKERS_KEPT", "", _FORGOTTEN),
    ("D", "messages about requests before their registration", "decode.desk.HELD", "decode.desk.HOLD_S", _DROPPED),
    ("D", "answers to `Unpack`", "decode.unpacker.ANSWERS_KEPT", "", _FORGOTTEN),
    ("both", "probes that wait", "probe.MAX_PENDING", "", _NO_ANSWER),
    ("both", "label values of a counter", "metrics.tally.MAX_LABEL_VALUES", "", "counted as one, `other`"),
    ("both", "geometry of disconnected engines", "compat.worker.DEPARTED_KEPT", "", _FORGOTTEN),
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
    return table(("side", "table", "entries", "kept for", "then"), rows)


def constant(root: Path, name: str) -> float:
    """A module's constant, e.g. ``prefill.ledger.KEPT``: read, not imported, since some modules import vLLM.

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
