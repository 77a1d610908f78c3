"""Engines as users run them, every mode side by side, driven by ``vllm bench serve``."""
