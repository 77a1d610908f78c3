"""The metrics of an engine that a test steps. Tests share the engines, so they compare differences."""

from tests.e2e import probes
from tests.e2e.enginehost import EngineHost
from tests.metrics_scrape import Scrape
from tests.support.waiting import until


def scrape(host: EngineHost) -> Scrape:
    return Scrape(host.call(probes.metrics))


def value(host: EngineHost, name: str, **labels: str) -> float:
    return scrape(host).value(name, **labels)


def wait_for(host: EngineHost, name: str, wanted: float, **labels: str) -> None:
    until(lambda: value(host, name, **labels) == wanted, f"{name} {labels} is {wanted}", pause_s=0.05)
