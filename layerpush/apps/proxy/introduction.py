"""Learns the identities of prefill engines, from a probe and from every answer."""

from __future__ import annotations

import logging
import uuid
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

import msgspec

from layerpush.apps.proxy.body import RequestBody
from layerpush.apps.proxy.engines import Engine, Fleet
from layerpush.apps.proxy.errors import error_message
from layerpush.apps.proxy.identity import LOOPBACK, TO_PREFILL, Identity, IdentityError
from layerpush.apps.proxy.legs import Engines, LegFailedError

logger = logging.getLogger("layerpush.proxy")

PROBE_PROMPT = [1, 1, 1, 1]


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
    """Keeps the engines' identities correct. Logs when one is learned, changes, or cannot be learned."""

    def __init__(self, fleet: Fleet, engines: Engines) -> None:
        self._fleet = fleet
        self._engines = engines
        self._last_warning: WeakKeyDictionary[Engine, str] = WeakKeyDictionary()

    async def probe(self, engine: Engine) -> None:
        """Ask a prefill engine for one token, and learn its identity from the answer. Raises nothing.

        A D gets what P has computed. Without that, P would keep it until its lease ends, and count a failed push.
        """
        engine.is_asked = True
        try:
            models = await self._engines.get(engine, "/v1/models", self._engines.settings.first_token_timeout_s)
            model = msgspec.json.decode(models.body, type=_Models).data[0].id
            question = {"model": model, "prompt": PROBE_PROMPT, "temperature": 0, "max_tokens": 1}
            body = RequestBody("completions", msgspec.json.encode(question))
            headers = {**self._engines.own_headers, "X-Request-Id": f"probe-{uuid.uuid4()}"}
            answer = await self._engines.ask(engine, body.path, body.to_prefill(TO_PREFILL), headers)
        except LegFailedError as failure:
            engine.is_asked = False  # the next check asks again
            self._use_sequential(engine, str(failure))
            return
        except (msgspec.DecodeError, IndexError):
            self._use_sequential(engine, f"{engine} names no model at /v1/models")
            return
        if answer.status != 200:
            self._use_sequential(engine, f"{engine} answered {answer.status}: {error_message(answer.body)}")
            return
        params = transfer_params(answer.body)
        self.learn(engine, params)
        decodes = self._fleet.healthy("decode")
        if params is not None and decodes:
            try:
                await self._engines.ask(decodes[0], body.path, body.to_decode(params), headers)
            except LegFailedError as failure:
                logger.debug("the first push to %s: %s", decodes[0], failure)

    def learn(self, engine: Engine, params: msgspec.Raw | None) -> None:
        """Update ``engine.identity`` from P's own parameters. Afterwards it is correct, or None."""
        try:
            identity = Identity.from_params(None if params is None else msgspec.json.decode(params))
        except IdentityError as error:
            self._use_sequential(engine, f"{engine}: {error}")
            return
        known = engine.identity
        if engine.is_shared or known == identity:
            return
        if known is not None and identity in engine.former:
            engine.is_shared = True
            self._use_sequential(
                engine,
                f"{engine} is {identity.engine_id} again, and was {known.engine_id}: several engines answer at this "
                "URL; give each an API server and a --prefill of its own",
            )
            return
        engine.identity = identity
        engine.former.add(identity)
        self._last_warning.pop(engine, None)
        logger.info("%s is %s: P and D are asked at the same time", engine, identity)
        if identity.host.startswith(LOOPBACK) and not (urlsplit(engine.url).hostname or "").startswith(LOOPBACK):
            logger.warning(
                "%s reports %s as its address, which for decode engines is their own machine: set "
                "VLLM_NIXL_SIDE_CHANNEL_HOST to its address",
                engine,
                identity.host,
            )

    def _use_sequential(self, engine: Engine, reason: str) -> None:
        """Log the reason, unless it is the same as the engine's last one."""
        engine.identity = None
        if self._last_warning.get(engine) != reason:
            self._last_warning[engine] = reason
            logger.warning("%s. Sequential dispatch for this engine: D is asked after it has answered", reason)
