"""vLLM API servers as child processes: started together, watched, and always taken down."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from bench import ROOT, calm
from bench.servers import processes
from bench.servers.forkserver import ForkServer, ForkServerError
from bench.servers.interrupts import Interrupts
from bench.servers.ports import PortAllocator

Role = Literal["plain", "prefill", "decode"]
KV_ROLES: Mapping[Role, str] = {"prefill": "kv_producer", "decode": "kv_consumer"}
SERVED_NAME = "demo"
"""The model's name in requests and metrics."""
SERVER = (sys.executable, "-m", "vllm.entrypoints.openai.api_server")
START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 20.0


class EngineFailedError(RuntimeError):
    """A server ended or did not become ready; the message carries the end of its log."""


@dataclass(frozen=True)
class ServerPlace:
    """A server's place: address and network device of KV transfers, address of requests, and a command prefix."""

    host: str = "127.0.0.1"
    http_host: str = "127.0.0.1"
    device: str = "lo"
    command_prefix: tuple[str, ...] = ()


LOOPBACK = ServerPlace()


@dataclass(frozen=True)
class EngineSpec:
    """One server to start. ``extra_config`` becomes ``kv_connector_extra_config``. ``recomputes``: a failed load costs
    it a computation, not the request.

    ``server`` is the command of vLLM's API server. Without a ``tokenizer`` it takes token ids only. With
    ``kv_cache_bytes`` None, vLLM chooses the size. ``options`` and ``variables`` override those of every server.
    """

    name: str
    role: Role
    model: Path
    connector: str | None = None
    connector_module: str | None = None
    extra_config: Mapping[str, object] = field(default_factory=dict)
    recomputes: bool = False
    tokens_per_step: int = 512
    max_model_len: int = 8192
    kv_cache_bytes: int | None = 1 << 30
    block_size: int = 32
    place: ServerPlace = LOOPBACK
    options: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    tokenizer: Path | None = None
    server: Sequence[str] = SERVER

    def transfer_config(self) -> dict[str, object] | None:
        """The value of ``--kv-transfer-config``, or None for a plain engine."""
        if self.role == "plain":
            return None
        config: dict[str, object] = {
            "kv_connector": self.connector,
            "kv_role": KV_ROLES[self.role],
            "engine_id": self.name,
            "kv_connector_extra_config": dict(self.extra_config),
        }
        if self.connector_module:
            config["kv_connector_module_path"] = self.connector_module
        if self.recomputes:
            config["kv_load_failure_policy"] = "recompute"
        return config

    def command(self, port: int) -> list[str]:
        """The command line of the server, listening on ``port``."""
        arguments = {
            "--model": str(self.model),
            "--served-model-name": SERVED_NAME,
            "--host": self.place.http_host,
            "--port": str(port),
            "--dtype": "float32",
            "--max-model-len": str(self.max_model_len),
            "--max-num-batched-tokens": str(self.tokens_per_step),
            "--max-num-seqs": "8",
            "--block-size": str(self.block_size),
        }
        switches = ["--enforce-eager", "--no-enable-prefix-caching", "--disable-uvicorn-access-log"]
        if self.kv_cache_bytes is not None:
            arguments["--kv-cache-memory-bytes"] = str(self.kv_cache_bytes)
        if self.tokenizer is None:
            switches.append("--skip-tokenizer-init")
        else:
            arguments["--tokenizer"] = str(self.tokenizer)
        config = self.transfer_config()
        if config is not None:
            arguments["--kv-transfer-config"] = json.dumps(config)
        pairs = [part for pair in arguments.items() for part in pair]
        return [*self.place.command_prefix, *self.server, *pairs, *switches, *self.options]

    def environment(self, side_channel_port: int) -> dict[str, str]:
        """The server's environment: calm mode, one CPU thread for each process, UCX over TCP, no downloads."""
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(("VLLM_", "UCX_"))}
        paths = (str(ROOT), str(calm.FOLDER), os.environ.get("PYTHONPATH", ""))
        return inherited | {
            "HF_HUB_OFFLINE": "1",
            "LAYERPUSH_CALM": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "PYTHONUNBUFFERED": "1",
            "UCX_NET_DEVICES": self.place.device,
            "UCX_TLS": "tcp,self",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_HOST_IP": self.place.host,
            "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(side_channel_port),
            "VLLM_NIXL_SIDE_CHANNEL_HOST": self.place.host,
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_channel_port),
            "VLLM_NO_USAGE_STATS": "1",
            **self.variables,
        }


class EngineServer:
    """A running server: its address, its log, and the process group of the server and its children.

    With a ``fork_server``, the server has a process group of its own, and the process here is its client.
    """

    def __init__(
        self,
        spec: EngineSpec,
        port: int,
        side_channel_port: int,
        log_path: Path,
        fork_server: ForkServer | None = None,
    ) -> None:
        self.spec = spec
        self._fork_server = fork_server
        self.port = port
        self.side_channel_port = side_channel_port
        self.log_path = log_path
        self.started_at = time.monotonic()
        self._process = processes.start(spec.command(port), log_path, env=spec.environment(side_channel_port))

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def url(self) -> str:
        return f"http://{self.spec.place.http_host}:{self.port}"

    @property
    def group(self) -> int:
        """Id of the process group, which is also the pid of the server, or of its client."""
        return self._process.pid

    def is_ready(self) -> bool:
        """Whether ``/health`` of this server answers. Raises ``EngineFailedError`` when the server has ended."""
        self.check_alive()
        try:
            with no_proxy.open(f"{self.url}/health", timeout=2) as response:
                return response.status == 200 and self._listens()
        except (urllib.error.URLError, OSError):
            return False

    def _listens(self) -> bool:
        """Whether this server listens on its port. All its processes, also forked ones, write to its log."""
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # the process has ended, or is another user's
                is_ours = os.path.samefile(process / "fd/1", self.log_path)
                if is_ours and _open_files(process) & _listeners(process, self.port):
                    return True
        return False

    def check_alive(self) -> None:
        """Raise ``EngineFailedError`` when the server has ended."""
        status = self._process.poll()
        if status is not None:
            raise EngineFailedError(f"{self.name} ended with status {status}.\n{self.log_tail()}")

    def log_tail(self, lines: int = 40) -> str:
        """The end of the log, below a line with its path."""
        text = self.log_path.read_text(errors="replace").splitlines()
        return "\n".join([f"The last lines of {self.log_path}:", *(f"  {line}" for line in text[-lines:])])

    def signal(self, signum: int) -> None:
        """Send ``signum`` to the server and all its children. A client cannot pass on SIGSTOP and SIGCONT."""
        if self.members():
            group = self._forked if signum in (signal.SIGSTOP, signal.SIGCONT) else None
            with contextlib.suppress(ProcessLookupError):  # the last process has ended meanwhile
                os.killpg(group or self.group, signum)

    def members(self) -> list[int]:
        """Pids of the server, its children and its client that are alive. Reaps the server when it has ended."""
        self._process.poll()
        return [pid for group in (self.group, self._forked) if group is not None for pid in processes.members(group)]

    @property
    def _forked(self) -> int | None:
        """The process group of a forked server."""
        return None if self._fork_server is None else self._fork_server.group_of(self._process.pid)


class EngineGroup:
    """All servers of a run. The end of the ``with`` block ends all of them, in every case.

    Logs go to ``log_directory``. ``interrupts`` keeps a signal from arriving between a start and its bookkeeping.
    ``forks``: fork servers from a process that has imported vLLM. Each place has one. On CPUs only.
    """

    def __init__(
        self,
        log_directory: Path,
        interrupts: Interrupts,
        ports: PortAllocator | None = None,
        stop_timeout_s: float = STOP_TIMEOUT_S,
        *,
        forks: bool = False,
    ) -> None:
        self._log_directory = log_directory
        self._interrupts = interrupts
        self._ports = ports or PortAllocator()
        self._stop_timeout_s = stop_timeout_s
        self._engines: list[EngineServer] = []
        self._forks = forks
        self._fork_servers: dict[ServerPlace, ForkServer] = {}
        atexit.register(self._stop_all)

    def __enter__(self) -> EngineGroup:
        return self

    def __exit__(self, exception_type: type[BaseException] | None, *_: object) -> None:
        if exception_type is not None:
            self._interrupts.ignore()
        try:
            with self._interrupts.shield():
                self._stop_all()
        finally:
            atexit.unregister(self._stop_all)

    def preload(self, place: ServerPlace) -> None:
        """Begin to import vLLM for servers at a place; returns at once."""
        with self._interrupts.shield():
            if self._forks and place not in self._fork_servers:
                log_path = self._log_directory / f"fork-server-{len(self._fork_servers)}.log"
                environment = EngineSpec("fork-server", "plain", Path(), place=place).environment(0)
                self._fork_servers[place] = ForkServer(log_path, environment, place.command_prefix)

    def start(self, spec: EngineSpec) -> EngineServer:
        """Start a server; it is ready after :meth:`wait_ready`. Waits only for a fork server that is not ready."""
        fork_server = None
        if self._forks and tuple(spec.server) == SERVER:
            self.preload(spec.place)
            fork_server = self._ready_fork_server(spec.place)
            spec = replace(spec, server=fork_server.command)
        with self._interrupts.shield():
            log_path = self._log_directory / f"{spec.name}.log"
            engine = EngineServer(spec, self._ports.next_free(), self._ports.next_free(), log_path, fork_server)
            self._engines.append(engine)
        return engine

    def wait_ready(
        self,
        engines: Sequence[EngineServer],
        on_ready: Callable[[EngineServer, float], None] | None = None,
        timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        """Wait until every server answers. Raises ``EngineFailedError`` when one ends first or the time is up."""
        waiting = list(engines)
        while waiting:
            for engine in list(waiting):
                age = time.monotonic() - engine.started_at
                if engine.is_ready():
                    waiting.remove(engine)
                    if on_ready is not None:
                        on_ready(engine, age)
                elif age > timeout_s:
                    raise EngineFailedError(f"{engine.name} is not ready after {age:.0f} s.\n{engine.log_tail()}")
            if waiting:
                time.sleep(0.2)

    def _ready_fork_server(self, place: ServerPlace) -> ForkServer:
        """Wait for the fork server of a place. Raises ``EngineFailedError``."""
        fork_server = self._fork_servers[place]
        try:
            while not fork_server.is_ready():
                time.sleep(0.05)
        except ForkServerError as error:
            raise EngineFailedError(str(error)) from error
        return fork_server

    def check_alive(self) -> None:
        """Raise ``EngineFailedError`` when one of the servers has ended."""
        for engine in self._engines:
            engine.check_alive()

    def stop(self, engines: Sequence[EngineServer]) -> None:
        """Send SIGTERM to all servers, later SIGKILL. Returns when their last process is gone.

        Raises ``RuntimeError`` if a process survives.
        """
        for engine in engines:
            engine.signal(signal.SIGTERM)
            engine.signal(signal.SIGCONT)  # a suspended process gets no SIGTERM
        _wait_gone(engines, self._stop_timeout_s)
        for engine in engines:
            engine.signal(signal.SIGKILL)
        if not _wait_gone(engines, STOP_TIMEOUT_S):  # a busy machine takes its time
            left = {engine.name: engine.members() for engine in engines if engine.members()}
            raise RuntimeError(f"processes survived SIGKILL: {left}")
        self._engines = [engine for engine in self._engines if engine not in engines]

    def _stop_all(self) -> None:
        try:
            self.stop(list(self._engines))
        finally:
            while self._fork_servers:
                self._fork_servers.popitem()[1].stop()


no_proxy = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Opens URLs of this machine. The HTTP proxies of the environment do not apply."""


def _open_files(process: Path) -> set[str]:
    """What the descriptors of ``process``, a folder of /proc, name. It may close some meanwhile."""
    names = set()
    for descriptor in (process / "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            names.add(os.readlink(descriptor))
    return names


def _listeners(process: Path, port: int) -> set[str]:
    """Sockets that listen on ``port`` in the network namespace of ``process``, a folder of /proc, as in ``fd``."""
    rows = [row.split() for row in (process / "net/tcp").read_text().splitlines()]
    return {f"socket:[{row[9]}]" for row in rows if row[1].endswith(f":{port:04X}") and row[3] == "0A"}


def _wait_gone(engines: Sequence[EngineServer], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while any(engine.members() for engine in engines):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
