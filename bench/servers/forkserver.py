"""Starts vLLM's API servers by fork from a process that has imported vLLM: in 4 s instead of 28 s.

Three processes make a server on a CPU: API server, engine core, worker. vLLM spawns the second and the third, so each
of them imports everything again. Here the first is forked from this process, and the others are forked in turn.

`serve` runs in a process of its own and asserts that the process has one thread only. For each `forkclient.py` that
connects it forks a keeper, and the keeper forks the server into a process group of its own. The keeper adopts the
server's orphans, passes on the client's signals, and kills the group when the client is gone. When the whole group has
ended, it reports the exit status.

vLLM reads some variables at its import: OMP_NUM_THREADS, TORCH_COMPILE_DISABLE, VLLM_LOGGING_LEVEL. All servers of a
fork server must have the same values of these. Several API servers in one engine (``--api-server-count``) cannot be
forked: prometheus_client chooses at its import whether they count together.

The demo runs a fork server as its child, ``ForkServer``. The tests run ``serve`` in the process that their engines are
forked from.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import importlib
import importlib.metadata
import json
import multiprocessing
import os
import selectors
import signal
import socket
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import calm
from bench.servers import processes

CLIENT = Path(__file__).with_name("forkclient.py")
MODULES = (
    "layerpush.connector",
    "layerpush.plugin",
    "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector",
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl",
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.entrypoints.launchers.app",
    "vllm.entrypoints.openai.api_server",
    "vllm.engine.arg_utils",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.model_executor.models.llama",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "uvloop",
)
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def command(path: Path) -> list[str]:
    """The command that replaces `python -m vllm.entrypoints.openai.api_server`."""
    return [sys.executable, "-I", "-S", str(CLIENT), str(path)]


@functools.cache
def import_vllm() -> dict[str, str]:
    """Import all modules of a server, once, in calm mode if LAYERPUSH_CALM asks.

    Returns the environment variables that the imports have set.
    """
    before = dict(os.environ)
    calm.register()
    # Each engine looks for plugins several times, and each look reads all packages.
    importlib.metadata.entry_points = importlib.metadata.entry_points().select
    for module in MODULES:
        importlib.import_module(module)
    _set_up()
    assert len(os.listdir("/proc/self/task")) == 1, "forking a process with threads would deadlock"
    return {name: value for name, value in os.environ.items() if before.get(name) != value}


def _set_up() -> None:
    """Do once what every server would do again, and what goes through all objects: a child would copy their pages.

    No garbage collection of a child visits the objects of the imports, not even at vLLM's shutdown.
    """
    import vllm.logger
    import vllm.model_executor.models.registry
    import vllm.v1.engine.core
    import vllm.v1.executor.multiproc_executor
    from vllm.config.logging import LoggingConfig
    from vllm.platforms import current_platform

    vllm.logger.configure_logging(LoggingConfig())
    for module in (vllm.v1.engine.core, vllm.v1.executor.multiproc_executor):
        module.configure_logging = vllm.logger.configure_logging_if_needed
    current_platform.register_triton_kernel_overrides()
    type(current_platform).register_triton_kernel_overrides = staticmethod(lambda: None)
    if current_platform.is_cpu():  # elsewhere a model's import may open the device
        # vLLM looks at a new kind of model in a process of its own, which imports vLLM again.
        vllm.model_executor.models.registry._run_in_subprocess = lambda look: look()
    gc.collect()
    gc.freeze()
    gc.unfreeze = lambda: None


class ForkServerError(RuntimeError):
    """The fork server has ended."""


class ForkServer:
    """A fork server as a child process. ``prefix`` stands before its command, for example ``ip netns exec NAME``.
    Its servers run in the same namespace. ``environment`` has the variables that vLLM reads at its import.
    """

    def __init__(self, log_path: Path, environment: Mapping[str, str], prefix: Sequence[str] = ()) -> None:
        self.log_path = log_path
        self._folder = tempfile.TemporaryDirectory(prefix="layerpush-fork-")  # a socket's path must be short
        self._path = Path(self._folder.name) / "socket"
        program = [*prefix, sys.executable, "-m", "bench.servers.forkserver", str(self._path)]
        self._process = processes.start(program, log_path, env=environment)

    @property
    def command(self) -> list[str]:
        """The command that starts a server, once the fork server is ready."""
        return command(self._path)

    def is_ready(self) -> bool:
        """Whether servers can be started. Raises ``ForkServerError`` when it has ended."""
        if self._process.poll() is not None:
            log = self.log_path.read_text(errors="replace")
            raise ForkServerError(f"the fork server ended with status {self._process.returncode}.\n{log}")
        return self._path.exists()

    def group_of(self, client: int) -> int | None:
        """The process group of the server that the client with this pid requested; None before the server has one."""
        path = _group_path(self._path, client)
        text = path.read_text() if path.exists() else ""
        return int(text) if text else None

    def stop(self) -> None:
        """Kill the fork server. Stop its servers first: they would live on."""
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()


def end_with_parent() -> None:
    """From now on this process ends with the process that started it, and may have children of multiprocessing.

    It is a daemon, so that nobody waits for it. multiprocessing allows a daemon no children.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]


def count_starts(path: Path) -> int:
    """The number of servers that clients have requested at this socket."""
    log = _log(path)
    return len(log.read_text().splitlines()) if log.exists() else 0


def serve(path: str) -> None:
    """Listen at the Unix socket ``path`` until killed. Never returns. Ends with the process that started this one."""
    end_with_parent()
    import_vllm()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for keepers
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path + ".new")
        listener.listen(64)
        os.rename(path + ".new", path)  # the path exists when the socket accepts connections
        while True:
            connection, _ = listener.accept()
            with _log(Path(path)).open("a") as log:
                log.write(f"{time.time():.3f}\n")
            if os.fork() == 0:
                _leave(listener, connection, Path(path))
            connection.close()


def _log(path: Path) -> Path:
    """The file with one line for each start."""
    return path.with_suffix(".log")


def _group_path(path: Path, client: int) -> Path:
    """The file into which the keeper writes the server's process group."""
    return path.with_suffix(f".{client}")


def _leave(listener: socket.socket, connection: socket.socket, path: Path) -> None:
    """Run the keeper. Does not return."""
    try:
        listener.close()
        _keep(connection, path)
    except BaseException:  # noqa: BLE001  # the process ends here
        traceback.print_exc()
    finally:
        os._exit(0)


def _keep(connection: socket.socket, path: Path) -> None:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    request, files = _receive(connection)
    wake, awake = socket.socketpair()
    awake.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(awake.fileno(), warn_on_full_buffer=False)
    server = os.fork()
    if server == 0:
        for one in (connection, wake, awake):
            one.close()
        _become(request, files)
    with contextlib.suppress(OSError):  # the child does the same; the later call may fail
        os.setpgid(server, server)
    client, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    with contextlib.suppress(OSError):  # the run is over and its folder is gone: the client ends soon
        _group_path(path, client).write_text(str(server))
    for number in files:
        os.close(number)
    status = 0
    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ)
        selector.register(wake, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is wake:
                    wake.recv(1024)
                    continue
                numbers = connection.recv(64)
                for number in numbers or bytes([signal.SIGKILL]):
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(server, number)
                if not numbers:
                    selector.unregister(connection)
            try:
                while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                    if ended[0] == server:
                        status = os.waitstatus_to_exitcode(ended[1])
            except ChildProcessError:
                break
    with contextlib.suppress(OSError):
        connection.sendall(struct.pack("!i", status))


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """The client's request, and its standard input, output and error. Raises ``EOFError``."""
    data, files, _, _ = socket.recv_fds(connection, 1 << 16, 3)
    (size,) = struct.unpack("!I", data[:4])
    while len(data) < size + 4:
        more = connection.recv(1 << 16)
        if not more:
            raise EOFError("the client ended in the middle of its request")
        data += more
    request: dict[str, Any] = json.loads(data[4:])
    return request, files


def _become(request: dict[str, Any], files: list[int]) -> None:
    """Turn this process into the requested server. Does not return."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setpgid(0, 0)
        for here, there in enumerate(files):
            os.dup2(there, here)
        for number in files:
            os.close(number)
        os.environ.clear()
        os.environ.update(import_vllm() | request["environ"])
        os.chdir(request["cwd"])
        _run(request["arguments"])
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001  # the process ends here
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def fork_children() -> None:
    """From now on vLLM forks its engine cores and workers from this process, and spawns none."""
    from vllm import envs

    # vLLM sets the variable to "spawn" for its command line and for CPUs. This attribute takes precedence.
    envs.VLLM_WORKER_MULTIPROC_METHOD = "fork"
    # Otherwise a signal to an engine core would reach the API server's event loop.
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))


def _run(arguments: list[str]) -> None:
    from vllm.entrypoints.launchers.api_server.entry import main

    sys.argv = ["vllm.entrypoints.openai.api_server", *arguments]
    fork_children()
    main()


if __name__ == "__main__":
    serve(sys.argv[1])
