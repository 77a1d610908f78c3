"""Learns the identities of prefill engines, from probes and from every answer."""

from __future__ import annotations

import logging
import uuid
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import msgspec

from layerpush.apps.proxy.body import RequestBody
from layerpush.apps.proxy.errors import error_message
from layerpush.apps.proxy.identity import TO_PREFILL, Identity, IdentityError
from layerpush.apps.proxy.instance import Instance
from layerpush.apps.proxy.legs import Engines, LegFailedError

logger = logging.getLogger("layerpush.proxy")

PROBE_PROMPT = [1, 1, 1, 1]


@dataclass(frozen=True)
class Probe:
    """A request of the proxy that P has answered, ready to be sent to D."""

    request_id: str
    path: str
    to_decode: bytes


class _Answer(msgspec.Struct):
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


def transfer_params(answer: bytes) -> msgspec.Raw | None:
    """The `kv_transfer_params` of P's answer, as raw JSON; None if it has none."""
    try:
        raw = msgspec.json.decode(answer, type=_Answer).kv_transfer_params
    except msgspec.DecodeError:
        return None
    return None if bytes(raw) == b"null" else raw


class Introductions:
    """Keeps the instances' identities correct. Logs when one is learned, changes, or cannot be learned."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self._last_warning: WeakKeyDictionary[Instance, str] = WeakKeyDictionary()

    async def probe(self, instance: Instance) -> Probe | None:
        """Ask a prefill engine for one token, and learn its identity from the answer. Raises nothing.

        P keeps the block of this prompt until the probe is delivered, or its lease ends.
        """
        request_id = f"probe-{uuid.uuid4()}"
        try:
            timeout_s = self._engines.settings.first_token_timeout_s
            models = await self._engines.get(instance, "/v1/models", timeout_s)
            model = msgspec.json.decode(models.body, type=_Models).data[0].id
            question = {"model": model, "prompt": PROBE_PROMPT, "temperature": 0, "max_tokens": 1}
            body = RequestBody("completions", msgspec.json.encode(question))
            headers = {**self._engines.own_headers, "X-Request-Id": request_id}
            answer = await self._engines.ask(instance, body.path, body.to_prefill(TO_PREFILL), headers)
        except LegFailedError as failure:
            self._use_sequential(instance, str(failure))
            return None
        except (msgspec.DecodeError, IndexError):
            self._use_sequential(instance, f"{instance} names no model at /v1/models")
            return None
        if answer.status != 200:
            self._use_sequential(instance, f"{instance} answered {answer.status}: {error_message(answer.body)}")
            return None
        params = transfer_params(answer.body)
        self.learn(instance, params)
        return None if params is None else Probe(request_id, body.path, body.to_decode(params))

    async def deliver(self, probe: Probe, decode: Instance) -> None:
        """Send a probe to a decode engine. Without that, P would count and log a failed push."""
        headers = {**self._engines.own_headers, "X-Request-Id": probe.request_id}
        try:
            await self._engines.ask(decode, probe.path, probe.to_decode, headers)
        except LegFailedError as failure:
            logger.debug("the first push to %s: %s", decode, failure)

    def learn(self, instance: Instance, params: msgspec.Raw | None) -> None:
        """Update ``instance.identity`` from P's own parameters. Afterwards it is correct, or None."""
        try:
            identity = Identity.from_params(None if params is None else msgspec.json.decode(params))
        except IdentityError as error:
            if not instance.identity_given:
                self._use_sequential(instance, f"{instance}: {error}")
            return
        known = instance.identity
        if instance.shared:
            return
        if known is not None and instance.identity_given:
            if known.engine_id != identity.engine_id:
                self._warn_once(
                    instance, f"{instance} is {identity.engine_id}, not {known.engine_id} (--prefill-identity)"
                )
                instance.identity = replace(known, engine_id=identity.engine_id)
        elif identity.is_one_of_several:
            self._use_sequential(
                instance,
                f"{instance} is a data-parallel rank ({identity.engine_id}), of which several may answer at one URL; "
                "give each rank an API server of its own and name it with --prefill-identity",
            )
        elif known is not None and known != identity and identity in instance.former:
            instance.shared = True
            self._use_sequential(
                instance,
                f"{instance} is {identity.engine_id} again, and was {known.engine_id}: several engines answer at this "
                "URL; name each with a --prefill of its own",
            )
        elif known != identity:
            self._set_identity(instance, identity)

    def _set_identity(self, instance: Instance, identity: Identity) -> None:
        instance.identity = identity
        instance.former.add(identity)
        self._last_warning.pop(instance, None)
        logger.info("%s is %s: P and D are asked at the same time", instance, identity)
        if identity.is_loopback and not _is_loopback(instance.url):
            logger.warning(
                "%s reports %s as its address, which for decode engines is their own machine: set "
                "VLLM_NIXL_SIDE_CHANNEL_HOST to its address",
                instance,
                identity.host,
            )

    def _use_sequential(self, instance: Instance, reason: str) -> None:
        if not instance.identity_given:
            instance.identity = None
        self._warn_once(instance, f"{reason}. Sequential dispatch for this engine: D is asked after it has answered")

    def _warn_once(self, instance: Instance, text: str) -> None:
        """Log a warning, unless it is the same as the instance's last one."""
        if self._last_warning.get(instance) != text:
            self._last_warning[instance] = text
            logger.warning("%s", text)


def _is_loopback(url: str) -> bool:
    host = url.partition("://")[2]
    return host.startswith(("localhost", "127.", "[::1]"))
