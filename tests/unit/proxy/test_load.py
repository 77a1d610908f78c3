"""Many streams at once."""

from __future__ import annotations

import asyncio
import random

from tests.unit.proxy.world import Reply, asynchronous, until, world

STREAMS = 250


@asynchronous
async def test_many_streams_with_faults_and_disconnects() -> None:
    random.seed(1)
    async with world(prefills=3, decodes=3, retries=5) as here:
        for stub in here.prefill + here.decode:
            for _ in range(5):
                stub.faults.append(random.choice(["drop", "500", "429"]))
        for decode in here.decode:
            decode.hold = asyncio.Event()
        requests = [asyncio.create_task(here.post(prompt=f"prompt {index}", stream=True)) for index in range(STREAMS)]
        await until(lambda: sum(each.active for each in here.decode) > STREAMS / 2, "many are under way")
        leaving = random.sample(requests, 50)
        for request in leaving:
            request.cancel()
        for decode in here.decode:
            assert decode.hold is not None
            decode.hold.set()
        replies = await asyncio.gather(*requests, return_exceptions=True)
        answered = [reply for reply in replies if isinstance(reply, Reply) and reply.status == 200]
        assert len(answered) >= STREAMS - len(leaving) - 5
        assert all(reply.body.endswith(b"data: [DONE]\n\n") for reply in answered)
        sent = {bytes(raw) for decode in here.decode for raw in decode.sent.values()}
        assert {reply.body for reply in answered} <= sent
        stubs = here.prefill + here.decode
        await until(lambda: not any(stub.active for stub in stubs), "no engine works for anybody")
        await until(lambda: here.proxy.requests == 0, "all places are free")
        assert not any(each.requests for each in here.engines)
