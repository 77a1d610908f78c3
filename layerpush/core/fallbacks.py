"""Why one request is pushed whole where others go layer by layer; other reasons are an engine's, in its own words."""

SHORT_PROMPT = "the prompt is shorter than layerwise_min_tokens"
LATE_REGISTRATION = "no decode engine had registered when prefill finished"
