"""Two processes, P and D, with real NIXL between them and no vLLM: what the benchmarks of the transport share."""
