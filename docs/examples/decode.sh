#!/usr/bin/env bash
# D on this machine, without a GPU. In a checkout, in its environment: docs/examples/decode.sh MODEL
set -euo pipefail
export LAYERPUSH_CALM=1 PYTHONPATH=$PWD:$PWD/bench/calm  # for few cores: docs/troubleshooting.md
export OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind VLLM_CPU_KVCACHE_SPACE=1 VLLM_HOST_IP=127.0.0.1
export UCX_TLS=tcp,self UCX_NET_DEVICES=lo GLOO_SOCKET_IFNAME=lo
export VLLM_NIXL_SIDE_CHANNEL_HOST=127.0.0.1 VLLM_NIXL_SIDE_CHANNEL_PORT=5700
exec python -m vllm.entrypoints.openai.api_server --model "$1" --host 127.0.0.1 --port 8200 --enforce-eager --kv-transfer-config \
  '{"kv_connector": "LayerwisePushConnector", "kv_role": "kv_consumer",
    "kv_connector_extra_config": {"trace_dir": "build/trace", "allowed_hosts": ["127.0.0.1"]}}'
