"""The pure parts: policies, bodies, events, identities, settings."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, get_args

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from layerpush.apps.proxy import sse
from layerpush.apps.proxy.body import MAX_KEYS, BodyError, RequestBody
from layerpush.apps.proxy.errors import error_body, error_message
from layerpush.apps.proxy.identity import Identity, IdentityError
from layerpush.apps.proxy.instance import Instance
from layerpush.apps.proxy.policy import (
    FAIR_SHARE,
    SLACK_TOKENS,
    Policy,
    choose,
    least_outstanding_tokens,
    prefix_affinity,
    round_robin,
)
from layerpush.apps.proxy.settings import Settings, engine_url
from layerpush.apps.proxy.sse import BOUNDARIES, EventBuffer, EventTooLargeError, error_event, failure_in, has_data

PARAMS = {"remote_engine_id": "p", "remote_host": "h", "remote_port": 5600, "tp_size": 2, "pp_size": 3}


@dataclass
class Engine:
    url: str
    outstanding_tokens: int = 0


def engines(*tokens: int) -> list[Engine]:
    return [Engine(f"http://{index}", each) for index, each in enumerate(tokens)]


class TestPolicies:
    def test_round_robin_visits_all_in_turn(self) -> None:
        assert [round_robin(engines(9, 0, 5), turn) for turn in range(7)] == [0, 1, 2, 0, 1, 2, 0]

    def test_least_outstanding_tokens(self) -> None:
        assert least_outstanding_tokens(engines(30, 10, 20), 0) == 1

    def test_equally_loaded_engines_take_turns(self) -> None:
        assert [least_outstanding_tokens(engines(5, 9, 5), turn) for turn in range(3)] == [0, 2, 2]

    @given(st.binary(), st.integers(0, 100), st.integers(0, 100))
    def test_equal_prefixes_go_to_the_same_engine(self, prefix: bytes, turn: int, other: int) -> None:
        assert prefix_affinity(engines(0, 0, 0), turn, prefix) == prefix_affinity(engines(7, 3, 9), other, prefix)

    def test_prefixes_spread(self) -> None:
        counts = [0, 0, 0, 0]
        for index in range(1000):
            counts[prefix_affinity(engines(0, 0, 0, 0), 0, f"prompt {index}".encode())] += 1
        assert min(counts) > 150

    @given(st.binary(), st.integers(0, 2))
    def test_a_removed_engine_moves_only_its_own_prefixes(self, prefix: bytes, gone: int) -> None:
        every = engines(0, 0, 0)
        left = [each for index, each in enumerate(every) if index != gone]
        chosen = every[prefix_affinity(every, 0, prefix)]
        if chosen in left:
            assert left[prefix_affinity(left, 0, prefix)] == chosen

    def test_affinity_gives_way_to_load(self) -> None:
        first = prefix_affinity(engines(0, 0), 0, b"x")
        tokens = [0, 0]
        tokens[first] = int(SLACK_TOKENS / (1 - FAIR_SHARE / 2))
        assert prefix_affinity(engines(*tokens), 0, b"x") == first
        tokens[first] += 10
        assert prefix_affinity(engines(*tokens), 0, b"x") == 1 - first

    @given(
        st.sampled_from(get_args(Policy)),
        st.lists(st.integers(0, 10**6), min_size=1),
        st.integers(0, 10**6),
        st.binary(),
    )
    def test_every_policy_chooses_a_candidate(
        self, policy: Policy, tokens: list[int], turn: int, prefix: bytes
    ) -> None:
        assert 0 <= choose(policy, engines(*tokens), turn, prefix) < len(tokens)


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
        assert self.body(prompt="x", **fields).alone == reason

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

    def test_prompt_and_answer_tokens_are_estimated(self) -> None:
        assert self.body(prompt=[1, 2, 3]).prompt_tokens == 3
        assert self.body(prompt=[[1, 2], [3, 4]]).prompt_tokens == 4
        assert self.body(prompt="x" * 398).prompt_tokens == 100
        assert self.body("chat/completions", messages=[{"role": "user", "content": "x" * 400}]).prompt_tokens > 100
        assert self.body().prompt_tokens == 1
        assert self.body(max_tokens=7).answer_tokens == 7
        assert self.body(max_tokens=7, max_completion_tokens=8).answer_tokens == 8
        assert self.body(max_tokens=-1).answer_tokens == self.body(max_tokens=None).answer_tokens > 0

    def test_the_prefix_depends_only_on_the_prompt(self) -> None:
        assert self.body(seed=1, prompt="abc").prefix == self.body(seed=2, prompt="abc").prefix == b'"abc"'


class TestEvents:
    @given(st.lists(st.sampled_from([b"data: x\n\n", b"data", b"\n", b"\r\n", b": c\n\n", b"\xc3", b""])))
    def test_the_output_has_all_bytes_and_only_whole_events(self, pieces: list[bytes]) -> None:
        buffer = EventBuffer()
        out = [buffer.add(piece) for piece in pieces]
        assert b"".join(out) + buffer.rest() == b"".join(pieces)
        assert all(each.endswith(BOUNDARIES) for each in out if each)
        assert buffer.rest() == b""

    def test_a_whole_event_is_passed_on_at_once(self) -> None:
        buffer = EventBuffer()
        assert buffer.add(b"data: 1\n") == b""
        assert buffer.add(b"\nda") == b"data: 1\n\n"
        assert buffer.add(b"ta: 2\n\n") == b"data: 2\n\n"

    def test_lines_may_end_in_carriage_return_and_newline(self) -> None:
        buffer = EventBuffer()
        pieces = [b"data: 1\r", b"\n\r", b"\ndata: 2\r\n", b"\r\ndata"]
        assert [buffer.add(piece) for piece in pieces] == [b"", b"", b"data: 1\r\n\r\n", b"data: 2\r\n\r\n"]
        assert buffer.rest() == b"data"

    def test_an_event_has_a_largest_size(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sse, "MAX_EVENT_BYTES", 10)
        buffer = EventBuffer()
        assert buffer.add(b"data: 1234") == b""
        assert buffer.add(b"\n\ndata: 1234") == b"data: 1234\n\n"
        with pytest.raises(EventTooLargeError, match="sent an event of more than 10 bytes"):
            buffer.add(b"5")

    @pytest.mark.parametrize(
        ("events", "found"),
        [
            (b'data: {"error": {"code": 400}}\n\n', None),
            (b'data: {"error": {"code": 429}}\n\n', (0, 429)),
            (b'data: {"error": {"code": 503}}\n\n', (0, 503)),
            (b': c\n\ndata:{"error": {"code": "x"}}\n\n', (5, 500)),
            (b'data: {"error": 5}\n\n', (0, 500)),
            (b'data: {"error": {', (0, 500)),
            (b'data: {"error"' + b":[" * 100_000, (0, 500)),
            (b'data: {"choices": []}\r\n\r\ndata: {"error": {"code": 500}}\n\n', (25, 500)),
            (b'data: {"choices": [{"text": "data: {\\"error\\": {\\"code\\": 500}}"}]}\n\n', None),
            (b'data: {"choices": [{"error": 1, "x": {"error": 500}}]}\n\n', None),
            (b"data: [DONE]\n\n", None),
            (b': {"error": 5}\n\n', None),
        ],
    )
    def test_the_place_of_an_engines_failure(self, events: bytes, found: tuple[int, int] | None) -> None:
        assert failure_in(events) == found

    def test_comments_are_no_data(self) -> None:
        assert not has_data(b": data:\n\n: x\n\n")
        assert has_data(b": x\n\ndata: 1\n\n")
        assert has_data(b"data: 1\n\n")

    def test_an_error_event_can_be_read_back(self) -> None:
        event = error_event(504, 'late "x"')
        assert failure_in(event) == (0, 504)
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

    def test_identities(self) -> None:
        given = [f"http://p/={json.dumps(PARAMS)}"]
        settings = Settings(prefill=["http://p"], decode=["http://d"], prefill_identity=given)
        assert settings.identities == {"http://p": Identity("p", "h", 5600, 2, 3)}

    @pytest.mark.parametrize(
        ("values", "message"),
        [
            (["x"], "write URL=JSON"),
            (["http://q={}"], "no --prefill has this URL; they are http://p"),
            (["http://p={"], "not a JSON object"),
            (["http://p={}"], "remote_engine_id"),
            ([f"http://p={json.dumps(PARAMS)}"] * 2, "http://p is given twice"),
        ],
    )
    def test_bad_identities(self, values: list[str], message: str) -> None:
        with pytest.raises(typer.BadParameter, match=message):
            Settings(prefill=["http://p"], decode=["http://d"], prefill_identity=values)


class TestHealth:
    def instance(self, *identity: str) -> Instance:
        settings = Settings(
            prefill=["http://p"],
            decode=["http://d"],
            prefill_identity=list(identity),
            health_failure_threshold=2,
            health_success_threshold=2,
        )
        return Instance("prefill", "http://p", settings)

    def test_one_check_is_enough_at_the_start(self) -> None:
        instance = self.instance()
        assert not instance.healthy
        instance.passed()
        assert instance.healthy

    def test_thresholds(self) -> None:
        instance = self.instance()
        instance.passed()
        instance.failed("x")
        instance.passed()
        instance.failed("y")
        assert instance.healthy
        instance.failed("z")
        assert (instance.healthy, instance.problem) == (False, "z")
        instance.passed()
        instance.failed("again")
        instance.passed()
        assert not instance.healthy
        instance.passed()
        assert instance.healthy

    def test_a_lost_connection_counts_at_once_and_one_check_repairs_it(self) -> None:
        instance = self.instance()
        instance.passed()
        instance.lost("gone")
        assert not instance.healthy
        instance.passed()
        assert instance.healthy

    def test_an_identity_ends_with_its_process(self) -> None:
        instance = self.instance()
        instance.identity = Identity("p", "h", 1, 1)
        instance.failed("slow")
        assert instance.identity is not None
        instance.lost("gone")
        assert instance.identity is None

    def test_a_given_identity_outlives_the_process(self) -> None:
        instance = self.instance(f"http://p={json.dumps(PARAMS)}")
        instance.lost("gone")
        assert instance.identity is not None
