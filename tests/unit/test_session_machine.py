"""The session under everything that can happen to it, in any order: ``PushWorld`` checks each step."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from layerpush.core import push_protocol
from layerpush.core.push_policy import Policy
from layerpush.core.push_protocol import State
from tests.unit.builders import blocks_of
from tests.unit.session_world import PushWorld, Shape

pytestmark = pytest.mark.exhaustive  # `test_session_explored.py` walks every order of events of smaller requests
CONNECTED = {State.STREAMING, State.REWINDING, State.DRAINING}


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    tokens = draw(st.integers(1, 60))
    groups = draw(st.integers(1, 2))
    sizes = tuple(draw(st.sampled_from([4, 8, 16])) for _ in range(groups))
    layer_groups = (*range(groups), *draw(st.lists(st.integers(0, groups - 1), max_size=3)))
    policy = Policy(
        by_layer=draw(st.booleans()),
        min_write_bytes=draw(st.sampled_from([0, 1, 30, 100, 10_000])),
        max_in_flight=draw(st.integers(1, 4)),
        streams=draw(st.integers(0, 9)) > 0,
    )
    return Shape(
        tokens,
        layer_groups,
        sizes,
        wanted=tuple(draw(st.integers(0, blocks_of(tokens, size))) for size in sizes),
        policy=policy,
        nulls=(0, draw(st.integers(0, 3))),
    )


class PushMachine(RuleBasedStateMachine):
    world: PushWorld

    @initialize(shape=shapes(), size=st.integers(1, 60))
    def begin(self, shape: Shape, size: int) -> None:
        self.world = PushWorld(shape)
        self.world.plan(size)

    @precondition(lambda self: self.world.running and not self.world.unready)
    @precondition(lambda self: self.world.computed < self.world.shape.tokens)
    @rule(size=st.integers(1, 40))
    def plan(self, size: int) -> None:
        self.world.plan(size)

    @precondition(lambda self: self.world.running and self.world.chunks)
    @rule(data=st.data())
    def hook(self, data: st.DataObject) -> None:
        self.world.hook(data.draw(st.sampled_from(range(len(self.world.shape.layer_groups)))))

    @precondition(lambda self: self.world.running and self.world.unready)
    @rule()
    def sweep(self) -> None:
        self.world.sweep()

    @precondition(lambda self: self.world.running and self.world.epoch > 0)
    @rule(data=st.data())
    def stale_hook(self, data: st.DataObject) -> None:
        self.world.stale_hook(data.draw(st.sampled_from(range(len(self.world.shape.layer_groups)))))

    @precondition(lambda self: self.world.session.accepts(push_protocol.PostReady))
    @rule()
    def pump(self) -> None:
        self.world.send(push_protocol.PostReady())

    @precondition(lambda self: self.world.registrable)
    @rule()
    def register(self) -> None:
        self.world.register()

    @precondition(lambda self: self.world.state is State.CONNECTING)
    @rule()
    def connect(self) -> None:
        self.world.send(push_protocol.Connected())

    @precondition(lambda self: self.world.state is State.CONNECTING)
    @rule()
    def refuse(self) -> None:
        self.world.send(push_protocol.Refused("unequal blocks"))

    @precondition(lambda self: self.world.session.accepts(push_protocol.Failed))
    @rule(dice=st.integers(0, 5))
    def fail(self, dice: int) -> None:
        if dice == 0:  # seldom: it ends all the fun
            self.world.fail()

    @precondition(lambda self: self.world.in_flight)
    @rule(data=st.data())
    def land(self, data: st.DataObject) -> None:
        self.world.land(data.draw(st.sampled_from(sorted(self.world.in_flight))))

    @precondition(lambda self: self.world.in_flight)
    @rule(data=st.data(), dice=st.integers(0, 3))
    def lose(self, data: st.DataObject, dice: int) -> None:
        if dice == 0:
            self.world.lose(data.draw(st.sampled_from(sorted(self.world.in_flight))))

    @precondition(lambda self: self.world.revocable and self.world.chunks)
    @rule()
    def preempt(self) -> None:
        self.world.preempt(announced=True)

    @precondition(lambda self: self.world.running and self.world.chunks)
    @rule(size=st.integers(1, 40))
    def preempt_unannounced(self, size: int) -> None:
        """The next plan's epoch says it too."""
        self.world.preempt(announced=False)
        self.world.plan(size)

    @precondition(lambda self: self.world.running and self.world.prompt_ready)
    @rule()
    def finish(self) -> None:
        self.world.finish()

    @precondition(lambda self: self.world.droppable)
    @rule(dice=st.integers(0, 3))
    def drop(self, dice: int) -> None:
        if dice == 0:
            self.world.drop()

    @precondition(lambda self: self.world.state is State.NOTIFYING)
    @rule()
    def confirm_tell(self) -> None:
        self.world.confirm_tell()

    @precondition(lambda self: self.world.pushed_by_upstream)
    @rule()
    def post_whole(self) -> None:
        self.world.post_whole()

    @precondition(lambda self: self.world.upstream_busy)
    @rule(lost=st.sampled_from([None, None, "cut off"]))
    def deliver(self, lost: str | None) -> None:
        self.world.deliver(lost)

    @precondition(lambda self: self.world.withdrawable)
    @rule(dice=st.integers(0, 3))
    def withdraw(self, dice: int) -> None:
        if dice == 0:
            self.world.withdraw()

    @precondition(lambda self: self.world.state is State.CLOSED)
    @rule()
    def rest(self) -> None:
        """Nothing can happen to a closed session."""

    @invariant()
    def the_account_agrees(self) -> None:
        if not hasattr(self, "world"):
            return
        session = self.world.session
        assert set(session.in_flight) - {push_protocol.WHOLE.id} == set(self.world.in_flight)
        if self.world.in_flight:
            assert session.state in CONNECTED

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.drive_home()


PushMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
TestPushMachine = PushMachine.TestCase
