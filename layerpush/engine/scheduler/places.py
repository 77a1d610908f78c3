"""Whether a prompt that P computes gets blocks on this decode engine in this step, or waits without any.

Blocks that wait for P serve nobody. So a prompt gets them only if all of these hold:

- they fit beside the running requests, which may each take ``HEADROOM`` further blocks;
- the prompts that are awaited hold at most their share of the cache; a prompt alone may hold more;
- no prompt before it waits: they keep their order.

A prompt that gets none does not stand in front of the requests behind it. If no prompt has got blocks for
``LONGEST_S`` seconds, the first one may exceed the share: P may have no room for an awaited prompt before it has sent
this one. If none is awaited either, it stands in front, as any request of vLLM: so requests that never end to come
cannot keep it out. Later the running requests may need blocks that an awaited prompt holds: ``missing`` says how many.
Pure.
"""

from __future__ import annotations

import math

HEADROOM = 1.5
LONGEST_S = 10.0
ASK_EVERY_S = 0.1
"""A load that is asked to give its blocks back needs about this time to do so."""


class Places:
    """Runs in the scheduler's thread. ``blocks`` is the size of the cache, of which awaited prompts may hold ``share``.

    Time is the caller's clock. ``has_place`` and ``takes`` are asked while a step is scheduled, ``step_ended`` follows.
    """

    def __init__(self, blocks: int, share: float) -> None:
        self._most = int(share * blocks)
        self._growth = 0
        """Blocks that the running requests may take soon: one each, in each group of layers."""
        self._refused = 0
        self._full = False
        self._failed = False
        """In the last step vLLM had no blocks for a prompt. In this one no prompt holds up the requests behind it."""
        self._since: float | None = None
        """When prompts began to be refused, and none got blocks since."""
        self._asked_at = -math.inf
        self.waiting = 0
        """Prompts that got no blocks in the last step."""

    def has_place(self) -> bool:
        """Whether the next prompt of the queue may be looked at: no prompt before it was refused in this step."""
        if self._refused:
            self._refused += 1
        return not self._refused

    def takes(self, need: int, free: int, awaited: int, now: float) -> bool:
        """Whether a prompt may take ``need`` of the ``free`` blocks. Awaited prompts hold ``awaited`` ones."""
        overdue = self._since is not None and now - self._since >= LONGEST_S
        fits = (need + HEADROOM * self._growth <= free and not self._failed) or (overdue and not awaited)
        if fits and (overdue or not awaited or awaited + need <= self._most):
            return True
        self._since = now if self._since is None else self._since
        self._refused, self._full = 1, not fits
        return False

    def placed(self) -> None:
        """A prompt has got its blocks."""
        self._since = None

    def step_ended(self, growth: int, *, failed: bool) -> bool:
        """A step is scheduled. Its requests may take ``growth`` blocks soon. ``failed``: vLLM had no blocks for a
        prompt that ``takes`` had let through. Returns whether a prompt does not fit.
        """
        full = self._full or failed
        if not self._refused and not failed:
            self._since = None
        self.waiting, self._growth, self._failed = self._refused + failed, growth, failed
        self._refused, self._full = 0, False
        return full

    def missing(self, free: int, now: float) -> int:
        """Blocks that awaited prompts should give back now, so that no running request is preempted for one."""
        if free >= self._growth or now < self._asked_at + ASK_EVERY_S:
            return 0
        self._asked_at = now
        return self._growth - free
