"""The TCP ports of each part of the tests. No two parts share a port: xdist runs them at the same time.

All are below the ports that the system gives to connecting sockets (from 32768). An engine whose side channel's port is
taken does not start.
"""

from __future__ import annotations

CONNECTOR_PORTS = range(10000, 14000)
ALLOCATOR_PORTS = range(14000, 14010)
DOCTOR_PORTS = range(14100, 14200)
PEER_CHECK_PORTS = range(14200, 14300)
NIXL_PROBE_PORTS = range(14300, 14400)
SIDE_CHANNEL_PORTS = range(14400, 14600)
DOOR_PORTS = range(14600, 14800)
DATA_PARALLEL_PREFILL_PORTS = range(18700, 18750)
DATA_PARALLEL_DECODE_PORTS = range(18750, 18800)
ENDPOINT_PORTS = range(18800, 18900)
EARLY_ANSWER_PORTS = range(18900, 19000)
PROXY_PORTS = range(19100, 19200)
DOCS_COMMANDS_PORTS = range(19200, 19400)
ROUTER_PORTS = range(19400, 19500)
PROMETHEUS_PORTS = range(19500, 19600)
SERVED_PORTS = range(19600, 19700)
SPANS_PORTS = range(19700, 19800)
LMCACHE_PORTS = range(19800, 19900)
WRITER_ENDS_PORTS = range(19900, 20000)
ENGINES_PORTS = range(20000, 26000)
PROBE_PORTS = range(26000, 26400)
SOAK_PORTS = range(28000, 32000, 2)
"""A second rank has the port after its engine's port."""
