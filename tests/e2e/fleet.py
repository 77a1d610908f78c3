"""The engines of one test session: started when first asked for, shared, a few at a time."""

import pathlib
from collections import OrderedDict
from collections.abc import Collection, Iterator

from tests.e2e.enginehost import EngineHost, free_ports
from tests.e2e.enginespec import EngineSpec
from tests.e2e.models import ModelShelf

MAX_LIVE = 6


class Fleet:
    """Hosts by spec. A host that broke is replaced; beyond `MAX_LIVE` the least recently used ones are stopped.

    `favourites` are stopped last: they serve most of the tests.
    """

    def __init__(
        self, models: ModelShelf, scratch: pathlib.Path, ports: tuple[int, int], favourites: Collection[EngineSpec]
    ) -> None:
        self._models = models
        self._favourites = favourites
        self._scratch = scratch
        self._take_port = free_ports(*ports)
        self._hosts: OrderedDict[EngineSpec, EngineHost] = OrderedDict()

    def get(self, *specs: EngineSpec) -> list[EngineHost]:
        """Live, ready hosts for the specs, in their order; the missing ones start at the same time."""
        missing = [spec for spec in specs if spec not in self._hosts or self._hosts[spec].broken]
        for spec in missing:
            if spec in self._hosts:
                self._hosts.pop(spec).stop()
        self._make_room(len(missing), keep=set(specs))
        for spec in missing:
            self._hosts[spec] = EngineHost(spec, self._models.path(spec.model), self._scratch, self._take_port())
        for spec in specs:
            self._hosts.move_to_end(spec)
            self._hosts[spec].wait_ready()
        return [self._hosts[spec] for spec in specs]

    def live(self) -> Iterator[EngineHost]:
        return iter(list(self._hosts.values()))

    def discard(self, host: EngineHost) -> None:
        self._hosts.pop(host.spec, None)
        host.stop()

    def stop(self) -> None:
        for host in self._hosts.values():
            host.begin_stop()
        while self._hosts:
            self._hosts.popitem()[1].stop()

    def _make_room(self, count: int, keep: set[EngineSpec]) -> None:
        idle = sorted((spec for spec in self._hosts if spec not in keep), key=self._favourites.__contains__)
        excess = idle[: max(0, len(self._hosts) + count - MAX_LIVE)]
        for spec in excess:
            self._hosts[spec].begin_stop()
        for spec in excess:
            self._hosts.pop(spec).stop()
