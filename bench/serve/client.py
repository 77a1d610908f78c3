"""``vllm bench serve`` in a process that stays up: loading vLLM for each call would take longer than the call.

``python -m bench.serve.client FD``: the other end of the socket sends the arguments of one call after the other.
"""

from __future__ import annotations

import sys
import traceback
from multiprocessing.connection import Connection


def main() -> None:
    with Connection(int(sys.argv[1])) as commands:
        from vllm.benchmarks.serve import add_cli_args
        from vllm.benchmarks.serve import main as bench_serve
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        parser = FlexibleArgumentParser(prog="vllm bench serve")
        add_cli_args(parser)
        commands.send(None)
        while True:
            try:
                words: list[str] = commands.recv()
            except EOFError:
                return
            print(f"\n$ vllm bench serve {' '.join(words)}", flush=True)
            try:
                bench_serve(parser.parse_args(words))
            except (Exception, SystemExit) as error:  # noqa: BLE001  # the other end gets any error
                traceback.print_exc()
                commands.send(f"{type(error).__name__}: {error}")
            else:
                commands.send(None)


if __name__ == "__main__":
    main()
