"""D's process: that of ``bench.push``. A script with the same argument."""

from __future__ import annotations

import sys

from bench.pair.meeting import run_decode
from bench.push.decode import DecodeEnd

if __name__ == "__main__":
    run_decode(DecodeEnd, sys.argv[1])
