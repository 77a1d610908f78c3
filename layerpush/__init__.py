"""Layer-wise pipelined KV push for vLLM prefill/decode disaggregation."""

__version__ = "0.2.0"
