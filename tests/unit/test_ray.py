"""The backend for Ray Serve, beside a stand-in of Ray: its registration, its published values, its requests."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from layerpush.core.config import CONNECTOR_NAME, LayerPushConfig
from layerpush.core.request_params import check_params
from tests.support.rays import HOST, PORT, Chat, Completion, KVConnectorBackendFactory, ray_in_place


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    for name in (HOST, PORT):  # so that both are gone again after the test
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    with ray_in_place(lambda args: (args, dict(KVConnectorBackendFactory.registry))) as module:
        yield module


def backend(ours: ModuleType, **engine: Any) -> Any:
    """Made as Ray makes it, by the connector's name, and set up."""
    ours.register()
    kwargs = {"kv_transfer_config": {"kv_connector": CONNECTOR_NAME, "engine_id": "prefill"}, **engine}
    made = KVConnectorBackendFactory.get_backend_class(CONNECTOR_NAME)(SimpleNamespace(engine_kwargs=kwargs))
    made.setup()
    return made


def test_an_application_gets_the_backend(ours: ModuleType) -> None:
    args = {"prefill_config": {}, "decode_config": {}}
    for _ in range(2):  # Ray builds an application again when it is deployed again
        assert ours.build_pd_openai_app(args) == (args, {CONNECTOR_NAME: "layerpush.ray:LayerwisePushBackend"})


def test_ray_sends_to_p_and_d_at_the_same_time(ours: ModuleType) -> None:
    made = backend(ours)
    assert made.requires_peer_binding
    assert made.concurrent_handoff


def test_p_publishes_its_identity(ours: ModuleType) -> None:
    assert backend(ours, tensor_parallel_size=2).replica_metadata() == {
        "remote_engine_id": "prefill-10.0.0.7-20000",
        "remote_host": "10.0.0.7",
        "remote_port": 20000,
        "tp_size": 2,
        "pp_size": 1,
        "dcp_size": 1,
    }


@pytest.mark.parametrize(("kind", "name"), [(Completion, "cmpl-{}-0"), (Chat, "chatcmpl-{}")])
def test_both_requests_are_shaped(ours: ModuleType, kind: type[Completion], name: str) -> None:
    made = backend(ours)
    peer = made.replica_metadata()
    clients = {"stream": True, "stream_options": {"include_usage": True}}
    client = kind(**clients, kv_transfer_params={"do_remote_decode": True})
    assert "request_id" not in client.model_fields_set
    theirs = client.request_id
    to_p = made.prepare_prefill_request(request=client, peer=peer)
    to_d = made.prepare_decode_request(request=client, peer=peer, prefill_response=None)

    assert to_p.request_id == to_d.request_id == str(uuid.UUID(to_p.request_id)) != theirs
    assert "request_id" in to_p.model_fields_set & to_d.model_fields_set
    assert to_p.kv_transfer_params == {"do_remote_decode": True, "do_remote_prefill": False}
    check_params(to_p.kv_transfer_params, "kv_producer", LayerPushConfig())
    assert to_d.kv_transfer_params == {
        **peer,
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_request_id": name.format(to_d.request_id),
    }
    check_params(to_d.kv_transfer_params, "kv_consumer", LayerPushConfig())

    assert (to_p.max_tokens, to_p.min_tokens, to_p.stream, to_p.stream_options) == (1, 0, False, None)
    assert getattr(to_p, "max_completion_tokens", 1) == 1
    changed = {"request_id", "kv_transfer_params"}
    assert to_d.model_dump(exclude=changed) == kind(**clients).model_dump(exclude=changed)


def test_each_attempt_has_a_new_id(ours: ModuleType) -> None:
    made, client = backend(ours), Completion()
    peer = made.replica_metadata()
    ids = {made.prepare_prefill_request(request=client, peer=peer).request_id for _ in range(3)}
    assert len(ids) == 3


@pytest.mark.parametrize("peer", [None, {}, {"mori_zmq_address": "host:10.0.0.7"}, {"remote_engine_id": "p"}])
def test_a_p_without_a_published_identity_fails_the_request(ours: ModuleType, peer: dict[str, Any] | None) -> None:
    made = backend(ours)
    with pytest.raises(ValueError, match=r"'remote_\w+' is missing.*not inside of MultiConnector"):
        made.prepare_prefill_request(request=Completion(), peer=peer)
    with pytest.raises(ValueError, match=r"'remote_\w+' is missing"):
        made.prepare_decode_request(request=Completion(), peer=peer, prefill_response=None)


def test_data_parallelism_is_refused_at_start(ours: ModuleType) -> None:
    with pytest.raises(ValueError, match="data_parallel_size > 1"):
        backend(ours, data_parallel_size=2)
