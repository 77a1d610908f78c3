"""The requests to each engine, and their order."""

from __future__ import annotations

import asyncio
import json
import uuid

import pytest

from layerpush.apps.proxy import attempt
from tests.unit.proxy.world import asynchronous, until, world


@asynchronous
async def test_p_and_d_get_the_request_at_the_same_time_with_one_id() -> None:
    async with world() as here:
        here.p.hold = asyncio.Event()
        request = asyncio.create_task(here.post())
        await until(lambda: here.p.seen and here.d.seen, "both engines have it before either answers")
        here.p.hold.set()
        assert (await request).status == 200
        (at_p,), (at_d,) = here.p.seen, here.d.seen
        assert at_p.request_id == at_d.request_id
        uuid.UUID(at_p.request_id)
        assert at_p.params == {"do_remote_decode": True, "do_remote_prefill": False}
        assert at_d.params == {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": "p0",
            "remote_request_id": f"cmpl-{at_p.request_id}-0",
            "remote_host": "127.0.0.1",
            "remote_port": 5600,
            "tp_size": 1,
            "pp_size": 1,
            "dcp_size": 1,
        }
        assert at_p.body["max_tokens"] == 1
        assert at_d.body["max_tokens"] == 4


@asynchronous
async def test_requests_are_counted_while_an_engine_works() -> None:
    async with world() as here:
        here.p.hold, here.d.hold = asyncio.Event(), asyncio.Event()
        request = asyncio.create_task(here.post())
        await until(lambda: here.p.seen and here.d.seen, "both engines have it")
        assert json.loads((await here.get("/health")).body) == {"requests": 1, "retries": 0}
        prefill, decode = here.engines
        assert (prefill.requests, decode.requests) == (1, 1)
        here.p.hold.set()
        await until(lambda: prefill.requests == 0, "P has nothing to do")
        assert decode.requests == 1
        here.d.hold.set()
        assert (await request).status == 200
        await until(lambda: not decode.requests, "nobody has")


@asynchronous
async def test_chat_ids_and_limits() -> None:
    async with world() as here:
        reply = await here.post("/v1/chat/completions", max_completion_tokens=7)
        assert reply.status == 200
        (at_p,), (at_d,) = here.p.seen, here.d.seen
        assert at_d.params["remote_request_id"] == f"chatcmpl-{at_p.request_id}"
        assert at_p.body["max_completion_tokens"] == at_p.body["max_tokens"] == 1
        assert at_d.body["max_completion_tokens"] == 7


@asynchronous
async def test_fields_of_routers_are_removed_from_clients_requests() -> None:
    async with world() as here:
        reply = await here.post(
            headers={"X-Request-Id": "mine", "X-data-parallel-rank": "3", "Authorization": "Bearer k", "Cookie": "c"},
            kv_transfer_params={"do_remote_prefill": True, "remote_host": "10.6.6.6"},
            ec_transfer_params={"h": {"peer_host": "10.6.6.6"}},
            request_id="mine",
        )
        assert reply.status == 200
        for seen in (*here.p.seen, *here.d.seen):
            assert seen.request_id != "mine"
            assert "request_id" not in seen.body
            assert "ec_transfer_params" not in seen.body
            assert "X-data-parallel-rank" not in seen.headers
            assert "Cookie" not in seen.headers
            assert seen.headers["Accept-Encoding"] == "identity"
            assert seen.headers["Authorization"] == "Bearer k"
            assert seen.params.get("remote_host") != "10.6.6.6"


@asynchronous
async def test_dispatch_is_sequential_if_ps_identity_cannot_be_known(caplog: pytest.LogCaptureFixture) -> None:
    async with world(p0={"params_override": {"transfer_mode": "pull"}}) as here:
        here.p.hold = asyncio.Event()
        request = asyncio.create_task(here.post())
        await until(lambda: here.p.seen, "P has it")
        assert not here.d.seen
        here.p.hold.set()
        assert (await request).status == 200
        (at_p,), (at_d,) = here.p.seen, here.d.seen
        assert at_d.request_id == at_p.request_id
        assert at_d.params["remote_block_ids"] == [[1, 2]]
        assert at_d.params["remote_num_tokens"] == 4
        assert at_d.params["remote_request_id"] == f"cmpl-{at_p.request_id}-0-suffix"
        assert at_d.params["transfer_mode"] == "pull"
        assert (await here.post()).status == 200
        assert len(here.p.probes) == 1, "P is not asked again"
    (line,) = [record.message for record in caplog.records if "Sequential dispatch" in record.message]
    assert "transfer_mode" in line


@asynchronous
async def test_the_error_names_a_p_without_a_connector(caplog: pytest.LogCaptureFixture) -> None:
    async with world(p0={"has_connector": False}) as here:
        reply = await here.post()
        assert reply.status == 502
        assert b"no KV connector" in reply.body
        assert not here.d.seen
    assert any('"kv_role": "kv_producer"' in record.message for record in caplog.records)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@asynchronous
async def test_a_probe_gets_ps_identity_before_the_first_request(path: str) -> None:
    async with world() as here:
        headers = {"Authorization": "Bearer secret", "traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}
        replies = await asyncio.gather(*(here.post(path, headers, model="m") for _ in range(3)))
        assert [reply.status for reply in replies] == [200] * 3
        (probe,), (delivered,) = here.p.probes, here.d.probes
        assert probe.path == delivered.path == "/v1/completions"
        assert probe.headers["Authorization"] == delivered.headers["Authorization"] == "Bearer secret"
        assert "traceparent" not in {*probe.headers, *delivered.headers}, "it is no part of a client's trace"
        assert all("traceparent" in each.headers for each in here.p.seen + here.d.seen)
        assert probe.request_id == delivered.request_id
        assert (probe.body["model"], probe.body["max_tokens"]) == ("m", 1)
        assert delivered.body["prompt"] == probe.body["prompt"]
        assert delivered.params["remote_block_ids"] == [[1, 2]]
        assert all(each.params["remote_engine_id"] == "p0" for each in here.d.seen)
        assert not any("remote_block_ids" in each.params for each in here.d.seen), "dispatch is concurrent"


@asynchronous
async def test_a_refused_probe_is_sent_again(caplog: pytest.LogCaptureFixture) -> None:
    """The first client's key or model may be a wrong one."""
    async with world() as here:
        here.p.probe_status = 401
        assert (await here.post()).status == 200
        here.p.probe_status = 200
        prefill, _ = here.engines
        prefill.identity = None  # P's answer to the request had it, too
        assert (await here.post()).status == 200
        assert len(here.p.probes) == 2
        assert "remote_block_ids" not in here.d.seen[-1].params
    assert any("answered 401" in record.message for record in caplog.records)


@asynchronous
async def test_after_an_undetected_restart_d_is_asked_again() -> None:
    async with world() as here:
        assert (await here.post()).status == 200
        await here.p.restart("p0-reborn")
        here.p.side_channel = 5700
        reply = await here.post()
        assert reply.status == 200
        at_p, at_d = here.p.seen[-1], here.d.seen[-1]
        assert (at_d.params["remote_engine_id"], at_d.params["remote_port"]) == ("p0-reborn", 5700)
        assert at_d.params["remote_request_id"] == f"cmpl-{at_p.request_id}-0-suffix"
        assert at_d.request_id != here.d.seen[-2].request_id
        assert (len(here.p.seen), here.d.cancelled, here.proxy.retries) == (2, 1, 0)
        before = len(here.d.seen)
        assert (await here.post()).status == 200
        assert len(here.d.seen) == before + 1


@asynchronous
async def test_all_requests_find_an_undetected_restart() -> None:
    """The first answer changes the identity. The other requests began with the old one."""
    async with world() as here:
        assert (await here.post()).status == 200
        await here.p.restart("p0-reborn")
        here.p.hold = asyncio.Event()
        requests = [asyncio.create_task(here.post()) for _ in range(3)]
        await until(lambda: here.p.active == 3, "P has all")
        here.p.hold.set()
        assert [(await request).status for request in requests] == [200] * 3


@asynchronous
async def test_a_detected_restart_is_followed_by_a_probe() -> None:
    async with world() as here:
        assert (await here.post()).status == 200
        await here.p.stop()
        assert (await here.post()).status == 503
        here.p.engine_id = "p0-reborn"
        await here.p.start()
        before = len(here.d.seen)
        assert (await here.post()).status == 200
        assert len(here.p.probes) == 2
        (at_d,) = here.d.seen[before:]
        assert at_d.params["remote_engine_id"] == "p0-reborn"


@asynchronous
async def test_dispatch_to_a_busy_p_is_sequential_until_its_identity_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt, "IDENTITY_S", 0.1)
    held = asyncio.Event()
    async with world(p0={"hold_probes": held}) as here:
        here.p.hold = asyncio.Event()
        request = asyncio.create_task(here.post())
        await until(lambda: here.p.seen, "P has it")
        assert not here.d.seen, "dispatch is sequential"
        prefill, _ = here.engines
        assert len(here.p.probes) == 1
        held.set()
        await until(lambda: prefill.identity, "P has reported its identity")
        assert len(here.p.probes) == 1
        here.p.hold.set()
        assert (await request).status == 200


@asynchronous
async def test_several_engines_at_one_url_answer_in_turn() -> None:
    """Behind a load balancer, the next answer may come from another engine."""
    async with world() as here:
        for index in range(6):
            here.p.params_override = {"remote_engine_id": f"p{index % 2}"}
            here.network.engines = {f"p{index % 2}"}
            assert (await here.post()).status == 200
            assert here.d.seen[-1].params["remote_engine_id"] == f"p{index % 2}"
        assert (len(here.p.seen), here.proxy.retries) == (6, 0)


@asynchronous
async def test_the_model_list_is_ds() -> None:
    async with world(decodes=2) as here:
        reply = await here.get("/v1/models")
        assert reply.status == 200
        assert json.loads(reply.body)["data"][0]["by"] == "d0"
        await here.decode[0].stop()
        reply = await here.get("/v1/models")
        assert json.loads(reply.body)["data"][0]["by"] == "d1"
        await here.decode[1].stop()
        assert (await here.get("/v1/models")).status == 503
