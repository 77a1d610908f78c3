"""The records of a load on a decode rank: one when it is reported, and one when its parked blocks are free."""

from __future__ import annotations

from layerpush.core.wire import Accepted, Cancelled, Completion, Fail
from layerpush.decode.load_session import RETRY_S
from layerpush.telemetry.metrics.catalog import LOADS
from layerpush.telemetry.trace_records import LoadRecord
from tests.support.measured import measured
from tests.unit.test_loads import PATIENCE_S, World, registration


class RecordedWorld(World):
    def __init__(self, ranks: int = 1) -> None:
        super().__init__(ranks)
        self.records = self.engine.records

    @property
    def record(self) -> LoadRecord:
        (record,) = self.records
        return record


def test_a_completed_load_has_a_record_with_its_times() -> None:
    world = RecordedWorld()
    world.awaits()
    world.tick(1.0)
    world.receives(Accepted("r"))
    world.tick(2.0)
    assert world.records == []
    world.receives(Completion("r", 1))
    record = world.record
    assert (record.kind, record.request_id, record.outcome, record.reason) == ("load", "r", "completed", None)
    assert (record.engine_id, record.prefill_engine_id, record.blocks) == ("D", "P", 2)
    assert (record.t_awaited, record.t_registered, record.t_accepted) == (100.0, 100.0, 101.0)
    assert (record.t_settled, record.t_reported) == (103.0, 103.0)
    assert (record.t_parked, record.t_cleared) == (None, None)


def test_a_load_is_recorded_and_counted_before_the_engine_can_report_it() -> None:
    """The engine's main thread may take the load at once, and its report has the record's times. The engine may stop
    stepping then, and so its reports.
    """
    world = RecordedWorld()
    noted: list[tuple[int, int]] = []
    world.engine.on_report = lambda _, __: noted.append((len(world.records), measured(world.recorder).counted(LOADS)))
    world.awaits()
    world.receives(Completion("r", 1))
    assert noted == [(1, 1)]


def test_the_registration_time_is_the_time_of_sending() -> None:
    world = RecordedWorld()
    world.network.listening = {}
    world.awaits()
    world.now += 3
    world.network.answer("P", *world.agents)
    world.settle()
    world.receives(Completion("r", 1))
    assert (world.record.t_awaited, world.record.t_registered) == (100.0, 103.0)


def test_the_accepted_time_is_that_of_the_first_rank() -> None:
    world = RecordedWorld(ranks=2)
    world.awaits()
    world.receives(Accepted("r"), "p-1")
    world.tick(1.0)
    world.receives(Accepted("r"), "p-0")
    for agent in world.agents:
        world.receives(Completion("r", 2), agent)
    assert world.record.t_accepted == 100.0


def test_a_load_settles_before_its_report_if_the_engine_does_not_know_it_yet() -> None:
    world = RecordedWorld()
    world.awaits(known=False)
    world.receives(Completion("r", 1))
    world.tick(0.5)
    assert world.records == []
    world.engine.known.add("r")
    world.tick(0.5)
    assert (world.record.t_settled, world.record.t_reported) == (100.0, 101.0)


def test_the_record_of_a_failed_load_has_the_reason() -> None:
    world = RecordedWorld()
    world.awaiting("p-0")
    world.receives(Fail("r", 0, "a WRITE failed", True))
    assert (world.record.outcome, world.record.reason) == ("failed", "a WRITE failed")


def test_an_aborted_load_is_recorded_as_cancelled() -> None:
    world = RecordedWorld()
    world.awaiting("p-0")
    world.loads.abort("r", "aborted", world.now)
    world.receives(Cancelled("r"))
    assert (world.record.outcome, world.record.reason) == ("cancelled", "aborted")


def test_a_refused_load_is_recorded_as_failed() -> None:
    world = RecordedWorld()
    world.engine.known.add("r")
    world.loads.refuse("r", "it is odd", world.now)
    world.tick(1.0)
    assert (world.record.outcome, world.record.reason) == ("failed", "it is odd")
    assert (world.record.t_settled, world.record.t_reported, world.record.t_registered) == (100.0, 101.0, None)


def test_a_parked_load_has_a_second_record_when_its_blocks_are_free() -> None:
    world = RecordedWorld()
    world.awaiting("p-0")
    world.loads.time_out("r", "too late", world.now)
    world.tick(RETRY_S)
    world.tick(PATIENCE_S)
    first = world.record
    assert (first.outcome, first.reason, first.t_parked) == ("failed", "too late", 121.0)
    assert (first.t_reported, first.t_cleared) == (121.0, None)
    world.now += 5
    world.receives(Cancelled("r"))
    assert first.t_cleared is None, "a record does not change after its hand-over"
    assert len(world.records) == 2
    assert world.records[1].t_cleared == 126.0
    assert world.records[1].t_parked == 121.0


def test_a_second_request_with_the_same_id_has_its_own_record() -> None:
    world = RecordedWorld()
    world.awaits()
    world.loads.register(registration(), world.connections.address("P"), {}, world.now)
    world.tick(1.0)
    assert world.record.outcome == "failed"
    world.receives(Completion("r", 1))
    assert [record.outcome for record in world.records] == ["failed", "completed"]
