"""All uses of vLLM's private names (0.32; 0.33 differs little). No other folder may use them.

There is one adapter class for each class of vLLM that layerpush extends: `VllmPushWorker`, `VllmPushScheduler`,
`LayerwiseMetadata`, `LayerPushStats`, `LayerPushPromMetrics`. This file imports nothing: `admission` runs in processes
that may load neither NIXL nor a worker.
"""
