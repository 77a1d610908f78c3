"""`layerpush trace`: what the workers wrote into ``trace_dir``, put together, drawn and summed up."""
