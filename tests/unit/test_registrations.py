"""What decode engines ask of a prefill rank, and what they are told: nothing of it is forgotten or said too early."""

from __future__ import annotations

import logging

import msgspec
import pytest

from layerpush.core.liveness import Verdict
from layerpush.core.pending_registrations import KEPT, KEPT_S
from layerpush.core.push_protocol import ReportFailure
from layerpush.core.wire import Accepted, Cancel, Cancelled, Fail, Message, Ping, Pong, Registration, Window
from layerpush.prefill import decode_peers, registrations
from layerpush.prefill.decode_peers import address_of
from layerpush.prefill.registrations import ENDED_S, MAX_REASON, PROBES, Registrations
from layerpush.telemetry.peer_errors import PeerErrors
from tests.unit.peers_rig import Town


def base_id(request_id: str) -> str:
    """Ids are a router's id, a slash and what an engine has added."""
    return request_id.partition("/")[0]


def asks(
    request_id: str = "a/d",
    engine: str = "D",
    layerpush: int = 1,
    prefill: str | None = None,
    digest: str | None = None,
    host: str = "10.0.0.7",
    blocks: tuple[int, ...] = (1, 2),
) -> Registration:
    return Registration(
        request_id=request_id,
        decode_engine_id=engine,
        decode_host=host,
        decode_port=5600,
        decode_tp_size=2,
        local_block_ids=(blocks,),
        layerpush=layerpush,
        prefill_request_id=prefill,
        prompt_digest=digest,
    )


def cancel_of(registration: Registration) -> Cancel:
    return Cancel(
        registration.request_id,
        registration.decode_engine_id,
        registration.decode_host,
        registration.decode_port,
        registration.decode_tp_size,
    )


class ScriptedWriter:
    """``unclaimed`` requests wait for a registration; ``on_the_wire`` those that a WRITE is under way for."""

    def __init__(self) -> None:
        self.unclaimed: list[str] = []
        self.on_the_wire: set[str] = set()
        self.engines_in_flight: set[str] = set()
        self.registrations: list[tuple[str, Registration]] = []
        self.withdrawn: list[tuple[str, tuple[str, str]]] = []
        self.failed: list[tuple[str, str]] = []
        self.live: dict[tuple[str, str], str] = {}
        """Which request serves a registration."""

    def waiting(self) -> list[str]:
        return self.unclaimed

    def register(self, request_id: str, registration: Registration) -> None:
        self.unclaimed.remove(request_id)
        self.registrations.append((request_id, registration))
        self.live[registration.key] = request_id

    def serving(self, key: tuple[str, str]) -> str | None:
        return self.live.get(key)

    def cancel(self, request_id: str, key: tuple[str, str]) -> bool:
        self.withdrawn.append((request_id, key))
        return request_id not in self.on_the_wire

    def fail_engine(self, engine_id: str, reason: str) -> None:
        self.failed.append((engine_id, reason))


class World(Town):
    def __init__(self) -> None:
        super().__init__()
        self.writer = ScriptedWriter()
        self.peer_errors = PeerErrors(logging.getLogger("test"))
        self.digests: dict[str, str] = {}
        self.network.listening = {"D": ("d-0", "d-1"), "E": ("e-0",)}
        self.registrations = Registrations(
            self.writer,  # type: ignore[arg-type]
            self.peers,
            self.probe,
            self.peer_errors,
            base_id,
            self.digests,
        )
        self.peers.on_lost = self.registrations.peers.lost

    def says(self, registration: Registration, sender: str = "d-0") -> None:
        self.registrations.on_registration(sender, registration, self.now)
        self.settle()

    def cancels(self, registration: Registration, sender: str = "d-0") -> None:
        self.registrations.on_cancel(sender, cancel_of(registration), self.now)
        self.settle()

    def retracts(self, registration: Registration, reason: str, drained: bool, withdrawn: bool = False) -> None:
        self.registrations.report_failure(ReportFailure(registration, 3, reason, drained, withdrawn), self.now)
        self.settle()

    def ends(self, request_id: str, failure: str | None) -> None:
        self.registrations.ended(request_id, failure, self.now)
        self.settle()

    def tick(self) -> None:
        self.registrations.tick(self.now)
        self.settle()

    def heard(self, *ranks: str) -> list[Message]:
        """What decode engine D has been told since the last look: each of its ranks the same."""
        taken = self.mail.taken()
        mail = {rank: [message for agent, message in taken if agent == rank] for rank in ranks or ("d-0", "d-1")}
        assert len(taken) == sum(map(len, mail.values()))
        (first, *others) = mail.values()
        assert all(other == first for other in others)
        return first

    def takes(self, request_id: str = "a/p") -> Registration | None:
        """The request begins, and is served if it had been registered."""
        registration = self.registrations.take(request_id, self.now)
        if registration is not None:
            self.writer.live[registration.key] = request_id
        return registration

    def closes(self, registration: Registration) -> None:
        """Nothing is left of the push that served it."""
        del self.writer.live[registration.key]

    def served(self, registration: Registration | None = None, request_id: str = "a/p") -> Registration:
        """A registration whose request had begun."""
        registration = registration or asks()
        self.writer.unclaimed.append(request_id)
        self.says(registration)
        assert self.writer.registrations[-1] == (request_id, registration)
        self.mail.taken()
        return registration


# What is asked for, and which request is meant.


def test_registered_first_it_is_accepted_and_kept_for_its_request() -> None:
    world, wanted = World(), asks()
    world.says(wanted)
    assert world.heard() == [Accepted("a/d")]
    assert world.registrations.take("b/p", world.now) is None
    assert world.registrations.take("a/p", world.now) == wanted
    assert world.registrations.take("a/p", world.now) is None


def test_what_its_request_has_taken_can_be_withdrawn_and_is_not_kept_again() -> None:
    world, wanted = World(), asks()
    world.says(wanted)
    assert world.takes() == wanted
    world.says(wanted, "d-1")
    assert world.registrations.take("a/q", world.now) is None
    world.cancels(wanted)
    assert world.writer.withdrawn == [("a/p", ("D", "a/d"))]


def test_registered_after_its_request_it_goes_to_the_writer() -> None:
    world, wanted = World(), asks()
    world.writer.unclaimed = ["b/p", "a/p"]
    world.says(wanted)
    assert world.writer.registrations == [("a/p", wanted)]
    assert world.heard() == [Accepted("a/d")]
    assert world.registrations.take("a/p", world.now) is None


@pytest.mark.parametrize("begun", [True, False])
def test_every_rank_registers_and_the_first_counts_for_all(begun: bool) -> None:
    world = World()
    world.writer.unclaimed = ["a/p", "a/q"] if begun else []
    world.says(asks(), "d-0")
    world.says(asks(), "d-1")
    world.says(asks(), "d-0")
    assert len(world.writer.registrations) == begun
    assert set(world.heard()) == {Accepted("a/d")}, "a rank that missed it hears it again"
    assert (world.registrations.take("a/p", world.now) is None) is begun


def test_a_stock_engine_is_told_nothing() -> None:
    world = World()
    wanted = world.served(asks(layerpush=0))
    world.says(wanted, "d-1")
    world.retracts(wanted, "cut off", drained=False)
    world.retracts(wanted, "cut off", drained=True)
    world.ends("a/p", "cut off")
    world.says(asks("c/d", layerpush=0))
    world.now += KEPT_S
    world.tick()
    assert world.mail.sent == []
    assert world.network.handshakes == []


def test_the_request_that_is_named_goes_before_one_that_may_be_meant() -> None:
    world, wanted = World(), asks(prefill="x/p2")
    world.writer.unclaimed = ["a/p", "x/p1", "x/p2"]
    world.says(wanted)
    assert world.writer.registrations == [("x/p2", wanted)]


def test_equal_base_ids_are_told_apart_by_their_prompts() -> None:
    world = World()
    world.digests.update({"a/p1": "one", "a/p2": "two"})
    world.writer.unclaimed = ["a/p1", "a/p2"]
    world.says(asks("a/d2", digest="two"))
    world.says(asks("a/d3", digest="three"))
    assert [request_id for request_id, _ in world.writer.registrations] == ["a/p2"]
    world.says(asks("a/d1", digest="one"))
    assert [request_id for request_id, _ in world.writer.registrations] == ["a/p2", "a/p1"]
    world.digests["a/p3"] = "three"
    assert world.registrations.take("a/p3", world.now) == asks("a/d3", digest="three")


def test_a_request_that_is_named_but_has_another_prompt_is_not_meant() -> None:
    world = World()
    world.digests.update({"a/p": "one"})
    world.writer.unclaimed = ["a/p"]
    world.says(asks("b/d", prefill="a/p", digest="two"))
    assert world.writer.registrations == []
    assert Fail in map(type, world.heard()), "it would wait for ever"


def test_a_registration_that_came_before_the_request_that_it_names_is_refused_too() -> None:
    world = World()
    world.says(asks("b/d", prefill="a/p", digest="two"))
    world.digests["a/p"] = "one"
    assert world.registrations.take("a/p", world.now) is None
    assert Fail in map(type, world.heard())
    assert world.registrations.pending == 0


def test_other_prompts_of_a_request_that_is_named_wait_for_their_own() -> None:
    world = World()
    world.digests["cmpl-a-0/p"] = "one"
    world.writer.unclaimed = ["cmpl-a-0/p"]
    world.says(asks("cmpl-a-1/d", prefill="cmpl-a-0/p", digest="two"))
    assert world.heard() == [Accepted("cmpl-a-1/d")]
    assert world.registrations.pending == 1


@pytest.mark.parametrize("digest", ["same", None])
@pytest.mark.parametrize(
    ("at_p", "at_d"),
    [
        ("chatcmpl-req-1/p", "chatcmpl-req-2/d"),
        ("cmpl-req-1-0/p", "cmpl-req-2-0/d"),
        ("req-1/p", "req-2/d"),
        ("chatcmpl-7/p", "chatcmpl-8/d"),
        ("cmpl-7-0/p", "cmpl-8-0/d"),
    ],
)
def test_a_router_may_number_its_requests(at_p: str, at_d: str, digest: str | None) -> None:
    """D was told P's id, which is another one than D's, and there is a request that has D's."""
    world = World()
    unrelated = f"{base_id(at_d)}/p"
    world.writer.unclaimed = [unrelated, at_p]
    if digest is not None:
        world.digests.update({at_p: digest, unrelated: digest})
    world.says(asks(at_d, prefill=at_p, digest=digest))
    assert [request_id for request_id, _ in world.writer.registrations] == [at_p]


@pytest.mark.parametrize("told", ["cmpl-a-0", "cmpl-a-0/p"], ids=["at once", "one after the other"])
@pytest.mark.parametrize("first", ["P", "D"])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_equal_prompts_of_one_request_get_one_push_each(told: str, first: str, order: tuple[int, ...]) -> None:
    """A router tells D the name of the first for all of them."""
    world = World()
    at_p, at_d = ([f"cmpl-a-{number}/{engine}" for number in range(3)] for engine in "pd")
    world.digests.update(dict.fromkeys(at_p, "same"))
    world.writer.unclaimed = list(at_p) if first == "P" else []
    for number in order:
        world.says(asks(at_d[number], prefill=told, digest="same"))
    if first == "P":
        pushes = {request_id: registration.request_id for request_id, registration in world.writer.registrations}
    else:
        taken = {request_id: world.registrations.take(request_id, world.now) for request_id in at_p}
        pushes = {request_id: each.request_id for request_id, each in taken.items() if each is not None}
    assert pushes == dict(zip(at_p, at_d, strict=True))


def test_several_answers_to_one_prompt_get_one_push_each() -> None:
    world = World()
    world.digests.update({"0_chatcmpl-a/p": "same", "1_chatcmpl-a/p": "same"})
    world.writer.unclaimed = ["0_chatcmpl-a/p", "1_chatcmpl-a/p"]
    world.says(asks("1_chatcmpl-a/d", prefill="0_chatcmpl-a/p", digest="same"))
    world.says(asks("0_chatcmpl-a/d", prefill="0_chatcmpl-a/p", digest="same"))
    assert [(request_id, each.request_id) for request_id, each in world.writer.registrations] == [
        ("1_chatcmpl-a/p", "1_chatcmpl-a/d"),
        ("0_chatcmpl-a/p", "0_chatcmpl-a/d"),
    ]


def test_the_end_of_one_prompt_is_not_that_of_another() -> None:
    world = World()
    world.ends("cmpl-a-0/p", "aborted")
    world.says(asks("cmpl-a-1/d", prefill="cmpl-a-0"))
    assert world.heard() == [Accepted("cmpl-a-1/d")]


@pytest.mark.parametrize(("ours", "theirs"), [(None, "one"), ("one", None), (None, None)])
def test_a_prompt_that_one_side_does_not_tell_of_keeps_nobody_apart(ours: str | None, theirs: str | None) -> None:
    world = World()
    if ours is not None:
        world.digests["a/p"] = ours
    world.writer.unclaimed = ["a/p"]
    world.says(asks(digest=theirs))
    assert len(world.writer.registrations) == 1


def test_digests_of_requests_that_are_over_are_forgotten() -> None:
    world = World()
    world.digests.update({"a/p": "one", "b/p": "two"})
    world.ends("a/p", None)
    world.ends("unknown", "aborted")
    assert world.digests == {"b/p": "two"}


# What is taken back.


def test_withdrawn_before_its_request_came_it_is_gone() -> None:
    world, wanted = World(), asks()
    world.says(wanted)
    world.heard()
    world.cancels(wanted)
    assert world.heard() == [Cancelled("a/d")]
    assert world.registrations.take("a/p", world.now) is None
    world.writer.unclaimed = ["a/q"]
    world.says(wanted, "d-1")
    assert world.heard() == [Cancelled("a/d")], "a rank that comes late hears it too"
    assert world.writer.registrations == []


def test_withdrawn_before_it_was_registered_it_never_will_be() -> None:
    """The cancel of one rank may overtake the registration of another."""
    world, wanted = World(), asks()
    world.cancels(wanted)
    assert world.heard() == [Cancelled("a/d")]
    world.writer.unclaimed = ["a/p"]
    world.says(wanted, "d-1")
    assert world.heard() == [Cancelled("a/d")]
    assert world.writer.registrations == []


def test_withdrawn_with_nothing_on_the_wire_is_said_at_once_and_as_often_as_asked() -> None:
    world = World()
    wanted = world.served()
    for _ in range(2):
        world.cancels(wanted)
        assert world.heard() == [Cancelled("a/d")]
    assert world.writer.withdrawn[0] == ("a/p", ("D", "a/d"))


def test_withdrawn_under_a_write_nothing_is_said_until_it_has_ended() -> None:
    """Whoever asks meanwhile, and whatever for: all ranks would believe the answer."""
    world = World()
    wanted = world.served()
    world.writer.on_the_wire = {"a/p"}
    world.cancels(wanted)
    world.cancels(wanted)
    world.says(wanted, "d-1")
    assert set(world.heard()) <= {Accepted("a/d")}
    world.writer.on_the_wire = set()
    world.retracts(wanted, "the decode engine cancelled its registration", drained=True, withdrawn=True)
    assert world.heard() == [Cancelled("a/d")]
    world.says(wanted, "d-1")
    assert world.heard() == [Cancelled("a/d")]


def test_what_another_engine_registered_is_not_its_to_withdraw() -> None:
    world = World()
    wanted = world.served()
    world.cancels(wanted, "e-0")
    assert world.writer.withdrawn == []
    assert world.heard() == []
    assert world.peer_errors.counts == {"foreign cancel": 1}
    world.cancels(wanted, "d-1")
    assert len(world.writer.withdrawn) == 1


def test_a_rank_that_registered_when_all_was_over_may_withdraw() -> None:
    """Its answer may have been lost, and it asks on until it has one."""
    world = World()
    wanted = world.served()
    world.retracts(wanted, "cut off", drained=True)
    world.mail.taken()
    world.network.connected["D"] = ("d-0",)
    world.says(wanted, "d-1")
    world.cancels(wanted, "d-1")
    assert world.heard("d-0") == [Fail("a/d", 3, "cut off", True), Cancelled("a/d")]


# What has failed.


def test_a_failure_under_a_write_is_said_twice_and_remembered_when_it_has_ended() -> None:
    world = World()
    wanted = world.served()
    world.retracts(wanted, "cut off", drained=False)
    assert world.heard() == [Fail("a/d", 3, "cut off", False)]
    world.says(wanted, "d-1")
    assert world.heard() == [Accepted("a/d")]
    world.retracts(wanted, "cut off", drained=True)
    assert world.heard() == [Fail("a/d", 3, "cut off", True)]
    world.says(wanted, "d-1")
    assert world.heard() == [Fail("a/d", 3, "cut off", True)]


def test_a_failure_of_a_withdrawn_push_that_has_not_drained_is_no_answer_to_it() -> None:
    world = World()
    wanted = world.served()
    world.retracts(wanted, "it hangs", drained=False, withdrawn=True)
    assert world.heard() == [Fail("a/d", 3, "it hangs", False)]


def test_a_long_story_is_cut_short() -> None:
    world = World()
    wanted = world.served()
    world.retracts(wanted, "x" * 10_000, drained=True)
    (message,) = world.heard()
    assert isinstance(message, Fail)
    assert message.reason == "x" * MAX_REASON


def test_who_waits_for_a_request_that_ends_badly_is_told() -> None:
    world, wanted = World(), asks()
    world.says(wanted)
    world.says(asks("b/d"))
    world.heard()
    world.ends("a/p", "aborted")
    assert world.heard() == [Fail("a/d", 0, "aborted", True)]
    assert world.registrations.take("a/p", world.now) is None
    assert world.registrations.take("b/p", world.now) == asks("b/d")


@pytest.mark.parametrize("prefill", [None, "a/p"], ids=["by base id", "by name"])
def test_who_comes_after_a_bad_end_is_told(prefill: str | None) -> None:
    world, wanted = World(), asks("a/d" if prefill is None else "zzz", prefill=prefill)
    world.ends("a/p", "its lease ran out")
    world.now += ENDED_S - 1
    world.says(wanted)
    refusal = Fail(wanted.request_id, 0, "the prefill request has ended: its lease ran out", True)
    assert refusal in world.heard()
    world.says(wanted, "d-1")
    assert world.heard() == [refusal]
    assert world.registrations.take("a/q", world.now) is None


def test_a_good_end_is_held_against_nobody() -> None:
    world = World()
    world.ends("a/p", None)
    world.says(asks())
    assert world.heard() == [Accepted("a/d")]


def test_a_bad_end_is_forgotten_in_time_or_when_the_request_comes_again() -> None:
    world = World()
    world.ends("a/p", "aborted")
    world.ends("b/p", "aborted")
    assert world.registrations.take("b/q", world.now) is None
    world.says(asks("b/d"))
    assert world.heard() == [Accepted("b/d")]
    world.now += ENDED_S
    world.says(asks("a/d"))
    assert world.heard() == [Accepted("a/d")]
    world.tick()
    assert world.registrations._bad_ends == {}


def test_a_request_that_runs_again_has_not_ended() -> None:
    """The writer need not have heard of it: where nothing is pushed by layer it does when it has finished."""
    world = World()
    world.ends("a/p", "aborted")
    world.digests["a/q"] = "one"
    world.says(asks())
    assert world.heard() == [Accepted("a/d")]
    assert world.registrations.take("a/q", world.now) == asks()


def test_a_stock_engine_waits_on_for_a_request_that_was_aborted() -> None:
    """It cannot be told, and the request may come again."""
    world = World()
    wanted = world.served(asks(layerpush=0))
    world.retracts(wanted, "aborted", drained=True)
    world.ends("a/p", "aborted")
    assert world.registrations.take("a/q", world.now) == wanted


def test_a_stock_engine_that_comes_after_an_abort_waits_for_the_request_to_come_again() -> None:
    world = World()
    world.ends("a/p", "aborted")
    world.says(asks(layerpush=0))
    assert world.registrations.take("a/q", world.now) == asks(layerpush=0)


@pytest.mark.parametrize(("reason", "drained"), [("cut off", True), ("aborted", False)])
def test_a_stock_engine_is_kept_for_nothing_else(reason: str, drained: bool) -> None:
    world = World()
    wanted = world.served(asks(layerpush=0))
    world.retracts(wanted, reason, drained=drained)
    assert world.registrations.take("a/q", world.now) is None


def test_what_no_request_came_for_is_refused_in_the_end() -> None:
    world = World()
    world.says(asks())
    world.heard()
    world.now += KEPT_S
    world.tick()
    refusal = Fail("a/d", 0, "no such request came to the prefill engine", True)
    assert world.heard() == [refusal]
    world.says(asks())
    assert world.heard() == [refusal]


def test_too_many_are_refused_oldest_first() -> None:
    world = World()
    for number in range(KEPT + 1):
        world.says(asks(f"r{number}/d"))
    refused = [message.request_id for message in world.heard() if isinstance(message, Fail)]
    assert refused == ["r0/d"]


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registrations, "REMEMBERED", 10)
    world = World()
    for number in range(50):
        wanted = world.served(asks(f"r{number}/d"), f"r{number}/p")
        world.retracts(wanted, "cut off", drained=True)
        world.closes(wanted)
        world.cancels(asks(f"c{number}/d", engine="E"), "e-0")
    for memory in (world.registrations._served, world.registrations._answers, world.registrations._senders):
        assert len(memory) <= 10


def crowded(monkeypatch: pytest.MonkeyPatch) -> World:
    """Registrations that remember 10 of each."""
    monkeypatch.setattr(registrations, "REMEMBERED", 10)
    return World()


def crowd(world: World, count: int = 50) -> None:
    """So many other requests come and go."""
    for number in range(count):
        other = world.served(asks(f"r{number}/d"), f"r{number}/p")
        world.closes(other)


def test_a_push_that_outlives_thousands_of_others_can_still_be_withdrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its cancel would be answered with a write on the wire."""
    world = crowded(monkeypatch)
    wanted = world.served()
    world.writer.on_the_wire = {"a/p"}
    crowd(world)
    world.cancels(wanted)
    assert world.writer.withdrawn == [("a/p", wanted.key)]
    assert world.heard() == []
    world.cancels(wanted, "e-0")
    assert world.peer_errors.counts == {"foreign cancel": 1}, "it is known whose it is"


@pytest.mark.parametrize("begun", [True, False])
def test_who_asked_is_known_for_as_long_as_it_is_wanted(begun: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would be taken for a process that was restarted."""
    world, wanted = crowded(monkeypatch), asks()
    if begun:
        world.served(wanted)
    else:
        world.says(wanted)
    crowd(world)
    assert world.registrations.is_current(wanted)
    assert len(world.registrations._senders) <= 11
    if not begun:
        assert world.takes() == wanted
        crowd(world)
        assert world.registrations.is_current(wanted)


def test_registrations_of_further_ranks_push_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """More may be wanted at once than are remembered of those that are over."""
    world = crowded(monkeypatch)
    wanted = [asks(f"r{number}/d") for number in range(30)]
    for rank in ("d-0", "d-1"):
        for one in wanted:
            world.says(one, rank)
    assert [one.request_id for one in wanted if not world.registrations.is_current(one)] == []


# One id for two requests.


def test_a_registration_that_differs_takes_the_place_of_one_that_still_waits() -> None:
    """The process that sent the first one is dead, and its successor has given its blocks to others."""
    world, older, newer = World(), asks(blocks=(1, 2)), asks(blocks=(3, 4))
    world.says(older, "d-0")
    world.network.connected["D"] = ("d-new",)
    world.says(newer, "d-new")
    assert not world.registrations.is_current(older)
    assert world.registrations.is_current(newer)
    assert world.takes() == newer
    assert world.takes("a/q") is None
    assert world.peer_errors.counts == {}


def test_who_sent_the_older_one_does_not_vouch_for_the_newer() -> None:
    world, older, newer = World(), asks(blocks=(1, 2)), asks(blocks=(3, 4))
    world.says(older, "d-0")
    world.says(newer, "d-1")
    world.network.connected["D"] = ("d-0",)
    assert not world.registrations.is_current(newer)
    assert not world.registrations.is_current(older)


def test_a_registration_that_differs_from_one_that_is_being_served_is_refused() -> None:
    world = World()
    older, newer = world.served(asks(blocks=(1, 2))), asks(blocks=(3, 4))
    world.writer.unclaimed = ["a/q"]
    world.says(newer, "d-1")
    assert world.heard() == [Fail("a/d", 0, "another request of this id is being pushed", True)]
    assert world.peer_errors.counts == {"id in use": 1}
    assert len(world.writer.registrations) == 1
    assert world.registrations.is_current(older)
    assert not world.registrations.is_current(newer)
    world.says(older, "d-1")
    assert world.heard() == [Accepted("a/d")], "the older one has not failed"
    world.cancels(older)
    assert world.writer.withdrawn == [("a/p", older.key)]


def test_a_stock_engine_that_gives_an_id_twice_is_told_nothing() -> None:
    world = World()
    world.served(asks(layerpush=0, blocks=(1, 2)))
    world.says(asks(layerpush=0, blocks=(3, 4)))
    assert world.mail.sent == []
    assert world.peer_errors.counts == {"id in use": 1}


@pytest.mark.parametrize("end", ["failed", "cancelled", "completed"])
def test_an_id_that_is_free_again_starts_anew(end: str) -> None:
    """Its earlier bearer's end is not its own."""
    world = World()
    older, newer = world.served(asks(blocks=(1, 2))), asks(blocks=(3, 4))
    if end == "failed":
        world.retracts(older, "cut off", drained=True)
    elif end == "cancelled":
        world.cancels(older)
    world.closes(older)
    world.heard()
    world.says(newer)
    assert world.heard() == [Accepted("a/d")]
    assert world.takes("a/q") == newer
    assert world.peer_errors.counts == {}


def test_a_stranger_with_an_id_that_is_being_served_is_no_rank_of_its_engine_if_it_wants_other_blocks() -> None:
    world = World()
    world.served(asks(blocks=(1, 2)))
    world.says(asks(blocks=(3, 4)), "d-new")
    assert [one.agent for one in world.probe.asked] == ["d-0"]
    assert world.heard() == []
    world.says(asks(blocks=(1, 2)), "d-2")
    assert len(world.probe.asked) == 1


# Signs of life.


def test_a_peer_is_answered_and_a_stranger_is_not() -> None:
    world = World()
    world.registrations.on_ping("d-0", Ping("D", 7))
    world.served()
    world.registrations.on_ping("d-1", Ping("D", 8))
    world.registrations.on_ping("d-new", Ping("D", 9))
    assert world.mail.taken() == [("d-1", Pong(8))]


# Connections that are gone.


def test_a_lost_engine_is_forgotten_when_nothing_is_on_its_way_to_it() -> None:
    world = World()
    wanted = world.served()
    world.writer.engines_in_flight = {"D"}
    world.registrations.peers.lost("D")
    world.tick()
    world.tick()
    reason = "the connection to the decode engine was lost"
    assert world.writer.failed == [("D", reason)] * 2
    assert world.network.forgotten == []
    world.writer.engines_in_flight = {"E"}
    world.retracts(wanted, reason, drained=True)
    world.tick()
    assert world.network.forgotten == ["D"]
    assert world.mail.sent == []
    world.tick()
    assert len(world.writer.failed) == 3


@pytest.mark.parametrize("how", ["registers", "cancels"])
def test_a_lost_engine_that_lives_asks_again_and_is_answered(how: str) -> None:
    world = World()
    wanted = world.served()
    world.says(wanted, "d-1")
    world.heard()
    world.registrations.peers.lost("D")
    world.retracts(wanted, "it was lost", drained=True)
    world.tick()
    assert world.mail.sent == []
    world.network.listening["D"] = ("d-0", "d-1")
    if how == "registers":
        world.says(wanted, "d-1")
        assert set(world.heard()) == {Fail("a/d", 3, "it was lost", True)}
    else:
        world.cancels(wanted, "d-1")
        assert set(world.heard()) == {Fail("a/d", 3, "it was lost", True), Cancelled("a/d")}
    assert len(world.network.handshakes) == 2


@pytest.mark.parametrize("how", ["registers", "cancels"])
def test_an_engine_that_was_lost_and_is_back_is_told_everything_again(how: str) -> None:
    world = World()
    wanted = world.served()
    world.writer.on_the_wire = {"a/p"}
    world.registrations.peers.lost("D")
    world.tick()
    if how == "registers":
        world.says(asks("b/d"))
    else:
        world.cancels(wanted)
    world.mail.taken()
    world.retracts(wanted, "it was lost", drained=True)
    assert world.heard() == [Fail("a/d", 3, "it was lost", True)]


def test_an_answer_that_cannot_be_sent_shows_that_the_engine_is_lost() -> None:
    world = World()
    wanted = world.served()
    world.mail.lost = {"d-1"}
    world.retracts(wanted, "cut off", drained=True)
    world.tick()
    assert world.network.forgotten == ["D"]
    assert [engine for engine, _ in world.writer.failed] == ["D"]


# Connections that are about to be dropped: what is on the wire must end first, and nothing new begins meanwhile.

LOST = "the connection to the decode engine was lost"


def doomed() -> tuple[World, Registration]:
    """A push to D has failed with its connection, and another WRITE to D is still on the wire."""
    world = World()
    wanted = world.served()
    world.writer.engines_in_flight = {"D"}
    world.registrations.peers.lost("D")
    world.retracts(wanted, "cut off", drained=False)
    world.retracts(wanted, "cut off", drained=True)
    world.closes(wanted)
    world.tick()
    assert world.mail.sent == []
    return world, wanted


def drops(world: World) -> None:
    """The last WRITE has ended."""
    world.writer.engines_in_flight = {"E"}
    world.tick()
    assert world.network.forgotten == ["D"]


FAILS = [Fail("a/d", 3, "cut off", False), Fail("a/d", 3, "cut off", True)]


def told(world: World, *ranks: str) -> list[str]:
    """In no order: what begins the handshake waits for it, and is overtaken by what finds the engine connected."""
    return sorted(map(repr, world.heard(*ranks)))


def these(*messages: Message) -> list[str]:
    return sorted(map(repr, messages))


def test_whether_a_connection_is_about_to_be_dropped_is_said() -> None:
    world = World()
    world.served()
    assert world.registrations.peers.closing("D") is None
    world.registrations.peers.lost("D")
    assert (world.registrations.peers.closing("D"), world.registrations.peers.closing("E")) == (LOST, None)
    world.tick()
    assert world.registrations.peers.closing("D") is None


@pytest.mark.parametrize("how", ["registers", "cancels"])
def test_what_could_not_be_said_is_said_to_an_engine_that_shows_that_it_lives(how: str) -> None:
    world, _ = doomed()
    drops(world)
    assert world.mail.sent == [], "it may be dead"
    assert len(world.network.handshakes) == 1
    if how == "registers":
        world.says(asks("b/d"))
        assert told(world) == these(*FAILS, Accepted("b/d"))
    else:
        world.cancels(asks("never/registered"))
        assert told(world) == these(*FAILS, Cancelled("never/registered"))
    assert len(world.network.handshakes) == 2
    world.says(asks("c/d"))
    assert world.heard() == [Accepted("c/d")], "once"


@pytest.mark.parametrize("dropped", [True, False])
def test_what_could_not_be_said_is_forgotten_in_time(dropped: bool) -> None:
    world, wanted = doomed()
    if dropped:
        drops(world)
    world.now += ENDED_S / 2
    world.retracts(asks("b/d"), "cut off", drained=True)
    assert world.mail.sent == []
    world.now += ENDED_S / 2
    world.tick()
    if not dropped:
        drops(world)
    world.says(asks("c/d"))
    assert told(world) == these(Fail("b/d", 3, "cut off", True), Accepted("c/d"))
    world.says(wanted)
    assert world.heard() == [FAILS[1]], "it is still known what became of it"
    world.registrations.peers.lost("D")
    world.retracts(asks("e/d"), "cut off", drained=True)
    world.now += ENDED_S
    world.tick()
    assert world.registrations.peers._withheld == {}


def test_what_is_refused_meanwhile_is_not_said_either() -> None:
    world = World()
    world.says(asks("b/d"))
    world.heard()
    world.writer.engines_in_flight = {"D"}
    world.registrations.peers.lost("D")
    world.ends("b/p", "aborted")
    world.says(asks("b/d"), "d-1")
    assert world.heard() == []
    drops(world)
    assert Fail("b/d", 0, "aborted", True) in world.heard()


def test_however_many_engines_are_lost_none_is_told_before_its_connection_has_been_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world, wanted = doomed()
    monkeypatch.setattr(decode_peers, "HELD", 2)
    world.writer.engines_in_flight = {"D", "E", "F", "G"}
    for engine in ("E", "F", "G"):
        world.registrations.peers.lost(engine)
    world.retracts(wanted, "cut off", drained=True)
    world.tick()
    assert world.mail.sent == []
    assert len(world.network.handshakes) == 1


def test_a_cancel_is_not_answered_before_the_connection_has_been_dropped() -> None:
    """Whatever it is about, and whether or not anything of it is on the wire."""
    world, wanted = doomed()
    for cancelled in (wanted, asks("never/registered")):
        world.cancels(cancelled)
        assert world.heard() == []
    assert world.network.handshakes[1:] == []
    assert world.writer.withdrawn == []
    drops(world)
    assert world.mail.sent == []
    world.cancels(wanted)
    assert told(world) == these(*FAILS, Cancelled("a/d"))
    world.cancels(asks("never/registered"))
    assert world.heard() == [Cancelled("never/registered")]


@pytest.mark.parametrize("rank", ["d-0", "d-1", "d-new"])
def test_what_registers_meanwhile_is_heard_when_the_connection_has_been_dropped(rank: str) -> None:
    world, wanted = doomed()
    world.writer.unclaimed = ["b/p"]
    world.says(asks("b/d"), rank)
    world.says(wanted, rank)
    world.tick()
    assert world.mail.sent == []
    assert world.writer.registrations[1:] == []
    assert world.probe.asked == [], "it makes no difference who that is"
    world.network.listening["D"] = ("d-new",) if rank == "d-new" else ("d-0", "d-1")
    drops(world)
    assert world.writer.registrations[1:] == [("b/p", asks("b/d"))]
    assert world.registrations.is_current(asks("b/d"))
    assert told(world, *world.network.connected["D"]) == these(*FAILS, Accepted("b/d"), FAILS[1])
    world.tick()
    assert len(world.writer.registrations) == 2


def test_what_a_process_that_was_replaced_had_registered_is_not_current() -> None:
    world, _ = doomed()
    world.says(asks("b/d"), "d-0")
    world.network.listening["D"] = ("d-new",)
    drops(world)
    assert world.network.connected["D"] == ("d-new",)
    assert not world.registrations.is_current(asks("b/d"))


def test_other_engines_are_told_at_once() -> None:
    world, _ = doomed()
    other = asks("b/d", engine="E")
    world.writer.unclaimed = ["b/p"]
    world.says(other, "e-0")
    world.retracts(other, "cut off", drained=True)
    assert world.heard("e-0") == [Accepted("b/d"), Fail("b/d", 3, "cut off", True)]


@pytest.mark.parametrize("verdict", Verdict)
def test_a_verdict_on_an_engine_whose_connection_is_about_to_be_dropped_changes_nothing(verdict: Verdict) -> None:
    world, newer = strange()
    world.says(asks("m/d"), "d-0")
    world.heard()
    world.writer.engines_in_flight = {"D"}
    world.registrations.peers.lost("D")
    world.probe.answer(verdict)
    assert world.probe.asked == []
    assert world.registrations.peers.closing("D") == LOST
    assert world.peer_errors.counts == {}
    world.tick()
    assert world.writer.registrations[1:] == []
    world.network.listening["D"] = ("d-new",)
    drops(world)
    assert world.writer.registrations[1:] == [("n/p", newer)]
    assert {reason for _, reason in world.writer.failed} == {LOST}


# Strangers: an agent that is none of the engine's registers in its name.


def strange() -> tuple[World, Registration]:
    """D is connected; another agent registers as D, and its side channel is asked about the agent that we know."""
    world = World()
    world.served()
    newer = asks("n/d")
    world.writer.unclaimed = ["n/p"]
    world.says(newer, "d-new")
    assert world.writer.registrations[1:] == []
    assert [(one.agent, one.address) for one in world.probe.asked] == [("d-0", address_of(newer))]
    return world, newer


def test_an_engine_that_was_restarted_is_connected_anew() -> None:
    world, newer = strange()
    world.says(asks("m/d"), "d-new")
    assert len(world.probe.asked) == 1
    world.network.listening["D"] = ("d-new",)
    world.probe.answer(Verdict.ENDED)
    world.writer.engines_in_flight = {"D"}
    world.tick()
    assert world.writer.registrations[1:] == [], "the old one's WRITEs have not ended"
    world.says(asks("l/d"), "d-new")
    world.writer.engines_in_flight = set()
    world.tick()
    assert world.network.forgotten == ["D"]
    assert set(world.writer.failed) == {("D", "the decode engine was restarted")}
    assert world.writer.registrations[1:] == [("n/p", newer)]
    assert sorted(message.request_id for message in world.heard("d-new")) == ["l/d", "m/d", "n/d"]
    assert world.registrations.take("l/p", world.now) == asks("l/d")


def test_what_a_restarted_engine_asked_for_before_is_forgotten() -> None:
    world = World()
    world.says(asks("old/d"))
    world.says(asks("other/d", engine="E"), "e-0")
    world.says(asks("n/d"), "d-new")
    world.probe.answer(Verdict.ENDED)
    assert world.registrations.take("old/p", world.now) is None
    assert world.registrations.take("other/p", world.now) is not None


def test_a_stranger_in_the_name_of_an_engine_that_lives_is_not_listened_to() -> None:
    """It may be what is left of an earlier process: its blocks are others' by now."""
    world, _ = strange()
    world.probe.answer(Verdict.ALIVE)
    assert world.writer.registrations[1:] == []
    assert world.writer.failed == []
    assert world.peer_errors.counts == {"engine id in use": 1}
    assert world.network.forgotten == []


def test_a_registration_counts_only_for_the_process_that_sent_it() -> None:
    """One that was restarted under the same name has given the same blocks to others."""
    world, wanted = World(), asks()
    world.says(wanted, "d-1")
    assert world.registrations.is_current(wanted)
    world.network.connected["D"] = ("d-new",)
    assert not world.registrations.is_current(wanted)
    assert not world.registrations.is_current(asks("never/registered"))
    world.peers.forget("D")
    assert not world.registrations.is_current(wanted)


def test_what_was_withdrawn_before_its_request_came_is_unwanted_once() -> None:
    world, wanted = World(), asks()
    world.says(wanted)
    assert not world.registrations.is_unwanted("a/p", world.now)
    world.cancels(wanted)
    assert not world.registrations.is_unwanted("b/p", world.now)
    assert world.registrations.is_unwanted("a/p", world.now)
    assert not world.registrations.is_unwanted("a/p", world.now)


def test_what_is_unwanted_is_forgotten_in_time() -> None:
    world, wanted = World(), asks()
    world.says(wanted)
    world.cancels(wanted)
    assert not world.registrations.is_unwanted("a/p", world.now + KEPT_S)


def test_a_withdrawal_of_what_was_never_asked_for_makes_nothing_unwanted() -> None:
    world = World()
    world.cancels(asks())
    assert not world.registrations.is_unwanted("a/p", world.now)


def test_a_request_that_was_aborted_takes_its_withdrawal_with_it() -> None:
    """A client that hangs up ends both halves; when it tries again the request is wanted."""
    world, wanted = World(), asks()
    world.says(wanted)
    world.cancels(wanted)
    world.ends("a/p", "aborted")
    assert not world.registrations.is_unwanted("a/q", world.now)


def test_somebody_who_uses_the_name_of_an_engine_that_lives_elsewhere_is_not() -> None:
    world = World()
    world.served()
    impostor = asks("n/d", host="10.6.6.6")
    world.writer.unclaimed = ["n/p"]
    world.says(impostor, "x-0")
    assert world.probe.asked[0].address.host == "10.0.0.7", "who is asked is the engine that we know"
    world.probe.answer(Verdict.ALIVE)
    assert world.writer.registrations[1:] == []
    assert world.peer_errors.counts == {"engine id in use": 1}
    assert world.network.forgotten == []


def test_no_answer_is_asked_for_again_a_few_times() -> None:
    world, _ = strange()
    for _ in range(PROBES - 1):
        world.probe.answer(Verdict.UNKNOWN)
        assert len(world.probe.asked) == 1
        assert world.peer_errors.counts == {}
    world.probe.answer(Verdict.UNKNOWN)
    assert world.probe.asked == []
    assert world.peer_errors.counts == {"engine id in use": 1}
    assert world.writer.registrations[1:] == []


def test_more_of_what_is_being_served_is_not_strange() -> None:
    """Ranks that this rank does not write to register, too."""
    world = World()
    wanted = world.served()
    world.says(wanted, "d-2")
    assert world.probe.asked == []


@pytest.mark.parametrize("verdict", Verdict)
def test_a_verdict_on_an_agent_that_was_replaced_meanwhile_comes_too_late(verdict: Verdict) -> None:
    """Its connection broke before; the new one must not suffer."""
    world, newer = strange()
    world.network.listening["D"] = ("d-new",)
    world.registrations.peers.lost("D")
    world.tick()
    assert world.writer.registrations[1:] == [("n/p", newer)]
    world.heard("d-new")
    failed = list(world.writer.failed)
    world.probe.answer(verdict)
    world.tick()
    assert world.writer.failed == failed
    assert world.network.forgotten == ["D"]
    world.says(asks("m/d"), "d-new")
    assert world.heard("d-new") == [Accepted("m/d")]
    assert world.peer_errors.counts == {}


@pytest.mark.parametrize("verdict", Verdict)
def test_strangers_of_an_engine_that_was_forgotten_meanwhile_are_heard(verdict: Verdict) -> None:
    """Upstream forgets engines that it has not heard of for long."""
    world, newer = strange()
    world.network.listening["D"] = ("d-new",)
    world.peers.forget("D")
    for _ in range(PROBES):
        if world.probe.asked:
            world.probe.answer(verdict)
    world.tick()
    assert world.writer.registrations[1:] == [("n/p", newer)]


def test_an_engine_that_others_connected_to_is_asked_where_it_says_it_is() -> None:
    """Upstream's heartbeats connect, too."""
    world = World()
    world.network.connected["D"] = ("d-0",)
    world.writer.unclaimed = ["n/p"]
    world.says(asks("n/d"), "d-new")
    assert world.probe.asked[0].address == address_of(asks("n/d"))
    world.network.listening["D"] = ("d-new",)
    world.probe.answer(Verdict.ENDED)
    world.tick()
    assert world.writer.registrations == [("n/p", asks("n/d"))]


def test_a_window_is_used_by_the_word_of_the_rank_that_has_it() -> None:
    """Whoever else knows the request could name any memory of that engine."""
    world = World()
    asked, mine, forged = (
        msgspec.structs.replace(
            asks(), window=Window(rank=0, ring=ring, ring_size=8192, device=0, offset=0, size=8192, layout="l")
        )
        for ring in (1, 2, 3)
    )
    for sender, registration in (("e-0", forged), ("d-0", mine), ("d-0", asked)):
        world.says(registration, sender)
    for registration in (forged, mine, asks()):
        assert world.registrations.window(registration, "d-0") == mine.window
    assert world.registrations.window(asks(), "d-1") is None
    assert world.registrations.window(asks("another"), "d-0") is None
