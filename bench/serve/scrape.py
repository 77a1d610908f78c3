"""Figures of engines, from ``/metrics``."""

from __future__ import annotations

import time
from collections import defaultdict

from prometheus_client.parser import text_string_to_metric_families

from bench.servers.engines import no_proxy

PREFILL = "vllm:request_prefill_time_seconds"
FIRST_TOKENS = "vllm:layerpush_first_tokens"
EVERY_METRICS_LABELS = ("engine", "model_name")
TIMEOUT_S = 10.0
PATIENCE_S = 3.0
LOOK_S = 0.1


class Meter:
    """A histogram or a counter at ``url`` from now on; nothing if ``url`` is None.

    A histogram has ``sum`` and ``count``, over all labels. A counter has a number for each value of its own label.
    """

    def __init__(self, url: str | None, metric: str, patience_s: float = PATIENCE_S) -> None:
        self.problems: list[str] = []
        self._url = url
        self._metric = metric
        self._patience_s = patience_s
        self._before = self._look()

    def since(self, requests: int) -> dict[str, float]:
        """The observations since the ``Meter`` was made; empty if the server has no metrics.

        Waits a little for ``requests`` observations, because engines report from time to time only.
        """
        deadline = time.monotonic() + self._patience_s
        while self._before is not None and (now := self._look()) is not None:
            since = {name: value - self._before.get(name, 0.0) for name, value in now.items()}
            count = since.get("count", sum(since.values()))
            if count >= requests:
                return since
            if time.monotonic() > deadline:
                self.problems.append(f"{self._url}/metrics counts {count:g} of {requests} {self._metric}")
                return since
            time.sleep(LOOK_S)
        return {}

    def _look(self) -> dict[str, float] | None:
        if self._url is None:
            return None
        try:
            with no_proxy.open(f"{self._url}/metrics", timeout=TIMEOUT_S) as response:
                text = response.read().decode()
        except OSError as error:  # the times of requests are useful without metrics
            self.problems.append(f"{self._url}/metrics: {error}")
            return None
        found: dict[str, float] = defaultdict(float)
        for sample in (each for family in text_string_to_metric_families(text) for each in family.samples):
            metric, _, part = sample.name.rpartition("_")
            if metric == self._metric and part in ("sum", "count", "total"):
                own = [value for label, value in sample.labels.items() if label not in EVERY_METRICS_LABELS]
                found[own[0] if part == "total" else part] += sample.value
        return found
