"""vLLM servers on this machine: started, watched and stopped, for the demo, for benchmarks and for tests."""
