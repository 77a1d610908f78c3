"""Tables of limits and bounded tables, with the numbers of the code."""

from __future__ import annotations

from layerpush.apps import http_server, metrics_port
from layerpush.apps.proxy import body, legs, proxy
from layerpush.compat import handshake, handshake_executor, heartbeats
from layerpush.core import request_params, wire
from layerpush.decode import early_messages
from layerpush.engine.scheduler import side_channel
from layerpush.engine.worker import inbox, side_channel_probe
from layerpush.prefill import claim_table, decode_peers, prompt_requests
from layerpush.telemetry import peer_errors, spans, trace_file
from layerpush.telemetry.metrics import ended_counts, metric_delta
from layerpush.transport import acknowledged, connections, nixl, peers
from scripts.docgen.tables import table

_FORGOTTEN, _DROPPED, _NO_ANSWER = "the oldest is forgotten", "dropped, logged", "counts as no answer"
_ID_BYTES = 4 * wire.MAX_ID_CHARS
"""Of the longest id."""

# Limited thing; maximum, its unit; effect beyond it.
MESSAGES = (
    ("a registration", wire.MAX_REGISTRATION_BYTES, "bytes", _DROPPED),
    ("a heartbeat", wire.MAX_HEARTBEAT_BYTES, "bytes", _DROPPED),
    ("any other notification", wire.MAX_MESSAGE_BYTES, "bytes", _DROPPED),
    ("notifications in a turn of the writer thread", inbox.MESSAGES_PER_TURN, "", "the next turn takes them"),
    ("a turn's messages, but for the last one", inbox.TURN_S, "seconds", "the next turn takes them"),
    ("an id, the name of an engine or agent", wire.MAX_ID_CHARS, "characters", _DROPPED),
    ("a request's id in vLLM's front end", request_params.MAX_OUTER_ID_CHARS, "characters", "refused"),
    ("a host", wire.MAX_HOST_CHARS, "characters", _DROPPED),
    ("blocks of a registration", wire.MAX_BLOCKS, "", _DROPPED),
    ("KV cache groups of a registration", wire.MAX_GROUPS, "", _DROPPED),
    ("ids of a heartbeat", wire.MAX_HEARTBEAT_IDS, "", _DROPPED),
    ("numbers of an `Acknowledged`", wire.MAX_ACKNOWLEDGED, "", _DROPPED),
    ("parts of a `Completed`", wire.MAX_PARTS, "", _DROPPED),
    ("checksums of a part of a `Completed`", wire.MAX_CHECKSUMS, "", _DROPPED),
    ("a registration's `contact`", wire.MAX_CONTACT_BYTES, "bytes", _DROPPED),
    ("sampling parameters of a registration", wire.MAX_PARAMETERS, "", _DROPPED),
    ("a `Fail`'s reason", wire.MAX_REASON_CHARS, "characters", "cut"),
    ("a handshake query", side_channel.MAX_QUERY_BYTES, "bytes", "the connection is closed, logged"),
    (
        "a handshake query, or the reading of its answer",
        side_channel.QUERY_S,
        "seconds",
        "the connection is closed, logged",
    ),
    ("a pause between two handshake queries", side_channel.IDLE_S, "seconds", "the connection is closed"),
    ("the answer of a rank to a handshake query", handshake.MAX_ANSWER_BYTES, "bytes", "the handshake fails, logged"),
    (
        "the answers of an engine to a handshake",
        handshake_executor.MAX_ANSWERS_BYTES,
        "bytes",
        "the handshake fails, logged",
    ),
    ("the answers of an engine to a handshake", handshake_executor.TIMEOUT_S, "seconds", "the handshake fails, logged"),
    ("the answer to a probe", handshake.MAX_ANSWER_BYTES, "bytes", _NO_ANSWER),
    ("a probe", side_channel_probe.TIMEOUT_S, "seconds", _NO_ANSWER),
    ("`tp_size` of a request or registration", wire.MAX_TP_SIZE, "", "refused"),
    ("`pp_size` of a request", request_params.MAX_PP_SIZE, "", "refused"),
    (
        "log lines of one kind of peer error",
        peer_errors.QUIET_S,
        "seconds apart",
        "counted; the next line has the count",
    ),
    ("kinds of peer errors", peer_errors.MAX_KINDS, "", "counted as one kind, `other`"),
    (
        "the proxy, `layerpush metrics`: the request line, and each header",
        http_server.MAX_LINE_BYTES,
        "bytes",
        "status 400, the connection ends",
    ),
    (
        "the proxy, `layerpush metrics`: headers of a request",
        http_server.MAX_HEADERS,
        "",
        "status 400, the connection ends",
    ),
    (
        "the proxy, `layerpush metrics`: the arrival of a head",
        http_server.HEAD_TIMEOUT_S,
        "seconds",
        "the connection ends",
    ),
    ("the proxy: the arrival of a body", proxy.UPLOAD_S, "seconds", "status 408, the connection ends"),
    (
        "the proxy: connections, beyond `--max-concurrent-requests`; fewer if it may open few files",
        proxy.SPARE_CONNECTIONS,
        "",
        "old ones without a request are closed, logged",
    ),
    ("the proxy: a list of models", proxy.MODELS_S, "seconds", "status 503"),
    ("`layerpush metrics`: connections", metrics_port.MAX_CONNECTIONS, "", "old ones that wait for nothing are closed"),
    ("`layerpush metrics`: requests that wait for the engine", metrics_port.MAX_SCRAPES, "", "status 429"),
    ("`layerpush metrics`: the engine's answer", metrics_port.SCRAPE_S, "seconds", "status 502"),
    ("the proxy: keys of a JSON object", body.MAX_KEYS, "", "status 400"),
    (
        "the proxy: an engine's answer in one piece, D's first event",
        legs.MAX_ANSWER_BYTES,
        "bytes",
        "status 502; D's is passed on",
    ),
)

# Side; table; entries; bytes; seconds; effect beyond them.
TABLES = (
    (
        "P",
        "claims that wait: their request has not begun",
        claim_table.WAITING,
        claim_table.WAITING_BYTES,
        claim_table.WAITING_S,
        "the oldest is refused",
    ),
    (
        "P",
        "claims whose request is unwanted",
        claim_table.REMEMBERED,
        claim_table.UNWANTED_BYTES,
        claim_table.WAITING_S,
        _FORGOTTEN,
    ),
    ("P", "claims that were served", claim_table.REMEMBERED, claim_table.REMEMBERED_BYTES, None, _FORGOTTEN),
    ("P", "other claims", claim_table.REMEMBERED, claim_table.REMEMBERED_BYTES, None, _FORGOTTEN),
    (
        "P",
        "answers to decode engines whose connection was lost",
        decode_peers.HELD,
        decode_peers.WITHHELD_BYTES,
        decode_peers.ANSWERS_KEPT_S,
        _FORGOTTEN,
    ),
    (
        "P",
        "requests that ended",
        prompt_requests.ENDED_KEPT,
        prompt_requests.ENDED_BYTES,
        prompt_requests.ENDED_S,
        _FORGOTTEN,
    ),
    (
        "P",
        "requests that went to another data-parallel rank",
        prompt_requests.ENDED_KEPT,
        prompt_requests.ENDED_BYTES,
        prompt_requests.ELSEWHERE_S,
        _FORGOTTEN,
    ),
    (
        "P",
        "registrations of a D that may have restarted",
        decode_peers.HELD,
        decode_peers.HELD_BYTES,
        None,
        "the oldest is dropped",
    ),
    ("both", "engines that are known without a connection", peers.KEPT, peers.KEPT_BYTES, None, _FORGOTTEN),
    ("P", "contacts of one D's ranks", wire.MAX_TP_SIZE, peers.CONTACTS_BYTES, None, _FORGOTTEN),
    (
        "both",
        "agents that were notified without a handshake",
        nixl.MET_KEPT,
        nixl.MET_KEPT * wire.MAX_CONTACT_BYTES,
        None,
        "no more are notified so",
    ),
    ("P", "requests of heartbeats, for the next step", heartbeats.KEPT, heartbeats.KEPT * _ID_BYTES, None, "dropped"),
    (
        "P",
        "requests that have come, and their prompts' digests",
        prompt_requests.KEPT,
        prompt_requests.KEPT_BYTES,
        None,
        _FORGOTTEN,
    ),
    ("both", "trace headers of requests", spans.HEADERS_KEPT, None, None, _FORGOTTEN),
    (
        "both",
        "records that wait for the trace file",
        trace_file.QUEUE_LIMIT,
        None,
        None,
        "the newest is dropped, counted",
    ),
    (
        "both",
        "chunks, layers and WRITEs in those records",
        trace_file.ROWS_LIMIT,
        None,
        None,
        "the newest is dropped, counted",
    ),
    (
        "both",
        "the trace of a process, in two files",
        None,
        2 * trace_file.MAX_FILE_BYTES,
        None,
        "the older file is replaced",
    ),
    (
        "D",
        "messages about requests before their registration",
        early_messages.KEPT,
        early_messages.KEPT_BYTES,
        early_messages.KEPT_S,
        _DROPPED,
    ),
    (
        "D",
        "WRITEs of an agent that have landed, not over UCX",
        acknowledged.LANDED_KEPT,
        acknowledged.LANDED_BYTES,
        None,
        _FORGOTTEN,
    ),
    ("D", "agents with such WRITEs", acknowledged.AGENTS_KEPT, acknowledged.AGENTS_BYTES, None, _FORGOTTEN),
    (
        "D",
        "declines that wait for P's address",
        side_channel_probe.MAX_SEARCHING,
        None,
        None,
        "dropped: P's lease ends",
    ),
    (
        "both",
        "connections to a side channel; fewer if the process may open few files",
        side_channel.MAX_CONNECTIONS,
        side_channel.MAX_CONNECTIONS * side_channel.MAX_QUERY_BYTES,
        side_channel.IDLE_S,
        "an old one is closed, of the host with the most",
    ),
    (
        "both",
        "messages that wait for a handshake",
        connections.WAITING_KEPT,
        None,
        None,
        "the newest is dropped, logged",
    ),
    ("both", "handshakes", handshake_executor.MAX_HANDSHAKES, None, None, "the newest fails, logged"),
    ("both", "handshakes with one host", handshake_executor.MAX_WITH_HOST, None, None, "the newest fails, logged"),
    (
        "both",
        "handshakes with hosts whose last one did not succeed",
        handshake_executor.MAX_UNPROVEN,
        None,
        None,
        "the newest fails, logged",
    ),
    ("both", "handshakes that run", handshake_executor.MAX_RUNNING, None, None, "the newest waits"),
    (
        "both",
        "handshakes that run with hosts whose last one did not succeed",
        handshake_executor.MAX_RUNNING_UNPROVEN,
        None,
        None,
        "the newest waits",
    ),
    (
        "both",
        "hosts whose last handshake succeeded",
        handshake_executor.PROVEN_KEPT,
        handshake_executor.PROVEN_BYTES,
        None,
        _FORGOTTEN,
    ),
    (
        "both",
        "handshakes with one host that run",
        handshake_executor.MAX_RUNNING_WITH_HOST,
        None,
        None,
        "the newest waits",
    ),
    (
        "both",
        "probes that wait",
        side_channel_probe.MAX_PENDING,
        None,
        None,
        _NO_ANSWER,
    ),
    (
        "both",
        "addresses that are asked whether another process has an engine's id there",
        connections.MAX_DOUBTS,
        None,
        None,
        "a further one is refused",
    ),
    (
        "both",
        "ends of pushes and loads that not all ranks have reported",
        None,
        None,
        ended_counts.KEPT_S,
        "counted as they are",
    ),
    ("both", "label values of a counter", metric_delta.MAX_LABEL_VALUES, None, None, "counted as one, `other`"),
)


def messages() -> str:
    """The limits of messages, for the page on security."""
    return table(
        ("limited item", "at most", "beyond"), [(what, _shown(most, unit), rest) for what, most, unit, rest in MESSAGES]
    )


def tables() -> str:
    """The bounded tables, for the page on failures."""
    rows = [
        (side, what, _shown(number), _shown(size, "bytes"), _shown(age, "seconds"), then)
        for side, what, number, size, age, then in TABLES
    ]
    return table(("side", "table", "entries", "bytes", "kept for", "then"), rows)


def _shown(number: float | None, unit: str = "") -> str:
    if number is None:
        return ""
    if unit == "bytes":
        return f"{number / 2**20:g} MiB" if number >= 2**20 else f"{number / 2**10:g} KiB"
    shown = f"{number:,}" if isinstance(number, int) else f"{number:g}"
    return f"{shown} s{unit.removeprefix('seconds')}" if unit.startswith("seconds") else f"{shown} {unit}".strip()
