"""vLLM's Mooncake connector on a CPU, for the bench's mode `mooncake`: with the engine that ``scripts/mooncake`` makes.

Named by ``kv_connector_module_path``. Imported in an engine's processes only.
"""

from __future__ import annotations

import sys

from bench.serve.lineup import MOONCAKE_PACKAGES

sys.path.append(str(MOONCAKE_PACKAGES))

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import mooncake_connector
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import MooncakeConnector
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_utils import MooncakeBootstrapServer
from vllm.utils.network_utils import get_ip

__all__ = ["MooncakeConnector"]

if not torch.accelerator.is_available():
    torch.accelerator.current_device_index = lambda: 0  # the connector asks for it, and there is none

address_of = mooncake_connector.get_mooncake_bootstrap_addr
# vLLM's binds every address.
mooncake_connector.MooncakeBootstrapServer = lambda _, port: MooncakeBootstrapServer(get_ip(), port)
mooncake_connector.get_mooncake_bootstrap_addr = lambda config: (get_ip(), address_of(config)[1])
