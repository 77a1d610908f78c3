"""All instances, and the choice of one for a request."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from layerpush.apps.proxy.body import RequestBody
from layerpush.apps.proxy.errors import ProxyError
from layerpush.apps.proxy.instance import Instance, Role
from layerpush.apps.proxy.policy import Policy, choose
from layerpush.apps.proxy.settings import Settings


class Fleet:
    """The listed prefill and decode instances. Used by the event loop's thread only."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._instances: dict[Role, list[Instance]] = {"prefill": [], "decode": []}
        self._policies: dict[Role, Policy] = {
            "prefill": settings.prefill_policy or settings.policy,
            "decode": settings.decode_policy or settings.policy,
        }
        self._turns: dict[Role, int] = {"prefill": 0, "decode": 0}

    def __iter__(self) -> Iterator[Instance]:
        return iter([*self._instances["prefill"], *self._instances["decode"]])

    def update(self, urls: Mapping[Role, Sequence[str]]) -> None:
        """List these instances, and no others. An instance that is no longer listed only ends its requests."""
        for role, listed in urls.items():
            known = {each.url: each for each in self._instances[role]}
            self._instances[role] = [known.get(url) or Instance(role, url, self._settings) for url in listed]

    @property
    def ready(self) -> bool:
        """Whether each role has a healthy instance."""
        return all(self.healthy(role) for role in self._instances)

    def healthy(self, role: Role) -> list[Instance]:
        """The healthy instances of a role."""
        return [each for each in self._instances[role] if each.healthy]

    def pick(self, role: Role, body: RequestBody, avoid: Collection[Instance] = ()) -> Instance | None:
        """A healthy instance that is not in ``avoid``, by the role's policy; None if there is none."""
        candidates = [each for each in self.healthy(role) if each not in avoid]
        if not candidates:
            return None
        turn = self._turns[role]
        self._turns[role] += 1
        return candidates[choose(self._policies[role], candidates, turn, body.prefix)]

    def doubtful(self, role: Role) -> list[Instance]:
        """Instances that a failed request made unhealthy, and that the next check may make healthy again."""
        return [each for each in self._instances[role] if each.doubtful]

    def none_left(self, role: Role) -> ProxyError:
        """The error for a request for which no instance is left."""
        reason = "/health names each engine and its problem" if self._instances[role] else "none is known yet"
        return ProxyError(503, f"no healthy {role} instance: {reason}", retry_after_s=1)
