"""Whole-request WRITEs: vLLM posts them, the writer polls and releases them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_worker import NixlPushConnectorWorker

from layerpush.compat.stats import TransferStats
from layerpush.telemetry.trace_records import WriteRecord
from layerpush.transport.acknowledged import AcknowledgedTransport
from layerpush.transport.base import TransportError
from layerpush.transport.nixl import NixlTransport
from layerpush.transport.transfer import Transfer

logger = logging.getLogger(f"vllm.{__name__}")


class WholeWrites:
    """Takes over each WRITE that vLLM posts: the main thread must not poll NIXL, so it gets no handle.

    Over another backend than UCX, ``acknowledged`` is the transport whose WRITEs the peer acknowledges. Writer thread.
    """

    def __init__(
        self, transport: NixlTransport, acknowledged: AcknowledgedTransport | None, stats: TransferStats
    ) -> None:
        self._transport = transport
        self._acknowledged = acknowledged
        self._stats = stats
        self._setup_failures: dict[str, BaseException] = {}

    def setup_failed(self, request_id: str, error: BaseException) -> None:
        """Note that vLLM could not prepare a WRITE. ``post`` raises the error, which vLLM would only log."""
        self._setup_failures[request_id] = error

    def post(
        self,
        worker: NixlPushConnectorWorker,
        post: Callable[[], Any],
        request_id: str,
        agent_name: str,
        remote_rank: int,
        *,
        acknowledges: bool,
    ) -> Transfer | None:
        """Call ``post``, vLLM's code for one WRITE, and take over its handle; None if there was nothing to write.
        ``acknowledges``: the decode rank does, if it has to.

        Raises ``TransportError`` if NIXL could not prepare the WRITE; vLLM would continue without it.
        """
        started = time.perf_counter()
        acknowledged = self._acknowledged if acknowledges else None
        number = 0 if acknowledged is None else acknowledged.number()
        attach = None if acknowledged is None else partial(acknowledged.attached, number)
        agent, noted = worker.nixl_wrapper, self._transport.noted(attach)
        worker.nixl_wrapper = noted
        try:
            handle = post()
        finally:
            worker.nixl_wrapper = agent
        error = self._setup_failures.pop(request_id, None)
        if handle is None:
            if error is not None:
                raise TransportError(f"a WRITE could not be prepared: {error}") from error
            return None
        record = WriteRecord(
            remote_rank=remote_rank,
            layers=(0, worker.num_regions - 1),
            chunks=(0, 0),
            descriptors=0,
            bytes=0,
            t_post=started,
            t_posted=time.perf_counter(),
        )
        self._transport.adopt(handle, noted, agent_name, remote_rank)
        if acknowledged is None:
            return Transfer(self._transport, record, handle)
        acknowledged.adopt(handle, agent_name, number)
        return Transfer(acknowledged, record, handle)

    def landed(self, agent: Any, request_id: str, transfer: Transfer) -> None:
        """Record NIXL's telemetry of a WRITE. Its handle is still valid."""
        try:
            telemetry = agent.get_xfer_telemetry(transfer.handle)
        except Exception as error:  # noqa: BLE001  errors differ between builds of NIXL; the WRITE has landed
            logger.warning("NIXL has no telemetry of a WRITE of %s: %s", request_id, error)
            return
        transfer.record.descriptors, transfer.record.bytes = telemetry.descCount, telemetry.totalBytes
        self._stats.write_landed(telemetry)
