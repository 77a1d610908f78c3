"""One push on one prefill rank: its session, its link, its WRITEs and its record. Owned by the writer thread."""

from __future__ import annotations

from dataclasses import dataclass, field

from layerpush.prefill.outbox import PostedWrite, RankWrite
from layerpush.prefill.plan import ChunkPlan
from layerpush.prefill.protocol import Retract, State
from layerpush.prefill.session import Session
from layerpush.prefill.staging import Link
from layerpush.trace import ChunkRecord, PushRecord

BlockIds = tuple[list[int], ...]


@dataclass(slots=True)
class Push:
    session: Session
    record: PushRecord
    link: Link | None = None
    writes: list[PostedWrite] = field(default_factory=list)
    delegated: PostedWrite | None = None
    blocks: BlockIds | None = None
    step: int = 0
    stirred: bool = True
    withdrawn: bool = False
    overdue: bool = False
    retraction: Retract | None = None

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
