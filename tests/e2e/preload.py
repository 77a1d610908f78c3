"""Imported once by the fork server, so that each engine host starts in about 3 s instead of 15 s.

Only modules that start no thread and open no device may be imported here: hosts are forked from this process.
"""

import os

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "LAYERPUSH_CALM": "1",
    "OMP_NUM_THREADS": "1",
    "TORCH_COMPILE_DISABLE": "1",  # some samplers compile a kernel at their first use
    "UCX_MEM_EVENTS": "n",  # only for registered memory, which TCP lacks; the hooks take 0.4 s of each start
    "UCX_NET_DEVICES": "lo",
    "UCX_TLS": "tcp,self",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
    "VLLM_LOGGING_COLOR": "0",  # chosen before the fork, where the output may be a terminal
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SSM_CONV_STATE_LAYOUT": "DS",  # NIXL transfers Mamba layers in this layout only
}
os.environ.update(ENVIRONMENT)

import torch  # noqa: E402  # reads the environment

from bench.servers.forkserver import import_vllm  # noqa: E402

torch.set_num_threads(1)
import_vllm()

from layerpush.engine.scheduler import side_channel  # noqa: E402  # vLLM is loaded by import_vllm only
from layerpush.transport import connections  # noqa: E402

side_channel.WAIT_S = 0.05  # an engine's end waits so long for its listener
connections.RETRY_S = 0.2  # between two tries of a handshake
