"""The time for which a thread waited for a core."""

from __future__ import annotations

from pathlib import Path

STATISTICS = Path("/proc/thread-self/schedstat")


def queued_s(statistics: Path = STATISTICS) -> float | None:
    """Seconds that this thread has waited for a core, since its start; None if the system does not report them:
    Linux does, in ``schedstat`` (see ``Documentation/scheduler/sched-stats.rst`` of its source).
    """
    try:
        ran_ns, waited_ns, _ = map(int, statistics.read_text().split())
    except (OSError, ValueError):
        return None
    return waited_ns * 1e-9 if ran_ns else None  # 0 from a kernel that does not count
