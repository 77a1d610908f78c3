"""`kv_connector_extra_config` -> LayerPushConfig. Pure: no torch, no vLLM, no NIXL."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from layerpush.core.hosts import MAX_HOST_CHARS, HostError, check_entry
from layerpush.core.push_mode import PushMode

CONNECTOR_NAME = "LayerwisePushConnector"
"""layerpush's `kv_connector` in a `--kv-transfer-config`."""
MAX_STAGING_BYTES = 1 << 30

VLLM_KEYS: Mapping[str, Any] = {
    "backends": Annotated[
        tuple[Annotated[str, Meta(min_length=1)], ...], Meta(min_length=1, title="names of NIXL backends")
    ],
    "decoder_kv_blocks_ttl": Annotated[float, Meta(ge=0)],
    "enforce_handshake_compat": Annotated[bool, Meta()],
    "engine_ttl": Annotated[float, Meta()],
    "kv_lease_duration": Annotated[float, Meta(gt=0)],
    "kv_recompute_threshold": Annotated[int, Meta()],
    "num_threads": Annotated[int, Meta(ge=0)],
    "push_registration_timeout": Annotated[float, Meta(ge=0)],
}
"""Keys of kv_connector_extra_config that vLLM 0.32's NIXL connectors read, and their types: checked, passed through."""

TRANSFER_FIELDS = frozenset(
    {
        "enable_permute_local_kv",
        "engine_id",
        "kv_buffer_device",
        "kv_connector",
        "kv_connector_extra_config",
        "kv_connector_module_path",
        "kv_load_failure_policy",
        "kv_port",
        "kv_role",
    }
)
"""The fields of a `--kv-transfer-config`: those of vLLM 0.32's KVTransferConfig."""

REMOVED_KEYS = {
    "min_write_bytes": 'remove it; with `granularity: "auto"`, the default, layers share WRITEs by themselves'
}
"""Keys of earlier releases, with the remedy."""


EXTRA = "kv_connector_extra_config"


class ConfigError(ValueError):
    """A setting has a bad name or a bad value. The message names the setting, the value and the choices."""


class LayerPushConfig(msgspec.Struct, frozen=True, kw_only=True):
    """An operator's settings. P and D take the same keys; each side ignores the keys that only concern the other."""

    layerwise: Annotated[
        bool,
        Meta(description="Push during prefill. `false`: push whole requests after it, exactly as `NixlPushConnector`."),
    ] = True
    granularity: Annotated[
        Literal["auto", "layer", "chunk"],
        Meta(
            description='`"auto"`: let ready layers wait and share a WRITE, while the '
            'WRITE can still land before the next layer is ready. `"layer"`: write '
            'each layer once it is computed. `"chunk"`: write all layers after each step.'
        ),
    ] = "auto"
    layerwise_min_tokens: Annotated[
        int,
        Meta(ge=0, description="Push prompts with fewer tokens than this whole, after prefill."),
    ] = 0
    packing: Annotated[
        Literal["auto", "off", "gather"],
        Meta(
            description='Copy scattered blocks together before the WRITE. `"auto"`: if the estimate says that it is '
            'faster. `"off"`: never. `"gather"`: always.'
        ),
    ] = "auto"
    staging_bytes: Annotated[
        Annotated[int, Meta(ge=0, le=MAX_STAGING_BYTES)] | None,
        Meta(
            description="Bytes of staging memory per worker of P; `0`: nothing is gathered. `null`: 64 MiB on a GPU. "
            "On a CPU 8 times the bytes of a layer of `max_num_batched_tokens` tokens, from 64 to 512 MiB."
        ),
    ] = None
    trace_dir: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        Meta(
            description="Directory for JSONL traces, one per worker and one for D's scheduler: a line for each push, "
            "each load and each first token. `~` is the home directory. `null`: no trace.",
        ),
    ] = None
    first_token: Annotated[
        Literal["prefill", "decode"],
        Meta(
            description='On D: `"prefill"`: a request starts with the token that P has sampled, as soon as its KV is '
            'there. `"decode"`: D computes the prompt\'s last token again and samples from it.'
        ),
    ] = "prefill"
    awaited_share: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="On D: share of the KV cache that prompts may hold while D awaits them from P. Further prompts "
            "wait without blocks. One prompt alone may hold more.",
        ),
    ] = 0.5
    peer_timeout_s: Annotated[
        int,
        Meta(
            ge=1,
            description="On D: seconds without a sign of life from a P after which D cancels the loads that it awaits "
            "from that P.",
        ),
    ] = 20
    answer_early: Annotated[
        bool,
        Meta(
            description="On P: answer a router that asks P before D as soon as the engine has the request, and go on "
            "computing. D must run a push connector as well."
        ),
    ] = False
    unknown_request_timeout_s: Annotated[
        int,
        Meta(
            ge=1,
            description="On P: seconds for which a registration waits for its request to come to P. Then P refuses it, "
            "and D's load fails. The request has come once it is in P's queue.",
        ),
    ] = 30
    verify: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="Share of the pushes by layer whose KV D compares with P's, by checksums, before it uses it. "
            "`0` on P or D: none.",
        ),
    ] = 0.01
    write_timeout_s: Annotated[
        int,
        Meta(ge=1, description="On P: seconds that one WRITE may take until P gives up its push."),
    ] = 60
    bidirectional_kv_xfer: Annotated[
        bool,
        Meta(
            description="D keeps the blocks of each answer for `decoder_kv_blocks_ttl` seconds. P loads them with the "
            "conversation's next turn. Set it on P and on D."
        ),
    ] = False
    allowed_hosts: Annotated[
        tuple[Annotated[str, Meta(min_length=1, max_length=MAX_HOST_CHARS)], ...] | None,
        Meta(
            title="host names, IP addresses and networks",
            description="Host names, IP addresses and networks (CIDR) to which requests and peers may make this engine "
            "connect; `null`: any.",
        ),
    ] = None

    @property
    def mode(self) -> PushMode:
        """How P pushes a request that does not choose for itself."""
        return PushMode(self.granularity) if self.layerwise else PushMode.WHOLE

    @classmethod
    def from_extra_config(cls, extra: Mapping[str, object]) -> LayerPushConfig:
        """Check vLLM's `kv_connector_extra_config` and take layerpush's own keys from it.

        Raises:
            ConfigError: a key is unknown, or a value is not one of its key's choices; `"1"` is not a number.
        """
        own = key_types()
        known = {**own, **VLLM_KEYS}
        for key in extra:
            if key in REMOVED_KEYS:
                raise ConfigError(f"{EXTRA}: {key!r} is gone: {REMOVED_KEYS[key]}")
            if key in TRANSFER_FIELDS:
                raise ConfigError(f"{EXTRA}: {key!r} belongs one level up, beside 'kv_connector'")
            if key not in known:
                raise ConfigError(unknown(EXTRA, "key", key, known, "layerpush's and vLLM's NIXL keys"))
        values = {key: _converted(key, value, known[key]) for key, value in extra.items()}
        for entry in values.get("allowed_hosts") or ():
            try:
                check_entry(entry)
            except HostError as error:
                raise ConfigError(f"{EXTRA}: 'allowed_hosts': {error}") from None
        return cls(**{key: value for key, value in values.items() if key in own})


def key_types() -> dict[str, Any]:
    """Each key's type and ``Meta``, in the order of the keys."""
    return get_type_hints(LayerPushConfig, include_extras=True)


def choices(annotation: Any) -> str:
    """The values of a key, in JSON: `"layer" or "chunk"`."""
    bare, meta = get_args(annotation)[:2]
    words = []
    for option in get_args(bare) if get_origin(bare) in (Literal, Union, types.UnionType) else (bare,):
        kind, limits = get_args(option)[:2] if get_origin(option) is Annotated else (option, meta)
        if isinstance(kind, str):
            words.append(f'"{kind}"')
        elif kind in (int, float):
            words.append(("integer" if kind is int else "number") + _bounds(limits))
        elif kind is str and limits.min_length is not None:
            words.append("non-empty string")
        elif get_origin(kind) is tuple:
            words.append(f"list of {limits.title}")
        else:
            words.append({bool: "true or false", str: "string", type(None): "null"}[kind])
    return " or ".join(words)


def unknown(where: str, word: str, name: str, known: Iterable[str], all_of_them: str) -> str:
    """An error: there is no such name at this place. It has the nearest known one."""
    choices = sorted(known)
    close = difflib.get_close_matches(name, choices, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{where}: unknown {word} {name!r}; {hint}{all_of_them} are: {', '.join(choices)}"


def _bounds(limits: Meta) -> str:
    if limits.le is not None:
        return f" from {limits.ge} to {limits.le}"
    return f" >= {limits.ge}" if limits.ge is not None else f" > {limits.gt}" if limits.gt is not None else ""


def _converted(key: str, value: object, annotation: Any) -> Any:
    try:
        return msgspec.convert(value, annotation, strict=True)
    except msgspec.ValidationError:
        message = f"{EXTRA}: {key!r} is {value!r} ({type(value).__name__})"
        raise ConfigError(f"{message}; choices: {choices(annotation)}{_hint(value, annotation)}") from None


def _hint(value: object, annotation: Any) -> str:
    """The value that was probably meant, as a hint, or an empty string."""
    if not isinstance(value, str):
        return ""
    word = value.strip().lower()
    for meant in ({"true": True, "false": False}.get(word), _number(word), word, [value.strip()]):
        try:
            msgspec.convert(meant, annotation, strict=True)
        except msgspec.ValidationError:
            continue
        if meant is not None:
            quotes = " without quotes" if isinstance(meant, bool | int | float) else ""
            return f"; write {msgspec.json.encode(meant).decode()}{quotes}"
    options = [option for option in get_args(get_args(annotation)[0]) if isinstance(option, str)]
    close = difflib.get_close_matches(word, options, n=1)
    return f'; did you mean "{close[0]}"?' if close else ""


def _number(word: str) -> int | float | None:
    try:
        return int(word) if word.isdecimal() else float(word)
    except ValueError:
        return None
