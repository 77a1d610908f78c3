"""What layerpush says to a bad setting and to a bad request: the real messages."""

from __future__ import annotations

from collections.abc import Mapping

from layerpush.compat.busy_wait import VARIABLE, wanted
from layerpush.core.config import ConfigError, LayerPushConfig
from layerpush.core.request_params import KvRole, ParamsError, check_params

BAD_SETTINGS: tuple[Mapping[str, object], ...] = (
    {"granularity": "block"},
    {"granularity": "Layer"},
    {"layerwise": "false"},
    {"min_write_bytes": -1},
    {"trace_dir": ""},
    {"allowed_hosts": "10.0.0.0/8"},
    {"allowed_hosts": ["10.1.2.3/8"]},
    {"allowed_hosts": ["prefill-0:5600"]},
    {"layer_wise": True},
)


def refusals() -> str:
    """One line per bad setting, as the engine's log shows it."""
    messages = []
    for extra in BAD_SETTINGS:
        try:
            LayerPushConfig.from_extra_config(extra)
        except ConfigError as error:
            messages.append(str(error))
        else:
            raise ValueError(f"{extra} is no bad setting any more")
    try:
        wanted({VARIABLE: "maybe"})
    except ConfigError as error:
        messages.append(str(error))
    return "\n".join(["```text", *messages, "```"])


_GOOD_REQUEST: Mapping[str, object] = {
    "do_remote_prefill": True,
    "remote_engine_id": "prefill-0",
    "remote_request_id": "cmpl-7",
    "remote_host": "10.0.0.7",
    "remote_port": 5600,
    "tp_size": 1,
}
BAD_REQUESTS: tuple[Mapping[str, object], ...] = (
    {key: value for key, value in _GOOD_REQUEST.items() if key != "tp_size"},
    {**_GOOD_REQUEST, "remote_port": "5600"},
    {**_GOOD_REQUEST, "remote_host": "192.168.0.1"},
    {"do_remote_decode": True},
)
BAD_FOR_P: Mapping[str, object] = {"do_remote_decode": True, "layerpush_mode": "Layer"}


def bad_requests() -> str:
    """One line per bad request to a D that allows hosts in 10.0.0.0/8, and to a P, as its client gets it."""
    config = LayerPushConfig.from_extra_config({"allowed_hosts": ["10.0.0.0/8"]})
    check_params(_GOOD_REQUEST, "kv_consumer", config)
    messages = []
    requests: list[tuple[Mapping[str, object], KvRole]] = [(params, "kv_consumer") for params in BAD_REQUESTS]
    for params, role in [*requests, (BAD_FOR_P, "kv_producer")]:
        try:
            check_params(params, role, config)
        except ParamsError as error:
            messages.append(str(error))
        else:
            raise ValueError(f"{params} is no bad request any more")
    return "\n".join(["```text", *messages, "```"])
