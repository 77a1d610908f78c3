"""What the front end reports of the requests that it refuses. tests/e2e/test_endpoints.py has the servers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.entrypoints.serve.engine.protocol import ErrorInfo, ErrorResponse

from layerpush.compat.refusals import (
    MOST,
    reporting_bodies,
    reporting_invalid_bodies,
    reporting_requests,
    reporting_tokens,
)

TO_P = {"do_remote_decode": True, "do_remote_prefill": False}
TO_D = {"do_remote_prefill": True, "remote_request_id": "cmpl-x-0"}
ERROR = ErrorResponse(error=ErrorInfo(message="too long", type="BadRequestError", code=400))


class Client:
    """vLLM's client of the engine: notes what is reported."""

    errored = False

    def __init__(self, connector: str = "LayerwisePushConnector") -> None:
        transfer = SimpleNamespace(kv_connector=connector, kv_role="kv_both", kv_connector_extra_config={})
        self.vllm_config = SimpleNamespace(kv_transfer_config=transfer)
        self.reported: dict[str, Mapping[str, Any]] = {}
        self.ranks: set[int | None] = set()

    async def notify_kv_transfer_request_rejected(
        self, request_id: str, params: dict[str, Any], *, data_parallel_rank: int | None = None
    ) -> None:
        name, _, suffix = request_id.rpartition("-")
        assert len(suffix) == 8, "as vLLM's names of requests"
        assert name not in self.reported, "reported twice"
        self.reported[name] = params
        self.ranks.add(data_parallel_rank)


class Serving:
    def __init__(self, client: Client) -> None:
        self.engine_client = client

    def _get_data_parallel_rank(self, _: Any) -> int:
        return 3


def answers(client: Client, body: Mapping[str, Any], said: Any = ERROR, request_id: str = "x") -> Any:
    """A server answers a body: with what ``said`` returns or raises, or with it."""

    async def vllms(_: Any, awaitable: Any, __: Any, ___: Any) -> Any:
        return await awaitable

    async def answer() -> Any:
        return said() if callable(said) else said

    request, raw = SimpleNamespace(**body), SimpleNamespace(headers={"X-Request-Id": request_id})
    return asyncio.run(reporting_bodies(vllms)(Serving(client), answer(), request, raw))


BODIES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "a text": ({"prompt": "a b"}, ["cmpl-x-0"]),
    "tokens": ({"prompt": [1, 2]}, ["cmpl-x-0"]),
    "two prompts": ({"prompt": ["a", "b"]}, ["cmpl-x-0", "cmpl-x-1"]),
    "two answers": ({"prompt": "a", "n": 2}, ["0_cmpl-x-0", "1_cmpl-x-0"]),
    "a chat": ({"messages": [], "n": 1}, ["chatcmpl-x"]),
    "a response": ({"input": "a", "prompt": None, "request_id": "resp_y"}, ["resp_y_0"]),
    "tokens for tokens": (
        {"token_ids": [1], "sampling_params": {"n": 2}},
        ["0_generate-tokens-x", "1_generate-tokens-x"],
    ),
    "a flood": ({"prompt": ["a"] * 10_000, "n": 10_000}, [f"{n}_cmpl-x-0" for n in range(MOST)]),
}


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("refused", ["the server", "its reading"])
def test_all_requests_of_a_refused_body_are_reported(body: str, refused: str) -> None:
    client, (asked, names) = Client(), BODIES[body]
    asked = asked | {"kv_transfer_params": TO_D}
    if refused == "the server":
        assert answers(client, asked) is ERROR
        assert client.ranks == {3}
    else:

        async def vllms(_: Any, __: Any) -> int:
            return 400

        state = SimpleNamespace(engine_client=client)
        raw = SimpleNamespace(app=SimpleNamespace(state=state), headers={"X-Request-Id": "x"})
        assert asyncio.run(reporting_invalid_bodies(vllms)(raw, SimpleNamespace(body=asked))) == 400
    assert list(client.reported) == names
    assert all(params == TO_D for params in client.reported.values())


@pytest.mark.parametrize("error", [ValueError, asyncio.CancelledError])
def test_a_request_that_never_came_is_reported_after_any_end(error: type[BaseException]) -> None:
    def fail() -> None:
        raise error

    client = Client()
    with pytest.raises(error):
        answers(client, {"prompt": "a", "kv_transfer_params": TO_P}, fail)
    assert client.reported == {"cmpl-x-0": TO_P}


def test_p_s_own_params_are_not_repeated() -> None:
    """They may be what is refused, or name a turn that D is to keep."""
    client, bad = Client(), {"layerpush_mode": "fast", "remote_request_id": "turn", "transfer_id": "t"}
    answers(client, {"prompt": "a", "kv_transfer_params": TO_P | bad})
    answers(client, {"prompt": "a", "kv_transfer_params": TO_P | {"transfer_id": 5}}, request_id="y")
    assert client.reported == {"cmpl-x-0": TO_P | {"transfer_id": "t"}, "cmpl-y-0": TO_P}


@pytest.mark.parametrize("params", [None, "text", {}, {"do_remote_prefill": "yes"}])
def test_a_body_without_a_transfer_is_vllms(params: object) -> None:
    client = Client()
    assert answers(client, {"prompt": "a", "kv_transfer_params": params}) is ERROR
    assert client.reported == {}


def test_another_connectors_body_is_vllms() -> None:
    client = Client("NixlPushConnector")
    assert answers(client, {"prompt": "a", "kv_transfer_params": TO_P}) is ERROR
    assert client.reported == {}


def add(client: Client, request_id: str, transfer: object, *, admits: bool, n: int = 1) -> str:
    async def vllms(_: Any, name: str, *__: Any, **___: Any) -> str:
        if not admits:
            raise ValueError("a bad regex")
        return name

    params = SimpleNamespace(n=n, extra_args={"kv_transfer_params": transfer})

    async def call() -> str:
        return str(await reporting_requests(vllms)(client, request_id, "prompt", params, data_parallel_rank=1))

    return asyncio.run(call())


@pytest.mark.parametrize("transfer", [TO_P, TO_D])
def test_a_request_that_the_engine_refuses_is_reported(transfer: dict[str, Any]) -> None:
    """A stream has begun by then, and other programs than vLLM's servers call the engine."""
    client = Client()
    with pytest.raises(ValueError, match="a bad regex"):
        add(client, "a", transfer, admits=False, n=2)
    assert client.reported == {"0_a": transfer, "1_a": transfer}
    assert client.ranks == {1}
    with pytest.raises(ValueError, match="a bad regex"):
        add(client, "b", None, admits=False)
    assert add(client, "c", transfer, admits=True) == "c"
    assert len(client.reported) == 2


@pytest.mark.parametrize("admits", [True, False])
def test_each_request_of_a_body_is_reported_once(admits: bool) -> None:
    """The engine has the first one, or has refused it. The second one never came."""
    client = Client()

    async def vllms(_: Any, awaitable: Any, __: Any, ___: Any) -> Any:
        return await awaitable

    async def plain_add(*_: Any, **__: Any) -> None:
        if not admits:
            raise ValueError("of the first")

    async def answer() -> Any:
        params = SimpleNamespace(n=1, extra_args={"kv_transfer_params": TO_D})
        await asyncio.create_task(reporting_requests(plain_add)(client, "cmpl-x-0", "prompt", params))
        raise ValueError("of the second")

    request = SimpleNamespace(prompt=["a", "b"], kv_transfer_params=TO_D)
    raw = SimpleNamespace(headers={"X-Request-Id": "x"})
    with pytest.raises(ValueError, match="of the"):
        asyncio.run(reporting_bodies(vllms)(Serving(client), answer(), request, raw))
    assert list(client.reported) == (["cmpl-x-1"] if admits else ["cmpl-x-0", "cmpl-x-1"])


def test_a_report_that_fails_changes_no_answer() -> None:
    client = Client()
    client.notify_kv_transfer_request_rejected = None  # type: ignore[assignment,method-assign]
    assert answers(client, {"prompt": ["a", "b"], "kv_transfer_params": TO_D}) is ERROR


def test_the_endpoint_of_tokens_reports_too() -> None:
    client = Client()

    class Tokens(Serving):
        async def _with_kv_transfer_rejection_cleanup(self, *args: Any) -> Any:
            return await reporting_bodies(lambda *_: None)(self, *args)

    async def vllms(*_: Any) -> Any:
        return ERROR

    request = SimpleNamespace(token_ids=[1], sampling_params=SimpleNamespace(n=1), kv_transfer_params=TO_P)
    raw = SimpleNamespace(headers={"X-Request-Id": "x"})
    assert asyncio.run(reporting_tokens(vllms)(Tokens(client), request, raw)) is ERROR
    assert list(client.reported) == ["generate-tokens-x"]
