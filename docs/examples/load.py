"""`vllm bench serve`, also where vLLM has no `vllm` command, as its CPU build: python docs/examples/load.py --help"""

from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

if __name__ == "__main__":
    parser = FlexibleArgumentParser(prog="load.py")
    add_cli_args(parser)
    main(parser.parse_args())
