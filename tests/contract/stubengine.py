"""An engine without a model that answers at once, as P and as D. ``python -m tests.contract.stubengine --port PORT``.

Each token of an answer is ``--word`` and its number; an answer has ``max_tokens`` of them.
"""

from __future__ import annotations

import argparse
import json

from aiohttp import web

WORD = web.AppKey("word", str)


async def health(_: web.Request) -> web.Response:
    return web.Response()


async def models(_: web.Request) -> web.Response:
    return web.json_response({"data": [{"id": "stub", "root": "stub"}]})


async def completions(request: web.Request) -> web.StreamResponse:
    body = json.loads(await request.read())
    if (body.get("kv_transfer_params") or {}).get("do_remote_decode"):
        identity = {"remote_engine_id": "p", "remote_host": "127.0.0.1", "remote_port": 5600, "tp_size": 1}
        return web.json_response({"kv_transfer_params": identity})
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    response.enable_chunked_encoding()
    word = request.app[WORD]
    await response.prepare(request)
    for index in range(body["max_tokens"]):
        event = {"id": "cmpl-0", "object": "text_completion", "choices": [{"index": 0, "text": f" {word}{index}"}]}
        await response.write(f"data: {json.dumps(event)}\n\n".encode())
    await response.write(b"data: [DONE]\n\n")
    return response


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--word", default="token")
    arguments = parser.parse_args()
    app = web.Application(client_max_size=1 << 30)
    app[WORD] = arguments.word
    app.add_routes(
        [
            web.get("/health", health),
            web.get("/v1/models", models),
            web.post("/v1/completions", completions),
        ]
    )
    web.run_app(app, host="127.0.0.1", port=arguments.port, print=None, access_log=None)


if __name__ == "__main__":
    main()
