"""The messages between P and D, from the structs of the wire."""

from __future__ import annotations

from typing import get_args

import msgspec

from layerpush.core import wire
from scripts.docgen.tables import sentence, table

FROM_D, FROM_P = "D → P", "P → D"
STOCK: dict[type[msgspec.Struct], tuple[str, str]] = {
    wire.Registration: (FROM_D, f"`{wire.REGISTRATION_PREFIX.decode()}` and a msgpack map"),
    wire.Completion: (FROM_P, "`<request_id>:<world_size>`"),
    wire.Heartbeat: (FROM_D, f"`{wire.HEARTBEAT_PREFIX.decode()}` and ids with commas between them"),
}
OURS: dict[type[msgspec.Struct], str] = {
    wire.Accepted: FROM_P,
    wire.FirstToken: FROM_P,
    wire.PrefixLanded: FROM_P,
    wire.Completed: FROM_P,
    wire.Fail: FROM_P,
    wire.Cancel: FROM_D,
    wire.Cancelled: FROM_P,
    wire.Queued: FROM_P,
    wire.Unregister: FROM_D,
    wire.Unregistered: FROM_P,
    wire.Decline: FROM_D,
    wire.Ping: FROM_D,
    wire.Pong: FROM_P,
    wire.Landed: FROM_P,
    wire.HasLanded: FROM_P,
    wire.Acknowledged: FROM_D,
}


def vllms() -> str:
    """vLLM's messages."""
    rows = [
        (f"`{kind.__name__}`", direction, shape, "below" if _items(kind) else _fields(kind), _summary(kind))
        for kind, (direction, shape) in STOCK.items()
    ]
    return table(("message", "direction", "bytes", "fields that are read", "meaning"), rows)


def registration() -> str:
    """The fields of a registration."""
    return "\n".join(f"- {sentence(item)}" for item in _items(wire.Registration))


def ours() -> str:
    """layerpush's own, in the order in which the union names them."""
    rows = [
        (f"`{kind.__name__}`", OURS[kind], _fields(kind), sentence(kind.__doc__)) for kind in get_args(wire.PeerMessage)
    ]
    return table(("message", "direction", "fields", "meaning"), rows)


def _summary(kind: type[msgspec.Struct]) -> str:
    return sentence((kind.__doc__ or "").split("\n\n")[0])


def _items(kind: type[msgspec.Struct]) -> list[str]:
    """The items of the list in its docstring."""
    return (kind.__doc__ or "").split("\n    - ")[1:]


def _fields(kind: type[msgspec.Struct]) -> str:
    return ", ".join(f"`{field}`" for field in kind.__struct_fields__)
