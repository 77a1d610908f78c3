"""The check in front of vLLM's own: the engines that have it, and that vLLM's front ends pass it."""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.exceptions import VLLMValidationError

from layerpush.compat.admission import ConnectorSettings, checking, connectors_in
from layerpush.core.config import LayerPushConfig
from layerpush.core.request_params import ParamsError, check_request_id
from layerpush.engine.scheduler.request_filter import RequestFilter

FRONT_END = "vllm.v1.engine.input_processor"
OURS = {"kv_connector": "LayerwisePushConnector", "kv_role": "kv_consumer"}
GOOD = {
    "do_remote_prefill": True,
    "remote_engine_id": "prefill-0",
    "remote_request_id": "cmpl-7",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
}
BAD = {"do_remote_prefill": True}


def multi(*inner: dict[str, Any]) -> dict[str, Any]:
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": list(inner)},
    }


@pytest.mark.parametrize(
    ("transfer", "found"),
    [
        (OURS, [ConnectorSettings("kv_consumer", LayerPushConfig())]),
        (OURS | {"kv_connector_extra_config": None}, [ConnectorSettings("kv_consumer", LayerPushConfig())]),
        (
            OURS | {"kv_connector_extra_config": {"allowed_hosts": ["a"], "num_threads": 2}},
            [ConnectorSettings("kv_consumer", LayerPushConfig(allowed_hosts=("a",)))],
        ),
        (OURS | {"kv_connector": "NixlPushConnector"}, []),
        (
            OURS | {"kv_connector": "NixlPushConnector", "kv_connector_module_path": "layerpush.nixl"},
            [ConnectorSettings("kv_consumer", LayerPushConfig())],
        ),
        (OURS | {"kv_connector": "NixlPushConnector", "kv_connector_module_path": "another.module"}, []),
        (OURS | {"kv_connector": None}, []),
        (multi(), []),
        (multi({"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}), []),
        (
            multi({"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}, OURS),
            [ConnectorSettings("kv_consumer", LayerPushConfig())],
        ),
        (multi(multi(OURS)), [ConnectorSettings("kv_consumer", LayerPushConfig())]),
    ],
)
def test_only_the_engines_own_connectors_are_found(transfer: dict[str, Any], found: list[ConnectorSettings]) -> None:
    assert list(connectors_in(transfer)) == found


class Processor:
    """Stands for vLLM's InputProcessor."""

    def __init__(self, transfer: dict[str, Any] | None) -> None:
        config = None if transfer is None else SimpleNamespace(**transfer)
        self.vllm_config = SimpleNamespace(kv_transfer_config=config)

    def process_inputs(self, request_id: str, prompt: Any, params: Any, tasks: Any, priority: int = 0) -> Any:
        """Its docstring."""
        return request_id, prompt, params, tasks, priority


@pytest.fixture
def front_end() -> Iterator[type[Processor]]:
    plain = Processor.process_inputs
    Processor.process_inputs = checking(plain)
    yield Processor
    Processor.process_inputs = plain


def sampling(params: object) -> Any:
    return SimpleNamespace(extra_args={"kv_transfer_params": params})


@pytest.mark.parametrize("transfer", [OURS, multi(OURS)])
def test_bad_params_are_refused_with_vllms_own_error(front_end: type[Processor], transfer: dict[str, Any]) -> None:
    processor = front_end(transfer)
    with pytest.raises(VLLMValidationError, match="'remote_engine_id' is missing") as refused:
        processor.process_inputs("1", "prompt", params=sampling(BAD), tasks=())
    assert refused.value.parameter == "kv_transfer_params.remote_engine_id"
    with pytest.raises(VLLMValidationError, match="must be an object"):
        processor.process_inputs("1", "prompt", sampling("bad"), ())


P = OURS | {"kv_role": "kv_producer"}
TO_P = {"do_remote_decode": True}
BAD_IDS = ["", "x" * 1009, "cmpl-a\n", "cmpl-\x1b[2J", "cmpl-\u202e", "cmpl-\xa0", "HB:1", "PUSH_REG:", "LAYERPUSH:"]


@pytest.mark.parametrize("request_id", BAD_IDS, ids=ascii)
@pytest.mark.parametrize(("transfer", "params"), [(P, TO_P), (multi(P), TO_P), (OURS, GOOD)], ids=["P", "multi", "D"])
def test_an_id_that_the_other_engine_refuses_is_refused(
    front_end: type[Processor], transfer: dict[str, Any], params: dict[str, Any], request_id: str
) -> None:
    processor = front_end(transfer)
    with pytest.raises(VLLMValidationError, match=r"the request's id is .* must be text of 1 to 1008 printable"):
        processor.process_inputs(request_id, "prompt", sampling(params), ())
    for other in ({}, None):  # no other engine reads this id
        assert processor.process_inputs(request_id, "prompt", sampling(other), ())[0] == request_id


@pytest.mark.parametrize("answers", [1, 16384])
def test_both_engines_take_the_longest_id_with_vllms_additions(front_end: type[Processor], answers: int) -> None:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.engine.parallel_sampling import ParentRequest

    outer = "x" * 1008
    front_end(P).process_inputs(outer, "prompt", sampling(TO_P), ())
    fields = dict.fromkeys(EngineCoreRequest.__struct_fields__) | {"request_id": outer}
    request = EngineCoreRequest(**fields)
    InputProcessor.assign_request_id(request)
    request.sampling_params = SamplingParams(n=answers)
    inner = request.request_id if answers == 1 else ParentRequest(request).get_child_info(answers - 1)[0]
    check_request_id(TO_P, inner)
    with pytest.raises(ParamsError):
        check_request_id(TO_P, inner + "x" * 16)


@pytest.mark.parametrize(
    ("transfer", "params"),
    [
        (OURS, sampling(GOOD)),
        (OURS, sampling(None)),
        (OURS, SimpleNamespace(extra_args=None)),
        (OURS, SimpleNamespace(extra_args={"other": 1})),
        (OURS, SimpleNamespace(pooling=True)),
        (OURS | {"kv_connector": "NixlConnector"}, sampling(BAD)),
        (None, sampling(BAD)),
    ],
)
def test_other_requests_pass_the_check_unchanged(front_end: type[Processor], transfer: Any, params: Any) -> None:
    processor = front_end(transfer)
    assert processor.process_inputs("1", "prompt", params, (), 7) == ("1", "prompt", params, (), 7)
    assert processor.process_inputs("1", prompt="p", params=params, tasks=()) == ("1", "p", params, (), 0)


def test_the_installed_vllm_has_process_inputs() -> None:
    processor = importlib.import_module(FRONT_END).InputProcessor
    names = list(inspect.signature(processor.process_inputs).parameters)
    assert names[:4] == ["self", "request_id", "prompt", "params"]


def request(params: object) -> Any:
    return SimpleNamespace(request_id="cmpl-7", kv_transfer_params=params)


def test_the_filter_removes_bad_params_and_logs_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    keeper = RequestFilter("kv_consumer", LayerPushConfig())
    with caplog.at_level(logging.WARNING, "vllm.layerpush"):
        for number in range(100):
            bad = request(BAD)
            keeper.drop_invalid(bad, now=number / 1000)
            assert bad.kv_transfer_params is None
    (line,) = (record.getMessage() for record in caplog.records)
    assert "request cmpl-7 runs without a KV transfer: kv_transfer_params: 'remote_engine_id' is missing" in line


def test_the_filter_removes_the_params_of_a_request_with_a_bad_id(caplog: pytest.LogCaptureFixture) -> None:
    bad = request(GOOD)
    bad.request_id = "cmpl-\n" + "x" * 2000
    with caplog.at_level(logging.WARNING, "vllm.layerpush"):
        RequestFilter("kv_consumer", LayerPushConfig()).drop_invalid(bad, now=0.0)
    assert bad.kv_transfer_params is None
    (line,) = (record.getMessage() for record in caplog.records)
    assert "runs without a KV transfer: kv_transfer_params: the request's id is " in line
    assert "\n" not in line


@pytest.mark.parametrize("params", [None, {}, GOOD])
def test_the_filter_leaves_good_params_alone(params: object, caplog: pytest.LogCaptureFixture) -> None:
    good = request(params)
    RequestFilter("kv_consumer", LayerPushConfig()).drop_invalid(good, now=0.0)
    assert good.kv_transfer_params is params
    assert not caplog.records


@pytest.mark.parametrize("params", [[], "text", 7, {"do_remote_prefill": []}, {"do_remote_decode": True}])
def test_the_filter_never_raises(params: object) -> None:
    bad = request(params)
    RequestFilter("kv_consumer", LayerPushConfig()).drop_invalid(bad, now=0.0)
    assert bad.kv_transfer_params is None
