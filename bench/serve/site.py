"""The servers of a run, and the URLs of their metrics."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from bench.serve.lineup import Lineup
from bench.serve.plan import LOOPBACK, Setup
from bench.servers.display import Display
from bench.servers.engines import EngineGroup, EngineServer, ServerPlace
from bench.servers.interrupts import Interrupts
from bench.servers.workspace import places_of


@dataclass(frozen=True)
class ServedMode:
    """``url`` gets the requests of a mode. None stands for unavailable figures.

    ``prefill`` is the URL of P, and ``decode`` that of D; both are that of the aggregated engine. ``trace`` is P's
    trace_dir, ``decode_trace`` D's.
    """

    mode: str
    url: str
    prefill: str | None = None
    decode: str | None = None
    trace: Path | None = None
    decode_trace: Path | None = None


Targets = Mapping[str, ServedMode]


class ServerTurns:
    """The servers of each mode; some may belong to several. All run at first.

    An idle engine still polls, and so do its proxy and its threads. A dozen of them on a few cores would slow down the
    engine that computes.
    """

    def __init__(self, servers: Mapping[str, Sequence[EngineServer]]) -> None:
        self._servers = servers
        self._suspended: list[EngineServer] = []

    def only(self, mode: str) -> None:
        """Suspend all servers but those of ``mode``."""
        wanted = self._servers[mode]
        for server in [each for each in self._suspended if each in wanted]:
            server.signal(signal.SIGCONT)
            self._suspended.remove(server)
        for server in (each for servers in self._servers.values() for each in servers):
            if server not in wanted and server not in self._suspended:
                server.signal(signal.SIGSTOP)
                self._suspended.append(server)


class Site:
    """Engines and proxies on this machine, started for each setup. ``forks``: as those of ``EngineGroup``."""

    def __init__(
        self,
        lineup: Callable[[Setup, tuple[ServerPlace, ServerPlace], Path], Lineup],
        served: Sequence[str],
        display: Display,
        interrupts: Interrupts,
        logs: Path,
        *,
        forks: bool,
    ) -> None:
        self.model = served
        self._forks = forks
        self._lineup = lineup
        self._display = display
        self._interrupts = interrupts
        self._logs = logs
        self._group: EngineGroup | None = None
        self._turns = ServerTurns({})

    @contextlib.contextmanager
    def up(self, setup: Setup, modes: Sequence[str]) -> Iterator[Targets]:
        """Servers of these modes until the block ends. Raises ``EngineFailedError`` or ``LinkError``."""
        logs = self._logs / f"{setup.link}-b{setup.step_tokens}"
        logs.mkdir(parents=True, exist_ok=True)
        with (
            places_of(None if setup.link == LOOPBACK else setup.link, self._interrupts) as places,
            EngineGroup(logs, self._interrupts, forks=self._forks) as group,
        ):
            lineup = self._lineup(setup, places, logs / "trace")
            specs = lineup.engines(modes)
            for spec in specs:
                group.preload(spec.place)
            with self._display.waiting("Importing vLLM, once for all servers") if self._forks else nullcontext():
                engines = {spec.name: group.start(spec) for spec in specs}
            self._wait(group, list(engines.values()))
            targets: dict[str, ServedMode] = {}
            proxies: dict[str, EngineServer] = {}
            servers: dict[str, list[EngineServer]] = {}
            for mode in modes:
                prefill, decode_spec = engines[lineup.prefill(mode).name], lineup.decode(mode)
                if decode_spec is None:
                    servers[mode] = [prefill]
                    targets[mode] = ServedMode(mode, prefill.url, prefill.url, prefill.url)
                    continue
                decode = engines[decode_spec.name]
                proxies[mode] = group.start(lineup.proxy(mode, prefill.url, decode.url, prefill.side_channel_port))
                servers[mode] = [prefill, decode, proxies[mode]]
                targets[mode] = ServedMode(
                    mode,
                    proxies[mode].url,
                    prefill.url,
                    decode.url,
                    lineup.trace_dir(mode) if "trace_dir" in prefill.spec.extra_config else None,
                    lineup.decode_trace_dir(mode) if "trace_dir" in decode.spec.extra_config else None,
                )
            self._wait(group, list(proxies.values()))
            self._group, self._turns = group, ServerTurns(servers)
            try:
                yield targets
            finally:
                self._group = None

    def only(self, mode: str) -> None:
        """From now on only this mode gets requests. Inside ``up`` only."""
        self._turns.only(mode)

    def check(self) -> None:
        """Raises ``EngineFailedError``."""
        if self._group is not None:
            self._group.check_alive()

    def _wait(self, group: EngineGroup, engines: Sequence[EngineServer]) -> None:
        if engines:
            with self._display.starting(engines) as on_ready:
                group.wait_ready(engines, on_ready)
