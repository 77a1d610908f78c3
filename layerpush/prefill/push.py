"""One push on one prefill rank: its session, its link, its WRITEs and its record. Owned by the writer thread."""

from __future__ import annotations

from dataclasses import dataclass, field

from layerpush.core.push_protocol import Retract, State
from layerpush.core.push_session import Session
from layerpush.core.step_plan import ChunkPlan
from layerpush.telemetry.trace_records import ChunkRecord, PushRecord
from layerpush.transport.link import Link
from layerpush.transport.packing.packer import PushWindow
from layerpush.transport.writes import PostedWrite, RankWrite

BlockIds = tuple[list[int], ...]


@dataclass(slots=True)
class Push:
    session: Session
    record: PushRecord
    link: Link | None = None
    window: PushWindow | None = None
    writes: list[PostedWrite] = field(default_factory=list)
    delegated: PostedWrite | None = None
    blocks: BlockIds | None = None
    step: int = 0
    dirty: bool = True
    withdrawn: bool = False
    overdue: bool = False
    retraction: Retract | None = None
    registered_at: float | None = None
    finished_at: float | None = None
    busy_since: float | None = None
    transfer_s: float = 0.0
    """How long at least one WRITE was on its way, in seconds."""
    accounted: bool = False

    @property
    def request_id(self) -> str:
        return self.session.request_id

    @property
    def in_flight(self) -> bool:
        return bool(self.writes or self.delegated is not None)

    @property
    def parts(self) -> list[RankWrite]:
        """Every WRITE on the wire."""
        posted = [*self.writes, self.delegated] if self.delegated is not None else self.writes
        return [part for write in posted for part in write.parts]

    @property
    def awaits_peer(self) -> bool:
        return self.is_unclaimed or self.session.state in (State.CONNECTING, State.DELEGATED)

    @property
    def is_unclaimed(self) -> bool:
        """No decode engine has registered yet, and one may."""
        return self.session.state in (State.WAITING, State.DELEGATED) and self.session.registration is None

    @property
    def exposed_s(self) -> float | None:
        """Seconds from when nothing but the transfer was missing until the completion was sent; a whole request's
        rides on its last WRITE. None if either is not known.
        """
        record = self.record
        ready = self.finished_at if record.t_last_ready is None else record.t_last_ready
        done = record.t_last_landed if record.t_notified is None else record.t_notified
        if ready is None or done is None:
            return None
        return max(0.0, done - max(ready, ready if self.registered_at is None else self.registered_at))

    def posting(self, at: float) -> None:
        """A WRITE is posted, beside which others may be in flight. Seconds."""
        if self.busy_since is None:
            self.busy_since = at

    def ended(self, at: float) -> None:
        """A WRITE has ended, perhaps the last one in flight. Seconds."""
        if self.busy_since is not None and not self.in_flight:
            self.transfer_s += at - self.busy_since
            self.busy_since = None

    def planned(self, chunk: ChunkPlan, step: int, at: float) -> None:
        """Note in the record that a step took up a chunk."""
        self.step = step
        record = self.record
        if chunk.epoch != record.epoch:
            record.restart(chunk.epoch)
        if record.t_first_planned is None:
            record.t_first_planned = at
        record.tokens = chunk.prompt_tokens
        first, end = chunk.groups[0].first, chunk.groups[0].end
        record.chunks.append(ChunkRecord(first, end, at))
