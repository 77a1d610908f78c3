"""The parts without sockets: engines, bodies, events, identities, settings."""

from __future__ import annotations

import json
from typing import Any

import pytest
import typer

from layerpush.apps.proxy.body import COMPLETIONS, MAX_KEYS, RequestBody
from layerpush.apps.proxy.engines import REST_S, Engine, Pool
from layerpush.apps.proxy.errors import MESSAGE_CHARS, ProxyError, shortened
from layerpush.apps.proxy.legs import LegFailedError, _check_first
from layerpush.apps.proxy.settings import engine_url
from layerpush.core.prefill_identity import IdentityError, PrefillIdentity

PARAMS = {"remote_engine_id": "p", "remote_host": "h", "remote_port": 5600, "tp_size": 2, "pp_size": 3}


class TestEngines:
    def pool(self, *requests: int) -> Pool:
        pool = Pool("decode", [f"http://{index}.example" for index in range(len(requests))])
        for engine, count in zip(pool.engines, requests, strict=True):
            engine.requests = count
        return pool

    def order(self, pool: Pool, turns: int) -> list[int]:
        return [pool.engines.index(pool.pick((), 0.0)) for _ in range(turns)]

    def test_the_least_loaded_is_chosen_and_equals_take_turns(self) -> None:
        assert self.order(self.pool(30, 10, 20), 2) == [1, 1]
        assert self.order(self.pool(5, 9, 5), 3) == [0, 2, 2]

    def test_a_suspect_or_resting_engine_is_chosen_only_if_there_is_no_other(self) -> None:
        pool = self.pool(0, 9)
        first, second = pool.engines
        assert pool.pick((first,), 0.0) is second
        second.gone(1.0)
        assert pool.pick((), 1.0 + REST_S / 2) is first
        assert pool.pick((first,), 1.0 + REST_S / 2) is second
        first.requests = 10
        assert pool.pick((), 1.0 + REST_S) is second

    def test_an_identity_ends_with_its_process(self) -> None:
        engine = Engine("prefill", "http://p", asked_at=1.0)
        engine.identity = PrefillIdentity("p", "h", 1, 1)
        engine.gone(2.0)
        assert (engine.identity, engine.asked_at) == (None, None)


class TestBodies:
    def body(self, path: str = COMPLETIONS, **fields: Any) -> RequestBody:
        return RequestBody(path, json.dumps(fields).encode())

    def test_d_gets_every_byte_of_the_clients_body(self) -> None:
        raw = b'{"prompt": "\\u00e9\xc3\xa9",  "seed": 123456789012345678901234567890, "top_p":1.00, "x": {"y": [ 1 ]}}'
        sent = RequestBody(COMPLETIONS, raw).to_decode({"do_remote_prefill": True})
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
            prompt_logprobs=1,
            use_beam_search=True,
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

    @pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'"x"', b"null", b'{"\xff": 1}', b"[" * 100_000])
    def test_a_body_that_is_no_object_is_refused(self, raw: bytes) -> None:
        with pytest.raises(ProxyError, match="the body must be a JSON object") as refused:
            RequestBody(COMPLETIONS, raw)
        assert refused.value.status == 400

    def test_the_last_of_two_equal_keys_replaces_the_first(self) -> None:
        raw = b'{"prompt": "a", "kv_transfer_params": {"a": 1}, "prompt": "b", "kv_transfer\\u005fparams": {"b": 2}}'
        body = RequestBody(COMPLETIONS, raw)
        assert body.to_decode({}) == b'{"prompt":"b","kv_transfer_params":{}}'
        assert body.to_prefill({}).count(b"kv_transfer") == 1

    def test_other_transfer_params_are_dropped(self) -> None:
        body = self.body(prompt="x", ec_transfer_params={"h": {"peer_host": "10.6.6.6"}}, request_id="mine")
        assert json.loads(body.to_decode({"a": 1})) == {"prompt": "x", "kv_transfer_params": {"a": 1}}
        assert json.loads(body.to_prefill({"a": 1})) == {"prompt": "x", "max_tokens": 1, "kv_transfer_params": {"a": 1}}

    def test_an_object_with_too_many_keys_is_refused_before_its_end(self) -> None:
        def raw(keys: int, end: bytes) -> bytes:
            return b"{%b%b" % (b",".join(b'"":0' for _ in range(keys)), end)

        RequestBody(COMPLETIONS, raw(MAX_KEYS, b"}"))
        with pytest.raises(ProxyError, match="has more than 1024 keys"):
            RequestBody(COMPLETIONS, raw(MAX_KEYS + 1, b", no JSON"))


class TestEvents:
    @pytest.mark.parametrize(
        ("events", "code"),
        [
            (b'data: {"error": {"code": 400}}\n\n', None),
            (b'data: {"error": {"code": 429}}\n\n', 429),
            (b'data: {"error": {"code": 503}}\n\n', 503),
            (b': c\n\ndata:{"error": {"code": "500"}}\n\n', 500),
            (b'data: {"error": {"code": "x"}}\n\n', None),
            (b'data: {"error": 5}\n\n', None),
            (b'data: {"error"' + b":[" * 100_000 + b"\n\n", None),
            (b"data: 5\n\n", None),
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

    @pytest.mark.parametrize("text", [b"", b"\xff", b"a\nb" * 1000, b"\x1b[2J", "x\u202ey" * 1000])
    def test_text_of_engines_becomes_short_and_printable(self, text: str | bytes) -> None:
        assert 0 < len(shortened(text)) <= MESSAGE_CHARS
        assert shortened(text).isprintable()


class TestIdentities:
    def test_an_identity_from_ps_answer(self) -> None:
        identity = PrefillIdentity.from_params(PARAMS | {"remote_block_ids": [1], "remote_request_id": "r"})
        assert identity == PrefillIdentity("p", "h", 5600, 2, 3, 1)
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
            PrefillIdentity.from_params(params)


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
