"""How long a thread had to wait for a core."""

from __future__ import annotations

from pathlib import Path

STATISTICS = Path("/proc/thread-self/schedstat")


def queued_s(statistics: Path = STATISTICS) -> float | None:
    """Seconds that this thread could have run and had no core, since it began; None where the system does not say:
    Linux does, in ``schedstat`` (see ``Documentation/scheduler/sched-stats.rst`` of its source).
    """
    try:
        _, waited_ns, _ = statistics.read_text().split()
    except OSError:
        return None
    return int(waited_ns) * 1e-9
