"""The entry point of a host process. Its import is cheap: the test process never loads vLLM."""

from multiprocessing.connection import Connection

from tests.e2e.enginespec import EngineSpec


def run_host(
    spec: EngineSpec, engine_id: str, port: int, model: str, log_path: str, trace_dir: str, pipe: Connection
) -> None:
    from tests.e2e.hostmain import main

    main(spec, engine_id, port, model, log_path, trace_dir, pipe)
