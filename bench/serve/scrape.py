"""Figures of engines: histograms on ``/metrics``, and the CPU time of a thread."""

from __future__ import annotations

import collections
import contextlib
import os
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from bench.servers.engines import no_proxy

PREFILL = "vllm:request_prefill_time_seconds"
TRANSFER = "vllm:nixl_xfer_time_seconds"
BYTES = "vllm:nixl_bytes_transferred"
DESCRIPTORS = "vllm:nixl_num_descriptors"
FIRST_TOKENS = "vllm:layerpush_first_tokens"
TIMEOUT_S = 10.0
PATIENCE_S = 3.0
LOOK_S = 0.1


@dataclass(frozen=True)
class Histogram:
    """Sum and number of the observations so far, over all labels."""

    total: float = 0.0
    count: float = 0.0

    def since(self, earlier: Histogram) -> Histogram:
        return Histogram(self.total - earlier.total, self.count - earlier.count)

    @property
    def mean(self) -> float | None:
        return self.total / self.count if self.count > 0 else None


def histograms(url: str, names: Collection[str]) -> dict[str, Histogram]:
    """The histograms ``names`` at ``url``/metrics; a missing one is empty. Raises ``OSError``."""
    with no_proxy.open(f"{url}/metrics", timeout=TIMEOUT_S) as response:
        return parsed(response.read().decode(), names)


def parsed(text: str, names: Collection[str]) -> dict[str, Histogram]:
    """The histograms ``names`` in the text of a scrape."""
    found = {name: Histogram() for name in names}
    for family in text_string_to_metric_families(text):
        if family.name in found:
            parts = {"_sum": 0.0, "_count": 0.0}
            for sample in family.samples:
                ending = sample.name.removeprefix(family.name)
                if ending in parts:
                    parts[ending] += sample.value
            found[family.name] = Histogram(parts["_sum"], parts["_count"])
    return found


class Meter:
    """Histograms at ``url`` from now on; none if ``url`` is None. The first of ``names`` counts requests."""

    def __init__(self, url: str | None, names: Sequence[str], patience_s: float = PATIENCE_S) -> None:
        self.problems: list[str] = []
        self._url = url
        self._names = names
        self._patience_s = patience_s
        self._before = self._look()

    def since(self, requests: int) -> dict[str, Histogram]:
        """The observations since the ``Meter`` was made; empty if the server has no metrics.

        Waits a little for ``requests`` observations, because engines report from time to time only.
        """
        deadline = time.monotonic() + self._patience_s
        while self._before:
            now = self._look()
            since = {name: now[name].since(self._before[name]) for name in now}
            count = since[self._names[0]].count if since else 0
            if count >= requests or not since:
                return since
            if time.monotonic() > deadline:
                self.problems.append(f"{self._url}/metrics counts {count:g} of {requests} {self._names[0]}")
                return since
            time.sleep(LOOK_S)
        return {}

    def _look(self) -> dict[str, Histogram]:
        if self._url is None:
            return {}
        try:
            return histograms(self._url, self._names)
        except OSError as error:  # the times of requests are useful without metrics
            self.problems.append(f"{self._url}/metrics: {error}")
            return {}


class Tally:
    """A counter at ``url``, by one label, from now on; nothing if ``url`` is None."""

    def __init__(self, url: str | None, name: str, label: str, patience_s: float = PATIENCE_S) -> None:
        self._url = url
        self._name = name
        self._label = label
        self._patience_s = patience_s
        self._before = self._look()

    def since(self, count: int) -> dict[str, int]:
        """Waits a little for ``count``, because engines report from time to time only. Raises ``OSError``."""
        deadline = time.monotonic() + self._patience_s
        while True:
            found = self._look() - self._before
            if self._url is None or found.total() >= count or time.monotonic() > deadline:
                return dict(found)
            time.sleep(LOOK_S)

    def _look(self) -> collections.Counter[str]:
        found: collections.Counter[str] = collections.Counter()
        if self._url is not None:
            with no_proxy.open(f"{self._url}/metrics", timeout=TIMEOUT_S) as response:
                families = text_string_to_metric_families(response.read().decode())
            for sample in (each for family in families if family.name == self._name for each in family.samples):
                if sample.name.endswith("_total"):
                    found[sample.labels[self._label]] += int(sample.value)
        return found


def thread_cpu_s(pids: Iterable[int], name: str, proc: Path = Path("/proc")) -> float | None:
    """CPU seconds that the threads of this name have used in all ``pids``; None if there is no such thread."""
    seconds = [
        _cpu_s(task)
        for pid in pids
        for task in _tasks(proc / str(pid))
        if _text(task / "comm").strip() == name  # the kernel keeps 15 characters
    ]
    return sum(seconds) if seconds else None


def _tasks(process: Path) -> list[Path]:
    with contextlib.suppress(OSError):  # it has ended
        return list((process / "task").iterdir())
    return []


def _cpu_s(task: Path) -> float:
    """CPU seconds of a thread: to the nanosecond where the kernel counts so, else in clock ticks."""
    exact = _text(task / "schedstat").split()
    if exact:
        return int(exact[0]) / 1e9
    fields = _text(task / "stat").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if fields else 0.0


def _text(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text()
    return ""
