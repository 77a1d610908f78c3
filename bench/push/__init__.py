"""One WRITE by every plan between two processes with real NIXL and no model. Run with ``python -m bench.push``."""
