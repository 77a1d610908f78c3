"""The parts without sockets: engines, bodies, events, identities, settings."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import typer

from layerpush.apps.proxy.body import MAX_KEYS, BodyError, RequestBody
from layerpush.apps.proxy.engines import FAILED_CHECKS, Engine, Fleet
from layerpush.apps.proxy.errors import error_body, error_event, error_message
from layerpush.apps.proxy.identity import Identity, IdentityError
from layerpush.apps.proxy.legs import LegFailedError, _check_first
from layerpush.apps.proxy.settings import Policy, Settings, engine_url

PARAMS = {"remote_engine_id": "p", "remote_host": "h", "remote_port": 5600, "tp_size": 2, "pp_size": 3}


class TestEngines:
    def fleet(self, policy: Policy, *requests: int) -> Fleet:
        urls = [f"http://{index}.example" for index in range(len(requests))]
        fleet = Fleet(Settings(prefill=["http://p"], decode=urls, policy=policy))
        for engine, count in zip(list(fleet)[1:], requests, strict=True):
            engine.requests, engine.healthy = count, True
        return fleet

    def order(self, fleet: Fleet, turns: int) -> list[int]:
        decodes = list(fleet)[1:]
        return [decodes.index(chosen) for _ in range(turns) if (chosen := fleet.pick("decode", (), ()))]

    def test_round_robin_visits_all_in_turn(self) -> None:
        assert self.order(self.fleet("round_robin", 9, 0, 5), 7) == [0, 1, 2, 0, 1, 2, 0]

    def test_the_least_loaded_is_chosen_and_equals_take_turns(self) -> None:
        assert self.order(self.fleet("least_loaded", 30, 10, 20), 2) == [1, 1]
        assert self.order(self.fleet("least_loaded", 5, 9, 5), 3) == [0, 2, 2]

    def test_a_spare_engine_is_chosen_only_if_there_is_no_other(self) -> None:
        fleet = self.fleet("least_loaded", 0, 9)
        _, first, second = fleet
        assert fleet.pick("decode", (), (first,)) is second
        assert fleet.pick("decode", (second,), (first,)) is first
        assert fleet.pick("decode", (first, second), ()) is None
        second.lost("gone")
        assert fleet.pick("decode", (first,), ()) is second
        second.failed("gone", is_gone=True)
        assert fleet.pick("decode", (first,), ()) is None


class TestBodies:
    def body(self, endpoint: Any = "completions", **fields: Any) -> RequestBody:
        return RequestBody(endpoint, json.dumps(fields).encode())

    def test_d_gets_every_byte_of_the_clients_body(self) -> None:
        raw = b'{"prompt": "\\u00e9\xc3\xa9",  "seed": 123456789012345678901234567890, "top_p":1.00, "x": {"y": [ 1 ]}}'
        sent = RequestBody("completions", raw).to_decode({"do_remote_prefill": True})
        for part in (b'"\\u00e9\xc3\xa9"', b"123456789012345678901234567890", b":1.00", b'{"y": [ 1 ]}'):
            assert part in sent
        assert json.loads(sent) == json.loads(raw) | {"kv_transfer_params": {"do_remote_prefill": True}}

    def test_p_gets_the_same_prompt_and_sampling_for_one_token(self) -> None:
        body = self.body(
            prompt="x",
            temperature=0.5,
            n=2,
            stop=["a"],
            max_tokens=9,
            min_tokens=5,
            stream=True,
            stream_options={},
            logprobs=3,
            echo=True,
        )
        assert json.loads(body.to_prefill({"do_remote_decode": True})) == {
            "prompt": "x",
            "temperature": 0.5,
            "n": 2,
            "stop": ["a"],
            "max_tokens": 1,
            "kv_transfer_params": {"do_remote_decode": True},
        }

    def test_without_params_nothing_is_added(self) -> None:
        assert json.loads(self.body(prompt="x", kv_transfer_params={"a": 1}).to_decode(None)) == {"prompt": "x"}

    @pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'"x"', b"null", b"\xff{}", b"[" * 100_000])
    def test_a_body_that_is_no_object_is_refused(self, raw: bytes) -> None:
        with pytest.raises(BodyError, match="the body must be a JSON object"):
            RequestBody("completions", raw)

    @pytest.mark.parametrize(
        ("fields", "reason"),
        [
            ({}, None),
            ({"use_beam_search": False, "prompt_logprobs": None, "echo": True, "logprobs": None}, None),
            ({"truncate_prompt_tokens": 100, "logprobs": 5, "n": 3}, None),
            ({"use_beam_search": True}, "use_beam_search"),
            ({"prompt_logprobs": 1}, "prompt_logprobs"),
            ({"prompt_logprobs": 0}, "prompt_logprobs"),
            ({"echo": True, "logprobs": 0}, "echo with logprobs"),
            ({"truncate_prompt_tokens": -1}, "truncate_prompt_tokens"),
            ({"truncate_prompt_tokens": "-1"}, "truncate_prompt_tokens"),
        ],
    )
    def test_fields_that_make_d_compute_the_prompt(self, fields: dict[str, Any], reason: str | None) -> None:
        assert self.body(prompt="x", **fields).is_for_d_alone == (reason is not None)

    @pytest.mark.parametrize(
        ("value", "streams"),
        [*((yes, True) for yes in (True, 1, "true", "on", "1")), *((no, False) for no in (False, None, 0, "off", "F"))],
    )
    def test_the_stream_field_has_the_engines_meaning(self, value: object, streams: bool) -> None:
        assert self.body(stream=value).streams == streams
        assert not self.body().streams

    def test_the_last_of_two_equal_keys_replaces_the_first(self) -> None:
        raw = b'{"prompt": "a", "kv_transfer_params": {"a": 1}, "prompt": "b", "kv_transfer\\u005fparams": {"b": 2}}'
        body = RequestBody("completions", raw)
        assert body.to_decode(None) == b'{"prompt":"b"}'
        assert body.to_prefill({}).count(b"kv_transfer") == 1

    @pytest.mark.parametrize(
        ("extra", "left"),
        [
            ({"kv_transfer_params": {"a": 1}, "b": 2}, {"b": 2}),
            ({"b": 2, "ec_transfer_params": {"a": 1}, "kv_transfer_params": 1}, {"b": 2}),
            ({"b": 2}, {"b": 2}),
            (None, None),
            ([1], [1]),
        ],
    )
    def test_vllm_xargs_cannot_carry_transfer_params(self, extra: object, left: object) -> None:
        assert json.loads(self.body(vllm_xargs=extra).to_decode(None)) == {"vllm_xargs": left}

    def test_other_transfer_params_are_dropped(self) -> None:
        body = self.body(prompt="x", ec_transfer_params={"h": {"peer_host": "10.6.6.6"}}, request_id="mine")
        assert json.loads(body.to_decode(None)) == {"prompt": "x"}
        assert json.loads(body.to_prefill({"a": 1})) == {"prompt": "x", "max_tokens": 1, "kv_transfer_params": {"a": 1}}

    @pytest.mark.parametrize("inner", [False, True])
    def test_an_object_with_too_many_keys_is_refused_before_its_end(self, inner: bool) -> None:
        def raw(keys: int, end: bytes) -> bytes:
            members = b",".join(b'"":0' for _ in range(keys))
            return b'{"vllm_xargs":{%b%b}' % (members, end) if inner else b"{%b%b" % (members, end)

        RequestBody("completions", raw(MAX_KEYS, b"}"))
        ending = b"}" if inner else b", no JSON"
        with pytest.raises(BodyError, match="has more than 1024 keys"):
            RequestBody("completions", raw(MAX_KEYS + 1, ending))

    def test_keys_with_invalid_utf8_are_refused(self) -> None:
        for key in (b"\xff", b"\xed\xa0\x80"):
            with pytest.raises(BodyError, match="UTF-8"):
                RequestBody("completions", b'{"prompt":"a","vllm_xargs":{"' + key + b'":1}}')


class TestEvents:
    @pytest.mark.parametrize(
        ("events", "code"),
        [
            (b'data: {"error": {"code": 400}}\n\n', None),
            (b'data: {"error": {"code": 429}}\n\n', 429),
            (b'data: {"error": {"code": 503}}\n\n', 503),
            (b': c\n\ndata:{"error": {"code": "x"}}\n\n', 500),
            (b'data: {"error": 5}\n\n', 500),
            (b'data: {"error"' + b":[" * 100_000 + b"\n\n", 500),
            (b'data: {"choices": []}\r\n\r\ndata: {"error": {"code": 500}}\n\n', None),
            (b'data: {"choices": [{"text": "data: {\\"error\\": {\\"code\\": 500}}"}]}\n\n', None),
            (b"data: [DONE]\n\n", None),
            (b': {"error": 5}\n\ndata: 1\n\n', None),
        ],
    )
    def test_a_stream_may_begin_with_an_engines_failure(self, events: bytes, code: int | None) -> None:
        if code is None:
            _check_first(Engine("decode", "http://d"), events)
            return
        with pytest.raises(LegFailedError, match=f"failed with code {code}"):
            _check_first(Engine("decode", "http://d"), events)

    def test_an_error_event_can_be_read_back(self) -> None:
        event = error_event(504, 'late "x"')
        assert event.endswith(b"\n\ndata: [DONE]\n\n")
        assert error_message(event) == error_message(error_body(504, 'late "x"')) == 'late "x"'

    @pytest.mark.parametrize("answer", [b"", b"\xff", b"{", b'{"error": 1}', b"a\nb" * 1000, b"\x1b[2J"])
    def test_other_error_bodies_give_a_short_printable_message(self, answer: bytes) -> None:
        assert 0 < len(error_message(answer)) <= 500
        assert error_message(answer).isprintable()


class TestIdentities:
    def test_an_identity_from_ps_answer(self) -> None:
        identity = Identity.from_params(PARAMS | {"remote_block_ids": [1], "remote_request_id": "r"})
        assert identity == Identity("p", "h", 5600, 2, 3, 1)
        assert identity.to_decode("cmpl-1-0") == {
            **PARAMS,
            "dcp_size": 1,
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_request_id": "cmpl-1-0",
        }

    @pytest.mark.parametrize(
        ("params", "message"),
        [
            (None, '"kv_role": "kv_producer"'),
            ({}, "remote_engine_id"),
            (PARAMS | {"remote_port": "5600"}, "remote_port"),
            (PARAMS | {"tp_size": 0}, "tp_size"),
            (PARAMS | {"transfer_mode": "pull"}, "transfer_mode"),
            (PARAMS | {"remote_host": "a b"}, "remote_host"),
        ],
    )
    def test_bad_identities(self, params: object, message: str) -> None:
        with pytest.raises(IdentityError, match=message):
            Identity.from_params(params)


class TestSettings:
    @pytest.mark.parametrize(
        ("given", "url"),
        [("http://a:1/", "http://a:1"), ("https://[::1]:2", "https://[::1]:2"), ("http://h", "http://h")],
    )
    def test_urls(self, given: str, url: str) -> None:
        assert engine_url(given) == url

    @pytest.mark.parametrize(
        "url",
        [
            *("a:1", "", "ftp://a", "http://", "http://a:x", "http://a:99999", "http://a/v1", "http://u@a"),
            *("http://a?b", "http://h\0:1", "http://a b:1", "http://a\nb:1", "http://a:1\n", "http://a;b"),
            *("http://0x7f.1:1", "http://[fe80::1%eth0]:1", "http://[x]:1"),
        ],
    )
    def test_bad_urls(self, url: str) -> None:
        with pytest.raises(typer.BadParameter, match="write"):
            engine_url(url)


class TestHealth:
    def test_several_failed_checks_take_an_engine_out_of_service_and_one_brings_it_back(self) -> None:
        engine = Engine("prefill", "http://p")
        assert not engine.healthy
        engine.passed()
        for _ in range(FAILED_CHECKS - 1):
            engine.failed("x", is_gone=False)
        assert engine.healthy
        engine.failed("y", is_gone=False)
        assert (engine.healthy, engine.problem) == (False, "y")
        engine.passed()
        assert engine.healthy

    @pytest.mark.parametrize("end", [lambda each: each.lost("gone"), lambda each: each.failed("gone", is_gone=True)])
    def test_an_identity_ends_with_its_process(self, end: Callable[[Engine], None]) -> None:
        engine = Engine("prefill", "http://p")
        engine.passed()
        engine.identity = Identity("p", "h", 1, 1)
        engine.failed("slow", is_gone=False)
        assert engine.identity is not None
        end(engine)
        assert (engine.healthy, engine.identity, engine.is_asked) == (False, None, False)
