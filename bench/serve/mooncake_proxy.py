"""``layerpush proxy`` in front of P and D with vLLM's Mooncake connector: the same program with other parameters.

``python -m bench.serve.mooncake_proxy ENGINE_ID BOOTSTRAP_URL [option of layerpush proxy ...]``: those of P.
"""

from __future__ import annotations

import asyncio
import dataclasses
import sys
import uuid

from layerpush.apps.cli import app
from layerpush.apps.proxy import proxy
from layerpush.apps.proxy.attempt import Answer, Attempt
from layerpush.apps.proxy.legs import end
from layerpush.core.prefill_identity import TO_PREFILL

ENGINE_ID, BOOTSTRAP_URL = sys.argv[1:3] if __name__ == "__main__" else ("", "")


class MooncakeAttempt(Attempt):
    """Asks P and D at the same time from the first request on. Mooncake pairs them by their ``transfer_id``."""

    async def send(self) -> Answer:
        """As ``Attempt.send``. P's refusal is the answer."""
        transfer = {"transfer_id": str(uuid.uuid4())}
        to_decode = {"do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": ENGINE_ID}
        at_p = dataclasses.replace(self, to_prefill={**TO_PREFILL, **transfer})
        prefill = asyncio.create_task(at_p._ask_p(transfer["transfer_id"]))
        params = {**to_decode, **transfer, "remote_bootstrap_addr": BOOTSTRAP_URL}
        decode = asyncio.create_task(self._ask_d(transfer["transfer_id"], params))
        try:
            await asyncio.wait((prefill, decode), return_when=asyncio.FIRST_COMPLETED)
            if not decode.done() and (prefilled := prefill.result()).status != 200:
                await end(decode)
                return Answer(prefilled)
            return Answer(await decode, prefill)
        except BaseException:  # also if the client has left: end both legs
            await end(prefill, decode)
            raise


if __name__ == "__main__":
    proxy.Attempt = MooncakeAttempt  # type: ignore[attr-defined]
    app(["proxy", *sys.argv[3:]])
