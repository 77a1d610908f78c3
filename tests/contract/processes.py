"""Processes with NIXL, forked from one that has imported it, and UCX's settings in them."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.context import ForkServerContext

LOOPBACK = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "lo"}


def context() -> ForkServerContext:
    """A process of the tests has one fork server, whichever test starts it, with the environment of that moment: a
    forked process calls ``set_ucx``.
    """
    forking = multiprocessing.get_context("forkserver")
    forking.set_forkserver_preload(["nixl._api", "tests.contract.restarted"])
    return forking


def set_ucx(settings: dict[str, str]) -> None:
    """Give this process these variables of UCX, and no others. Call it before the first NIXL agent of the process."""
    for name in [name for name in os.environ if name.startswith("UCX_")]:
        del os.environ[name]
    os.environ.update(settings)
