"""GPU kernels of layerpush (torch and triton only, no vLLM); gather and scatter follow."""
