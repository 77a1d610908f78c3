"""The requests and the engines that get an early answer."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from layerpush.compat.early_answer import _ENOUGH, MARK, _allows, _wants_the_transfer_only, answering_early

NAME = "LayerwisePushConnector"


def engine(role: str = "kv_producer", connector: str = NAME, **extra: Any) -> Any:
    inner = {"kv_connector": NAME, "kv_role": role, "kv_connector_extra_config": extra}
    ours = inner | {"kv_connector": connector}
    if connector == "MultiConnector":
        ours["kv_connector_extra_config"] = {"connectors": [inner]}
    transfer = SimpleNamespace(**({"kv_connector_module_path": None} | ours))
    return SimpleNamespace(kv_transfer_config=transfer, parallel_config=SimpleNamespace(data_parallel_size=1))


@pytest.mark.parametrize(
    ("config", "allows"),
    [
        (engine(answer_early=True), True),
        (engine("kv_both", answer_early=True), True),
        (engine(), False),
        (engine("kv_consumer", answer_early=True), False),
        (engine(connector="NixlConnector", answer_early=True), False),
        (SimpleNamespace(kv_transfer_config=None), False),
    ],
    ids=["asked for", "both roles", "not asked for", "a decode engine", "another connector", "no connector"],
)
def test_only_prefill_engines_with_the_setting_answer_early(config: Any, allows: bool) -> None:
    assert _allows(config) is allows


@pytest.mark.parametrize("where", ["inside of MultiConnector", "with data_parallel_size above 1"])
def test_engines_that_cannot_answer_early_log_a_warning(caplog: pytest.LogCaptureFixture, where: str) -> None:
    config = engine(connector="MultiConnector" if "Multi" in where else NAME, answer_early=True)
    if "above" in where:
        config.parallel_config.data_parallel_size = 2
    with caplog.at_level(logging.WARNING):
        assert not _allows(config)
    assert f"answer_early has no effect {where}" in caplog.text


class FrontEnd:
    """Stands in for vLLM's ``AsyncLLM``."""

    vllm_config = engine(answer_early=True)

    def generate(self, prompt: Any, sampling_params: Any, request_id: str, **_: Any) -> str:
        return "whole"


def sent(marks: dict[str, Any], **fields: Any) -> tuple[Any, dict[str, Any]]:
    """The answer of ``AsyncLLM.generate`` to a program that asks for one token, or with other ``fields``; the transfer
    params, which a client has marked.
    """
    transfer = {"do_remote_decode": True, MARK: True}
    usual = {"n": 1, "max_tokens": 1, "logprobs": None, "prompt_logprobs": None}
    params = SimpleNamespace(extra_args={"kv_transfer_params": transfer, **marks}, **usual | fields)
    generate: Any = answering_early(FrontEnd.generate)
    return generate(FrontEnd(), {"prompt_token_ids": [1]}, params, "r"), transfer


@pytest.mark.parametrize(
    ("marks", "fields"),
    [
        *(({}, more) for more in ({"n": 2}, {"max_tokens": 2}, {"logprobs": 0}, {"prompt_logprobs": 0})),
        ({_ENOUGH: False}, {}),
        ({_ENOUGH: True}, {"n": 2}),
    ],
    ids=str,
)
def test_more_than_the_transfer_is_answered_whole(marks: dict[str, Any], fields: dict[str, Any]) -> None:
    """Only layerpush may set the mark."""
    answer, transfer = sent(marks, **fields)
    assert answer == "whole"
    assert MARK not in transfer


@pytest.mark.parametrize(("marks", "fields"), [({}, {}), ({_ENOUGH: True}, {"max_tokens": 9})], ids=str)
def test_the_transfer_alone_is_answered_early(marks: dict[str, Any], fields: dict[str, Any]) -> None:
    """vLLM's OpenAI server judges its requests itself."""
    answer, transfer = sent(marks, **fields)
    assert answer != "whole"
    assert transfer[MARK] is True


@pytest.mark.parametrize(
    ("request_fields", "wants"),
    [
        ({"prompt": "a"}, True),
        ({"prompt": [1, 2, 3]}, True),
        ({"messages": []}, True),
        ({"prompt": "a", "stream": False, "n": 1, "logprobs": None}, True),
        ({"prompt": ["a"]}, False),
        ({"prompt": [[1, 2]]}, False),
        ({"prompt": None}, False),
        ({"prompt": "a", "logprobs": 0}, False),
        *(({"prompt": "a", more: True}, False) for more in ("stream", "echo", "return_token_ids", "use_beam_search")),
        ({"messages": [], "logprobs": True, "top_logprobs": 0}, False),
        ({"prompt": "a", "n": 2}, False),
    ],
    ids=str,
)
def test_a_request_for_more_than_the_transfer_gets_no_early_answer(request_fields: dict[str, Any], wants: bool) -> None:
    assert _wants_the_transfer_only(SimpleNamespace(**({"n": None} | request_fields))) is wants
