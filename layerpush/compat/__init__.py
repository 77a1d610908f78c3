"""Everything layerpush knows of vLLM's private names (0.32; 0.33 differs little). No other folder may use them.

Nothing is imported here: `busy_wait` and `admission` are needed where neither NIXL nor a worker may be loaded.
"""
