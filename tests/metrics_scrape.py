"""``/metrics`` as Prometheus reads it."""

from __future__ import annotations

from prometheus_client import REGISTRY, generate_latest
from prometheus_client.parser import text_string_to_metric_families


class Scrape:
    """The samples of a text, by default of this process's registry."""

    def __init__(self, text: str | None = None) -> None:
        text = generate_latest(REGISTRY).decode() if text is None else text
        families = text_string_to_metric_families(text)
        self.samples = [sample for family in families for sample in family.samples]

    @property
    def names(self) -> set[str]:
        return {sample.name for sample in self.samples}

    def value(self, name: str, **labels: str) -> float:
        """The sum of the samples with these labels; ``name`` without vLLM's prefix and ours."""
        found = [
            sample.value
            for sample in self.samples
            if sample.name == f"vllm:layerpush_{name}" and labels.items() <= sample.labels.items()
        ]
        assert found, f"no sample of {name} with {labels}"
        return sum(found)

    def label_values(self, name: str, label: str) -> set[str]:
        return {sample.labels[label] for sample in self.samples if sample.name == name and label in sample.labels}
