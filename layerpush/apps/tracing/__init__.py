"""`layerpush trace`: merges, draws and summarizes the trace files that workers write into ``trace_dir``."""
