"""Two processes, P and D, with real NIXL between them and no vLLM, for the benchmarks of the transport."""
