"""Registrations of decode engines on a prefill rank, and their answers: none is lost, none comes too early."""

from __future__ import annotations

import logging
from itertools import product
from typing import Any

import msgspec
import pytest

from layerpush.core.liveness import Verdict
from layerpush.core.prefixes import Prefixes
from layerpush.core.request_names import Arrived
from layerpush.core.wire import (
    MAX_REASON_CHARS,
    Accepted,
    Cancel,
    Cancelled,
    Decline,
    Fail,
    FirstToken,
    Message,
    Ping,
    Pong,
    Queued,
    Registration,
    Unregister,
    Unregistered,
)
from layerpush.prefill import claim_protocol, claim_session, claim_table, decode_peers
from layerpush.prefill.claim_table import WAITING, WAITING_S
from layerpush.prefill.claims import (
    NOT_KEPT,
    OTHER_PROMPT,
    OTHER_PROMPT_S,
    PROBES,
    QUEUED_EVERY_S,
    REFUSED,
    RESTARTED,
    SPARE_ANSWER,
    TIMED_OUT_AT_ONCE,
    Claims,
)
from layerpush.prefill.links import address_of
from layerpush.prefill.pairing import Pairing
from layerpush.prefill.prompt_requests import ELSEWHERE_S, ENDED_S
from layerpush.prefill.push_protocol import ReportFailure, SendFirstToken
from layerpush.telemetry.peer_errors import PeerErrors
from layerpush.transport.connections import DROPPED, LOST
from layerpush.transport.peers import Address
from tests.unit.fake_peers import FakePeers


def base_id(request_id: str) -> str:
    """An id is a router's id, a slash and an engine's suffix."""
    return request_id.partition("/")[0]


def asks(
    request_id: str = "a/d",
    engine: str = "D",
    layerpush: int = 1,
    prefill: str | None = None,
    digest: str | None = None,
    host: str = "10.0.0.7",
    blocks: tuple[int, ...] = (1, 2),
    sampling: str | None = None,
    contact: bytes | None = None,
    transfer: str | None = None,
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
        sampling=sampling,
        contact=contact,
        transfer_id=transfer,
    )


UNKNOWN_S = 30.0
STOCK = asks(layerpush=0, sampling="greedy")
FIRST, SECOND = asks(blocks=(1, 2)), asks(blocks=(3, 4))
"""Two registrations of one id."""


def failure(reason: str, drained: bool = True, request_id: str = "a/d", epoch: int = 3) -> Fail:
    return Fail(request_id, epoch, reason, drained)


class Writer:
    """``unclaimed`` requests wait for a registration; requests ``on_the_wire`` have a WRITE under way."""

    def __init__(self) -> None:
        self.unclaimed: list[str] = []
        self.on_the_wire: set[str] = set()
        self.engines_in_flight: set[str] = set()
        self.pushes: list[tuple[str, Registration]] = []
        self.cancelled: list[tuple[str, tuple[str, str]]] = []
        self.failed: list[tuple[str, str]] = []
        self.live: dict[tuple[str, str], str] = {}
        """From a registration to the request that serves it."""
        self.finished: set[str] = set()
        self.declined: list[str] = []

    def is_waiting(self, request_id: str) -> bool:
        return request_id in self.unclaimed

    def register(self, request_id: str, registration: Registration) -> None:
        self.unclaimed.remove(request_id)
        self.pushes.append((request_id, registration))
        self.live[registration.key] = request_id

    def __contains__(self, request_id: str) -> bool:
        return request_id in self.unclaimed or request_id in self.live.values()

    def serving(self, key: tuple[str, str]) -> str | None:
        return self.live.get(key)

    def cancel(self, request_id: str, key: tuple[str, str]) -> bool:
        self.cancelled.append((request_id, key))
        return request_id not in self.on_the_wire

    def computed(self) -> list[str]:
        return sorted(self.finished)

    def is_computed(self, request_id: str) -> bool:
        return request_id in self.finished

    @property
    def has_registered_prompts(self) -> bool:
        return False

    def decline(self, request_id: str) -> bool:
        if request_id in self.finished:
            self.declined.append(request_id)
        return request_id in self.finished

    def end_pushes(self, engine_id: str, reason: str) -> bool:
        self.failed.append((engine_id, reason))
        return engine_id not in self.engines_in_flight


class World(FakePeers):
    """Engine D has two ranks and is ``connected``, engine E has one. ``begun`` requests wait for a registration."""

    def __init__(
        self,
        *begun: str,
        digests: dict[str, str] | None = None,
        allowed_hosts: tuple[str, ...] | None = None,
        connected: bool = True,
    ) -> None:
        super().__init__(allowed_hosts)
        self.writer = Writer()
        self.peer_errors = PeerErrors(logging.getLogger("test"))
        self.digests = dict(digests or {})
        self.network.listening = {"D": ("d-0", "d-1"), "E": ("e-0",)}
        if connected:
            self.network.connect(address_of(asks()), "d-0", "d-1")
        self.steps = (0, False)
        self.withdrawn: list[str] = []
        self.taken: dict[str, Registration] = {}
        """Registrations that had come before their request began."""
        self.claims = Claims(
            self.writer,
            self.connections,
            self.probe,
            self.peer_errors,
            base_id,
            lambda: self.steps,
            UNKNOWN_S,
            self.withdrawn.append,
        )
        self.begin(*begun)
        self.network.end_pushes = self.writer.end_pushes

    def is_current(self, registration: Registration) -> bool:
        return self.claims.refusal(registration) != RESTARTED

    def receives(self, registration: Registration, sender: str = "d-0") -> None:
        self.claims.on_registration(sender, registration, self.now)
        self.settle()

    def begin(self, *request_ids: str, transfer: str | None = None) -> None:
        """Requests come and begin."""
        self.claims.requests_arrived([Arrived(each, transfer, self.digests.get(each)) for each in request_ids])
        for request_id in request_ids:
            registration = self.take_registration(request_id)
            if registration is None:
                self.writer.unclaimed.append(request_id)
            else:
                self.taken[request_id] = registration

    def begins(self, **transfers: str) -> None:
        """Requests come and begin, each with its ``transfer_id``. In their names "_" is a dash."""
        for name, transfer in transfers.items():
            self.begin(f"cmpl-{name.replace('_', '-')}/p", transfer=transfer)

    def comes(self, request_id: str, digest: str, transfer: str | None = None) -> None:
        """A request comes to the queue."""
        self.claims.requests_arrived([Arrived(request_id, transfer, digest)])

    def takes_back(self, registration: Registration, sender: str = "d-0") -> None:
        self.claims.on_unregister(sender, unregister(registration, registration.attempt), self.now)
        self.settle()

    def cancels(self, registration: Registration, sender: str = "d-0") -> None:
        named = registration
        cancel = Cancel(
            named.request_id, named.decode_engine_id, named.decode_host, named.decode_port, named.decode_tp_size
        )
        self.claims.on_cancel(sender, cancel, self.now)
        self.settle()

    def fails(self, registration: Registration, reason: str, drained: bool = True, cancelled: bool = False) -> None:
        """The registration's push has failed."""
        self.claims.report_failure(ReportFailure(registration, 3, reason, drained, cancelled), self.now)
        self.settle()

    def ends(self, request_id: str, failure: str | None = "aborted") -> None:
        self.claims.push_ended(request_id, failure, self.now)
        self.settle()

    def loses(self, *engines: str) -> None:
        for engine in engines:
            self.connections.lost(engine)

    def tick(self, seconds: float = 0.0) -> None:
        self.now += seconds
        self.connections.tick(self.now)
        self.claims.tick(self.now)
        self.settle()

    def received(self, *ranks: str) -> list[Message]:
        """The messages to decode engine D since the last look: the same to each of its ranks."""
        taken = self.mail.taken()
        mail = {rank: [message for agent, message in taken if agent == rank] for rank in ranks or ("d-0", "d-1")}
        assert len(taken) == sum(map(len, mail.values()))
        (first, *others) = mail.values()
        assert all(other == first for other in others)
        return first

    def take_registration(self, request_id: str = "a/p") -> Registration | None:
        """The request begins, unless it has; the registration of it that came before is served."""
        if request_id in self.taken:
            return self.taken.pop(request_id)
        registration = self.claims.take_registration(request_id, self.now)
        if registration is not None:
            self.writer.live[registration.key] = request_id
        return registration

    def is_unwanted(self, request_id: str = "a/p", seconds: float = 0.0) -> bool:
        return self.claims.is_unwanted(request_id, self.now + seconds)

    def closes(self, registration: Registration) -> None:
        """The registration's push is closed."""
        del self.writer.live[registration.key]

    def served(self, registration: Registration | None = None, request_id: str = "a/p") -> Registration:
        """A registration whose request had begun."""
        registration = registration or asks()
        self.begin(request_id)
        self.receives(registration)
        assert self.writer.pushes[-1] == (request_id, registration)
        self.mail.taken()
        return registration

    @property
    def pushes(self) -> dict[str, str]:
        """P's requests that were registered after they had begun, and the decode requests that they serve."""
        return {request_id: registration.request_id for request_id, registration in self.writer.pushes}

    @property
    def probed(self) -> list[str]:
        return [asked.agent for asked in self.probe.asked]


# The request that a registration means.


def test_an_early_registration_is_accepted_and_kept_for_its_request() -> None:
    world, wanted = World(), asks()
    world.receives(wanted)
    assert world.received() == [Accepted("a/d")]
    assert [world.take_registration(name) for name in ("b/p", "a/p", "a/p")] == [None, wanted, None]


def test_a_requested_first_token_is_promised_and_sent() -> None:
    world, wanted = World(), asks(sampling="greedy")
    world.receives(wanted)
    assert world.received() == [Accepted("a/d", first_token=True)]
    for token in (7, None):
        world.claims.send_first_token(SendFirstToken(wanted, token), world.now)
        world.settle()
        assert world.received() == [FirstToken("a/d", token)]


def test_a_taken_registration_can_be_cancelled_and_is_not_kept_again() -> None:
    world, wanted = World(), asks()
    world.receives(wanted)
    assert world.take_registration() == wanted
    world.receives(wanted, "d-1")
    assert world.take_registration("a/q") is None
    world.cancels(wanted)
    assert world.writer.cancelled == [("a/p", ("D", "a/d"))]


@pytest.mark.parametrize("begun", [True, False])
def test_the_first_registration_counts_for_all_ranks(begun: bool) -> None:
    world = World(*(["a/p", "a/q"] if begun else []))
    for rank in ("d-0", "d-1", "d-0"):
        world.receives(asks(), rank)
    assert world.pushes == ({"a/p": "a/d"} if begun else {})
    assert set(world.received()) == {Accepted("a/d")}, "a rank that missed the answer gets it again"
    assert (world.take_registration() is None) is begun


@pytest.mark.parametrize(
    ("begun", "wanted", "pushes"),
    [
        (["b/p", "a/p"], [asks()], {"a/p": "a/d"}),
        (["a/p", "x/p1", "x/p2"], [asks(prefill="x/p2")], {"x/p2": "a/d"}),
        (
            ["0_chat-a/p", "1_chat-a/p"],
            [asks(f"{each}_chat-a/d", prefill="0_chat-a/p") for each in (1, 0)],
            {"1_chat-a/p": "1_chat-a/d", "0_chat-a/p": "0_chat-a/d"},
        ),
    ],
    ids=["by its base id", "the one that is named first", "several answers to one prompt"],
)
def test_a_registration_finds_its_request(begun: list[str], wanted: list[Registration], pushes: dict[str, str]) -> None:
    world = World(*begun)
    for registration in wanted:
        world.receives(registration)
    assert world.pushes == pushes


@pytest.mark.parametrize("digest", ["same", None])
@pytest.mark.parametrize("base", ["chatcmpl-req-{}", "cmpl-req-{}-0", "req-{}", "chatcmpl-{}", "cmpl-{}-0"])
def test_a_registration_finds_its_request_if_a_router_numbers_requests(base: str, digest: str | None) -> None:
    """D got P's id, which differs from D's. An unrelated request on P has D's id."""
    at_p, at_d, unrelated = base.format(1) + "/p", base.format(2) + "/d", base.format(2) + "/p"
    world = World(unrelated, at_p, digests={} if digest is None else {at_p: digest, unrelated: digest})
    world.receives(asks(at_d, prefill=at_p, digest=digest))
    assert world.pushes == {at_p: at_d}


@pytest.mark.parametrize("named", ["cmpl-a-0", "cmpl-a-0/p"], ids=["at once", "one after the other"])
@pytest.mark.parametrize("first", ["P", "D"])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_equal_prompts_of_one_request_get_one_push_each(named: str, first: str, order: tuple[int, ...]) -> None:
    """A router gives D the first one's name for all of them."""
    at_p, at_d = ([f"cmpl-a-{number}/{engine}" for number in range(3)] for engine in "pd")
    world = World(*(at_p if first == "P" else []), digests=dict.fromkeys(at_p, "same"))
    for number in order:
        world.receives(asks(at_d[number], prefill=named, digest="same"))
    pushes = world.pushes
    if first == "D":
        for request_id in at_p:
            world.comes(request_id, "same")
        taken = {request_id: world.take_registration(request_id) for request_id in at_p}
        pushes = {request_id: each.request_id for request_id, each in taken.items() if each is not None}
    assert pushes == dict(zip(at_p, at_d, strict=True))


def test_prompts_distinguish_equal_base_ids() -> None:
    world = World("a/p1", "a/p2", digests={"a/p1": "one", "a/p2": "two"})
    world.receives(asks("a/d2", digest="two"))
    world.receives(asks("a/d3", digest="three"))
    assert world.pushes == {"a/p2": "a/d2"}
    world.receives(asks("a/d1", digest="one"))
    assert world.pushes == {"a/p2": "a/d2", "a/p1": "a/d1"}
    world.comes("a/p3", "three")
    assert world.take_registration("a/p3") == asks("a/d3", digest="three")


@pytest.mark.parametrize(("ours", "theirs"), [(None, "one"), ("one", None), (None, None)])
def test_a_missing_prompt_digest_prevents_no_match(ours: str | None, theirs: str | None) -> None:
    world = World("a/p", digests={} if ours is None else {"a/p": ours})
    world.receives(asks(digest=theirs))
    assert world.pushes == {"a/p": "a/d"}


@pytest.mark.parametrize("begun", [True, False])
def test_a_registration_fails_if_the_named_request_has_another_prompt(begun: bool) -> None:
    world = World(*(["a/p"] if begun else []), digests={"a/p": "one"} if begun else {})
    world.receives(asks("b/d", prefill="a/p", digest="two"))
    world.comes("a/p", "one")
    assert world.take_registration() is None
    assert world.pushes == {}
    assert Fail in map(type, world.received()), "D would wait for ever"
    assert world.claims.pending == 0


OTHER = failure(OTHER_PROMPT, epoch=0)


@pytest.mark.parametrize("order", ["the request first", "the registration first"])
@pytest.mark.parametrize("transfer", [None, "t"], ids=["by name", "by transfer"])
def test_a_registration_fails_soon_if_its_name_has_another_prompt(order: str, transfer: str | None) -> None:
    """The router dispatches at once, so D does not know P's whole id. P's prompt may still be in the queue."""
    world, wanted = World(), asks(prefill="a", digest="two", transfer=transfer)
    steps = [lambda: world.comes("a/p", "one", transfer), lambda: world.receives(wanted)]
    for step in steps if order == "the request first" else reversed(steps):
        step()
    world.tick(OTHER_PROMPT_S - 0.1)
    assert OTHER not in world.received()
    world.tick(1.1)
    assert world.received() == [OTHER]
    assert world.claims.pending == 0
    assert world.take_registration() is None


def test_a_registration_waits_for_its_prompt_of_a_name_given_twice() -> None:
    """The second prompt's registration is older than its request."""
    world = World()
    world.comes("a/p1", "one")
    world.receives(asks("a/d2", prefill="a", digest="two"))
    world.comes("a/p2", "two")
    world.tick(UNKNOWN_S)
    world.tick(UNKNOWN_S)
    assert world.received() == [Accepted("a/d2")]
    assert world.take_registration("a/p1") is None
    assert world.take_registration("a/p2") == asks("a/d2", prefill="a", digest="two")


def test_a_registration_waits_while_the_prompt_of_its_name_is_unknown() -> None:
    world = World()
    world.claims.requests_arrived([Arrived("a/p")])
    world.receives(asks(prefill="a", digest="two"))
    world.tick(UNKNOWN_S)
    assert world.received() == [Accepted("a/d")]


def test_a_registration_waits_for_its_own_prompt_of_the_named_request() -> None:
    world = World("cmpl-a-0/p", digests={"cmpl-a-0/p": "one"})
    world.receives(asks("cmpl-a-1/d", prefill="cmpl-a-0/p", digest="two"))
    assert world.received() == [Accepted("cmpl-a-1/d")]
    assert world.claims.pending == 1


# Several claims that may mean one request.


def waiting(world: World) -> list[str]:
    """D's ids of the claims that wait, oldest first."""
    return [claim.request_id for claim in world.claims._claims.waiting]


def test_an_exact_id_takes_precedence_over_a_base_id() -> None:
    world = World()
    for one in ("a/1", "a/2", "b/1"):
        world.receives(asks(one))
    assert [world.take_registration(name) for name in ("a/1", "b/7", "c/1")] == [asks("a/1"), asks("b/1"), None]
    assert waiting(world) == ["a/2"]


@pytest.mark.parametrize("own", ["a/d", "x/d"])
def test_the_named_request_takes_precedence_over_a_base_id(own: str) -> None:
    world, named = World(), asks(own, prefill="a/p7")
    world.receives(named)
    world.receives(asks("a/new"))
    assert world.take_registration("a/p7") == named


def test_the_newest_registration_of_a_base_id_is_taken_first() -> None:
    """A repeated one is not new, and a different one of the same id is."""
    world = World()
    for one in ("a/1", "a/2", "a/3"):
        world.receives(asks(one))
    world.receives(asks("a/1"), "d-1")
    world.receives(asks("a/2", blocks=(3, 4)))
    assert [world.take_registration(f"a/{name}") for name in "xyz"] == [
        asks("a/2", blocks=(3, 4)),
        asks("a/3"),
        asks("a/1"),
    ]


def test_a_taken_registration_drops_older_stock_ones_of_its_base_id() -> None:
    """A stock engine never cancels a registration that a router left behind for a new try; others do."""
    world = World()
    for one, layerpush in (("a/stock", 0), ("a/ours", 1), ("b/stock", 0), ("a/new", 1)):
        world.receives(asks(one, layerpush=layerpush))
    assert world.take_registration("a/x") == asks("a/new")
    assert waiting(world) == ["a/ours", "b/stock"]


def test_a_claim_that_is_too_old_is_not_taken() -> None:
    """Its time begins anew if another registration takes its place, and not with another rank's copy."""
    world = World()
    world.receives(asks("a/d", layerpush=0))
    world.receives(asks("b/d", layerpush=0))
    world.now += 5.0
    world.receives(asks("a/d", layerpush=0), "d-1")
    world.receives(asks("b/d", layerpush=0, blocks=(3, 4)))
    world.now += WAITING_S - 5.0
    assert world.take_registration("a/p") is None
    world.tick()
    assert waiting(world) == ["b/d"]


def test_equal_ids_of_two_engines_are_two_claims() -> None:
    world = World()
    world.receives(asks())
    world.receives(asks(engine="E"), "e-0")
    assert world.claims.pending == 2
    world.cancels(asks())
    assert world.take_registration() == asks(engine="E")


# Cancelled registrations.


def test_a_cancel_before_the_request_drops_the_registration() -> None:
    world, wanted = World(), asks()
    world.receives(wanted)
    assert not world.is_unwanted()
    world.received()
    world.cancels(wanted)
    assert world.received() == [Cancelled("a/d")]
    assert world.take_registration() is None
    world.begin("a/q")
    world.receives(wanted, "d-1")
    assert world.received() == [Cancelled("a/d")], "a late rank gets the answer, too"
    assert world.pushes == {}
    assert [world.is_unwanted(name) for name in ("b/p", "a/p", "a/p")] == [False, True, False]


@pytest.mark.parametrize("after", ["it is old", "the request was aborted"])
def test_an_early_cancel_is_forgotten(after: str) -> None:
    """A client that hangs up ends both halves. When it tries again, the request is wanted."""
    world, wanted = World(), asks()
    world.receives(wanted)
    world.cancels(wanted)
    if after == "it is old":
        assert not world.is_unwanted(seconds=WAITING_S)
    else:
        world.ends("a/p")
        assert not world.is_unwanted("a/q")


def test_a_cancel_before_the_registration_prevents_the_push() -> None:
    """The cancel of one rank may overtake the registration of another."""
    world, wanted = World("a/p"), asks()
    world.cancels(wanted)
    assert world.received() == [Cancelled("a/d")]
    assert not world.is_unwanted()
    world.receives(wanted, "d-1")
    assert world.received() == [Cancelled("a/d")]
    assert world.pushes == {}


def test_a_cancel_during_a_write_is_answered_after_its_end() -> None:
    """A rank that asks meanwhile gets no answer: all ranks would believe it."""
    world = World()
    wanted = world.served()
    world.writer.on_the_wire = {"a/p"}
    world.cancels(wanted)
    world.cancels(wanted)
    world.receives(wanted, "d-1")
    assert set(world.received()) <= {Accepted("a/d")}
    world.writer.on_the_wire = set()
    world.fails(wanted, "the decode engine cancelled its registration", cancelled=True)
    assert world.received() == [Cancelled("a/d")]
    world.receives(wanted, "d-1")
    assert world.received() == [Cancelled("a/d")]


def test_a_d_that_cancels_hears_that_p_doubts_what_has_landed() -> None:
    """And the copies of its registration do."""
    world = World()
    wanted = world.served()
    world.claims.report_failure(ReportFailure(wanted, 3, "CoverageError", True, cancelled=True, void=True), world.now)
    world.receives(wanted, "d-1")
    world.settle()
    assert world.received() == 2 * [Fail("a/d", 3, "CoverageError", True, void=True)]


def test_an_engine_cannot_cancel_registrations_of_another() -> None:
    world = World()
    wanted = world.served()
    world.cancels(wanted, "e-0")
    assert world.writer.cancelled == []
    assert world.received() == []
    assert world.peer_errors.counts == {"foreign cancel": 1}
    world.cancels(wanted, "d-1")
    assert len(world.writer.cancelled) == 1


def test_a_rank_may_cancel_after_a_late_registration() -> None:
    """Its answer may have been lost, and it repeats the cancel until it gets one."""
    world = World()
    wanted = world.served()
    world.fails(wanted, "cut off")
    world.mail.taken()
    world.network.connected["D"] = ("d-0",)
    world.receives(wanted, "d-1")
    world.cancels(wanted, "d-1")
    assert world.received("d-0") == [failure("cut off"), Cancelled("a/d")]


# Failed pushes.


def test_a_long_reason_is_cut_short() -> None:
    world = World()
    world.fails(world.served(), "x" * 10_000)
    assert world.received() == [failure("x" * MAX_REASON_CHARS)]


def test_a_waiting_registration_fails_with_its_request() -> None:
    world = World()
    world.receives(asks())
    world.receives(asks("b/d"))
    world.received()
    world.ends("a/p")
    assert world.received() == [failure("aborted", epoch=0)]
    assert world.take_registration() is None
    assert world.take_registration("b/p") == asks("b/d")


@pytest.mark.parametrize("wanted", [asks(), asks("zzz", prefill="a/p")], ids=["by base id", "by name"])
def test_a_registration_after_a_failed_request_is_refused(wanted: Registration) -> None:
    world = World()
    world.ends("a/p", "its lease ran out")
    world.now += ENDED_S - 1
    refusal = failure("the prefill request has ended: its lease ran out", request_id=wanted.request_id, epoch=0)
    world.receives(wanted)
    assert refusal in world.received()
    world.receives(wanted, "d-1")
    assert world.received() == [refusal]
    assert world.take_registration("a/q") is None


@pytest.mark.parametrize(
    "first", ["was pushed", "waited", "came late", "was cancelled", "was declined", "was declined late", "was refused"]
)
def test_a_second_registration_of_a_name_waits_for_a_later_request(first: str) -> None:
    """A router tries again, at once and with the same id. The registration that has heard of the end is the first one;
    only one that names the ended request exactly hears of it again.
    """
    world = World()
    if first == "was pushed":
        world.served()
        world.closes(asks())
    elif first in ("waited", "was cancelled", "was refused"):
        world.receives(asks())
    if first == "was cancelled":
        world.cancels(asks())
    elif first == "was declined":
        world.claims.on_decline(declined(), world.now)
    if first == "was refused":
        world.claims.request_refused("a/p", None, world.now)
    else:
        world.ends("a/p")
    if first == "came late":
        world.receives(asks())
    elif first == "was declined late":
        world.claims.on_decline(declined(), world.now)
    world.settle()
    world.received()
    second = asks("a/e")
    world.receives(second)
    assert world.received() == [Accepted("a/e")]
    assert world.take_registration("a/q") == second
    assert not world.is_unwanted("a/q")
    world.receives(asks("a/f", prefill="a/p"))
    (_, refusal) = world.received()
    assert isinstance(refusal, Fail)


def test_a_registration_waits_while_the_request_before_is_aborted() -> None:
    """The second attempt's registration may come before the first one's end."""
    world = World()
    world.served()
    world.receives(asks("a/e"))
    world.ends("a/p")
    assert world.received() == [Accepted("a/e")]
    assert world.take_registration("a/q") == asks("a/e")


@pytest.mark.parametrize("order", ["the refusal first", "the registration first"])
@pytest.mark.parametrize("wanted", [asks(), asks("x/d", prefill="a"), asks("y/d", transfer="t")])
def test_a_registration_for_a_refused_request_fails_at_once(order: str, wanted: Registration) -> None:
    world = World()
    if order == "the registration first":
        world.receives(wanted)
    world.claims.request_refused("a/p", wanted.transfer_id, world.now)
    world.settle()
    if order == "the refusal first":
        world.receives(wanted)
    assert failure(REFUSED, request_id=wanted.request_id, epoch=0) in world.received()
    assert world.claims.pending == 0


def test_a_refusal_fails_all_answers_to_its_prompt_and_nothing_else() -> None:
    world, wanted = World(), answers(2)
    for registration in (*wanted, asks("b/d"), asks("chat-a/e", layerpush=0)):
        world.receives(registration)
    world.received()
    world.claims.request_refused("chat-a/p", None, world.now)
    world.settle()
    assert [each.request_id for each in world.received()] == [each.request_id for each in wanted]
    assert world.claims.pending == 2, "the other name, and a stock engine's"


def test_a_refusal_counts_for_no_request_that_is_here() -> None:
    """Two requests may have one name. The prompt of the refused one is not known."""
    world = World()
    world.comes("a/p", "one")
    world.receives(asks(digest="one"))
    world.claims.request_refused("a/q", None, world.now)
    assert world.take_registration("a/p") == asks(digest="one")


def test_the_end_of_an_unrelated_request_refuses_no_registration() -> None:
    world = World()
    world.ends("a/p", None)
    world.ends("cmpl-b-0/p")  # another prompt of the request
    world.ends("c/p")
    world.take_registration("c/q")  # it came again
    world.ends("e/p")
    world.claims.requests_arrived([Arrived("e/q")])  # it came again, perhaps before the writer knows
    wanted = [asks(), asks("cmpl-b-1/d", prefill="cmpl-b-0"), asks("c/d"), asks("e/d")]
    for registration in wanted:
        world.receives(registration)
    refusals = [message for message in world.received() if not isinstance(message, Accepted)]
    assert refusals == []
    assert world.take_registration("e/q") == asks("e/d")


def test_a_failed_request_is_forgotten_after_a_timeout() -> None:
    world = World()
    world.ends("a/p")
    world.now += ENDED_S
    world.receives(asks("a/d"))
    assert world.received() == [Accepted("a/d")]
    world.tick()
    assert len(world.claims._prompts._ended) == 0


UNKNOWN = failure("no such request came to the prefill engine", epoch=0)


def test_a_registration_without_a_request_is_refused_after_a_timeout() -> None:
    """The engine is idle: it would have begun a step for any request."""
    world = World()
    world.receives(asks())
    world.tick(UNKNOWN_S / 2)
    world.receives(asks())  # another rank's; the first one's time counts
    world.received()
    world.tick(UNKNOWN_S / 2 - 0.1)
    assert world.received() == []
    world.tick(1.0)
    assert world.received() == [UNKNOWN]
    world.receives(asks())
    assert world.received() == [UNKNOWN]
    assert world.take_registration() is None


@pytest.mark.parametrize(
    ("request_id", "transfer"), [("a/p", None), ("cmpl-p-0/p", "t")], ids=["by name", "by transfer"]
)
def test_a_registration_waits_while_its_request_is_in_the_queue(request_id: str, transfer: str | None) -> None:
    """It leaves when it was pushed to another decode engine."""
    world = World()
    world.claims.requests_arrived([Arrived(request_id, transfer), Arrived("b/p")])
    world.receives(asks(transfer=transfer))
    world.tick(2 * UNKNOWN_S)
    world.tick(2 * UNKNOWN_S)
    assert world.received() == [Accepted("a/d")]
    assert world.claims.pending == 1
    world.ends(request_id, None)
    world.tick(2.0)
    assert world.received() == [UNKNOWN]


def test_an_aborted_request_is_removed_from_the_arrivals() -> None:
    """Its arrival is handled on demand, and before its end."""
    world = World()
    world.claims.requests_arrived([Arrived("a/p"), Arrived("b/p")])
    world.ends("a/p")
    world.ends("unknown")
    assert [each.request_id for each in world.claims._prompts] == ["b/p"]


def test_a_request_after_the_refusal_of_its_registration_is_unwanted() -> None:
    world = World()
    world.receives(asks())
    world.tick(UNKNOWN_S)
    world.tick(2.0)
    assert UNKNOWN in world.received()
    assert world.take_registration() is None
    assert world.is_unwanted()


def test_a_long_step_delays_the_refusal_of_a_registration() -> None:
    """A step that begins next may have been scheduled before the request came."""
    world = World()
    world.steps = 1, True
    world.receives(asks())
    for running in (True, False, True, False):
        world.steps = (world.steps[0] + running, running)
        world.tick(UNKNOWN_S)
        assert world.received() == [Accepted("a/d")][: world.steps == (2, True)]
    world.steps = 4, True
    world.tick(2.0)
    assert world.received() == [UNKNOWN]


def test_the_oldest_registration_is_refused_beyond_the_limit() -> None:
    world = World()
    for number in range(WAITING + 1):
        world.receives(asks(f"r{number}/d"))
    assert [message.request_id for message in world.received() if isinstance(message, Fail)] == ["r0/d"]


def test_a_flood_of_unknown_requests_is_one_log_line(caplog: pytest.LogCaptureFixture) -> None:
    """The first one gives the reason. The refusal of a request that was here has a line of its own."""
    world = World()
    for number in range(30):
        world.receives(asks(f"r{number}/d"))
    world.receives(asks())
    world.tick(UNKNOWN_S - 1.0)
    world.ends("a/p")
    world.tick(3.0)
    lines = [record.getMessage() for record in caplog.records]
    refused = [line for line in lines if "no push for" in line]
    assert refused == [f"layerpush: no push for {one}" for one in ("a/d: aborted", f"r0/d: {UNKNOWN.reason}")]
    assert world.peer_errors.counts == {"unknown request": 30, "refused registration": 1}


@pytest.mark.parametrize("turns", [False, True])
def test_many_registrations_time_out_in_several_ticks(turns: bool) -> None:
    """Pushes go on meanwhile: each tick ends soon, and the next one is due at once."""
    world, many = World(), 3 * TIMED_OUT_AT_ONCE
    for number in range(many):
        wanted = msgspec.structs.replace(asks_for_turn(), request_id=f"r{number}/d", prefill_request_id=f"t{number}/p")
        world.receives(wanted if turns else asks(f"r{number}/d"))
    world.tick(UNKNOWN_S - 1.0 if not turns else 0.0)
    world.received()
    world.tick(2.0)
    for left in range(many - TIMED_OUT_AT_ONCE, 0, -TIMED_OUT_AT_ONCE):
        assert (len(world.received()), world.claims.pending) == (TIMED_OUT_AT_ONCE, left)
        assert world.claims.next_due(world.now) == world.now
        world.tick()
    assert (len(world.received()), world.claims.pending) == (TIMED_OUT_AT_ONCE, 0)


# A router that gives both engines the same transfer_id.


@pytest.mark.parametrize("order", ["the request first", "the registration first"])
def test_a_transfer_id_matches_requests_with_different_names(order: str) -> None:
    world, wanted = World(), asks("cmpl-d-0/d", transfer="t")
    if order == "the request first":
        world.begins(p_0="t")
        world.receives(wanted)
        assert world.pushes == {"cmpl-p-0/p": "cmpl-d-0/d"}
    else:
        world.receives(wanted)
        world.begins(p_0="t")
        assert world.take_registration("cmpl-p-0/p") == wanted


def test_different_transfer_ids_distinguish_equal_names() -> None:
    """A router tries again with the same id."""
    world = World()
    world.begins(x_0="t-1")
    world.receives(asks("cmpl-x-0/d", transfer="t-2"))
    assert world.pushes == {}
    world.begins(x_0="t-2")
    assert world.take_registration("cmpl-x-0/p") == asks("cmpl-x-0/d", transfer="t-2")


@pytest.mark.parametrize("ours", [None, "t"])
def test_names_match_without_a_transfer_id_on_both_sides(ours: str | None) -> None:
    world = World()
    world.begin("a/p", transfer=ours)
    world.receives(asks("a/d", transfer=None if ours else "t"))
    assert world.pushes == {"a/p": "a/d"}


@pytest.mark.parametrize(
    ("begun", "registered", "pushes"),
    [
        (["p_0", "p_1"], ["cmpl-d-1/d", "cmpl-d-0/d"], {"cmpl-p-1/p": "cmpl-d-1/d", "cmpl-p-0/p": "cmpl-d-0/d"}),
        (["p_0"], ["chatcmpl-d/d"], {"cmpl-p-0/p": "chatcmpl-d/d"}),
        (["p_0"], ["1_cmpl-d-0/d", "0_cmpl-d-0/d"], {"cmpl-p-0/p": "0_cmpl-d-0/d"}),
    ],
    ids=["prompts by their numbers", "a completion and a chat", "the first of several answers"],
)
def test_prompts_and_answers_of_one_transfer_are_matched(
    begun: list[str], registered: list[str], pushes: dict[str, str]
) -> None:
    world = World()
    world.begins(**dict.fromkeys(begun, "t"))
    for request_id in registered:
        world.receives(asks(request_id, transfer="t"))
    assert world.pushes == pushes
    refused = [message for message in world.received() if isinstance(message, Fail)]
    spare = [request_id for request_id in registered if request_id not in pushes.values()]
    assert refused == [failure(SPARE_ANSWER, request_id=request_id, epoch=0) for request_id in spare]


def test_a_transfer_id_does_not_match_different_prompts() -> None:
    world = World(digests={"cmpl-p-0/p": "one"})
    world.begins(p_0="t")
    world.receives(asks("cmpl-d-0/d", transfer="t", digest="another"))
    assert world.pushes == {}


@pytest.mark.parametrize("why", ["aborted", "another answer"])
def test_the_end_of_a_transfer_is_remembered_until_its_next_request(why: str) -> None:
    world = World()
    world.begins(p_0="t")
    world.writer.unclaimed = []
    world.ends("cmpl-p-0/p", "aborted" if why == "aborted" else None)
    d = "cmpl-d-0/d" if why == "aborted" else "1_cmpl-d-0/d"
    reason = "the prefill request has ended: aborted" if why == "aborted" else SPARE_ANSWER
    world.receives(asks(d, transfer="t"))
    assert failure(reason, request_id=d, epoch=0) in world.received()
    world.claims.requests_arrived([Arrived("cmpl-q-0/p", "t")])
    world.receives(asks("cmpl-e-0/d", transfer="t"))
    assert world.received() == [Accepted("cmpl-e-0/d")], "it came again"


# A request that went to another data-parallel rank of the prefill engine.

ELSEWHERE = failure("the request went to data-parallel rank 1 of the prefill engine", epoch=0)


@pytest.mark.parametrize("registered", ["before", "after"])
def test_a_registration_at_the_wrong_rank_fails_at_once(registered: str) -> None:
    world = World()
    if registered == "before":
        world.receives(asks())
    world.claims.rank_is_other("a/p", 1, world.now)
    world.settle()
    if registered == "after":
        world.receives(asks())
    assert ELSEWHERE in world.received()
    assert world.take_registration() is None


def test_the_next_attempt_may_use_this_rank() -> None:
    world = World()
    world.claims.rank_is_other("a/p", 1, world.now)
    world.tick(ELSEWHERE_S)
    world.receives(asks())
    assert world.received() == [Accepted("a/d")]
    assert world.take_registration("a/q") == asks()


def test_a_local_request_is_pushed_even_if_another_went_elsewhere() -> None:
    world = World("a/p")
    world.claims.rank_is_other("a/q", 1, world.now)
    world.receives(asks())
    assert world.pushes == {"a/p": "a/d"}


# Many other requests.


def junk(world: World, count: int) -> None:
    """Registrations and declines of requests that never come, and prompts that wait for a registration."""
    for number in range(count):
        names = f"7_cmpl-j{number}-1-3/d", f"cmpl-j{number}-2/p"
        world.claims.on_registration("d-0", asks(names[0], prefill=names[1], transfer=f"t{number}"), world.now)
        world.claims.on_decline(Decline(f"n{number}/d", "D", f"n{number}/p"), world.now)
        world.ends(f"e{number}/p")
    world.begin(*(f"w{number}/p" for number in range(count)))
    world.settle()


@pytest.mark.parametrize("numbered", [True, False])
def test_the_cost_of_a_request_does_not_grow_with_others(monkeypatch: pytest.MonkeyPatch, numbered: bool) -> None:
    world, compared = World(), list[str]()

    def count(name: str) -> None:
        compare = getattr(Pairing, name)

        def counted(self: Pairing, *args: Any) -> bool:
            compared.append(name)
            return bool(compare(self, *args))

        monkeypatch.setattr(Pairing, name, counted)

    for name in ("is_for", "is_misnamed", "is_spare_answer", "_is_prompt"):
        count(name)
    junk(world, 1000)
    compared.clear()
    own = "0_cmpl-a-0" if numbered else "cmpl-a-0"
    wanted = asks(f"{own}/d", transfer="a")
    world.receives(wanted)
    assert world.take_registration("cmpl-a-0/p") == wanted
    assert not world.is_unwanted("cmpl-a-0/p")
    world.ends("cmpl-a-0/p")
    world.begin("cmpl-b-0/p", "cmpl-c-0/p")
    world.receives(asks("cmpl-b-0/d"))
    assert world.pushes == {"cmpl-b-0/p": "cmpl-b-0/d"}
    world.claims.on_decline(Decline("cmpl-c-0/d", "D"), world.now)
    assert len(compared) < 20, "of eight operations beside 4,000 other requests"


# Requests whose KV the decode engine no longer wants.


@pytest.mark.parametrize("when", ["it is pushed", "it waits in the queue", "it is not here", "it was declined"])
def test_a_cancelled_or_declined_request_is_withdrawn(when: str) -> None:
    world, wanted = World(), asks()
    if when == "it is pushed":
        world.served(wanted)
    elif when != "it is not here":
        world.claims.requests_arrived([Arrived("b/p"), Arrived("a/p")])
    if when == "it was declined":
        world.claims.on_decline(declined(), world.now)
    else:
        world.receives(wanted)
        world.cancels(wanted)
    assert world.withdrawn == ([] if when == "it is not here" else ["a/p"])


def test_a_decline_of_an_ended_request_withdraws_no_other() -> None:
    """The next attempt has the same id but for its random suffix."""
    world = World()
    world.claims.requests_arrived([Arrived("a/p")])
    world.claims.on_decline(declined(prefill="a/q"), world.now)
    assert world.withdrawn == []
    world.claims.on_decline(declined(prefill="a/p"), world.now)
    assert world.withdrawn == ["a/p"]


# Stock engines: they understand no answer, so they wait.


def test_a_stock_engine_gets_no_answers() -> None:
    world = World()
    wanted = world.served(STOCK)
    world.claims.send_first_token(SendFirstToken(wanted, 7), world.now)
    world.receives(wanted, "d-1")
    world.receives(asks(layerpush=0, blocks=(3, 4)))
    assert world.peer_errors.counts == {"id in use": 1}
    world.fails(wanted, "cut off", drained=False)
    world.fails(wanted, "cut off")
    world.ends("a/p", "cut off")
    world.receives(asks("c/d", layerpush=0))
    world.tick(WAITING_S)
    assert world.mail.sent == []
    assert world.network.handshakes == []


@pytest.mark.parametrize("registered", ["before the abort", "after it"])
def test_a_stock_registration_is_kept_after_an_abort(registered: str) -> None:
    world = World()
    if registered == "before the abort":
        world.fails(world.served(STOCK), "aborted")
    world.ends("a/p")
    if registered == "after it":
        world.receives(STOCK)
    assert world.take_registration("a/q") == STOCK


@pytest.mark.parametrize(("reason", "drained"), [("cut off", True), ("aborted", False)])
def test_a_stock_registration_is_dropped_after_other_failures(reason: str, drained: bool) -> None:
    world = World()
    world.fails(world.served(STOCK), reason, drained)
    assert world.take_registration("a/q") is None


# Memory.


@pytest.fixture
def crowded(monkeypatch: pytest.MonkeyPatch) -> World:
    """Registrations that remember 10 of each kind."""
    monkeypatch.setattr(claim_table, "REMEMBERED", 10)
    return World()


def crowd(world: World) -> None:
    """Many other requests come and go."""
    for number in range(50):
        other = world.served(asks(f"r{number}/d"), f"r{number}/p")
        world.fails(other, "cut off")
        world.closes(other)
        world.cancels(asks(f"c{number}/d", engine="E"), "e-0")
    world.mail.taken()


def test_memory_is_bounded(crowded: World) -> None:
    crowd(crowded)
    known = crowded.claims._claims
    assert all(len(memory) <= 10 for memory in (known._served, known._over))


def test_a_long_push_can_still_be_cancelled_after_many_others(crowded: World) -> None:
    """Else its cancel would be answered with a write on the wire."""
    wanted = crowded.served()
    crowded.writer.on_the_wire = {"a/p"}
    crowd(crowded)
    crowded.cancels(wanted)
    assert crowded.writer.cancelled == [("a/p", wanted.key)]
    assert crowded.received() == []
    crowded.cancels(wanted, "e-0")
    assert crowded.peer_errors.counts == {"foreign cancel": 1}, "the push's engine is still known"


@pytest.mark.parametrize("begun", [True, False])
def test_the_sender_of_a_live_registration_is_remembered(begun: bool, crowded: World) -> None:
    """Else the sender would seem to be a restarted process."""
    wanted = asks()
    if begun:
        crowded.served(wanted)
    else:
        crowded.receives(wanted)
    crowd(crowded)
    assert crowded.is_current(wanted)
    assert len(crowded.claims._claims._served) <= 11
    if not begun:
        assert crowded.take_registration() == wanted
        crowd(crowded)
        assert crowded.is_current(wanted)


def test_registrations_of_further_ranks_evict_no_others(crowded: World) -> None:
    """More requests may be wanted at once than ended ones are remembered."""
    wanted = [asks(f"r{number}/d") for number in range(30)]
    for rank, one in product(("d-0", "d-1"), wanted):
        crowded.receives(one, rank)
    assert [one.request_id for one in wanted if not crowded.is_current(one)] == []


# One id for two requests.


def test_a_claim_names_as_many_senders_as_an_engine_may_have_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim_session, "MAX_TP_SIZE", 2)
    claim = claim_session.Claim(FIRST.key)
    for rank in range(4):
        claim.handle(claim_protocol.Registered(f"d-{rank}", FIRST, reachable=True, busy=False), 0.0)
    assert claim.senders == {"d-0", "d-1"}


def test_a_different_registration_replaces_a_waiting_one() -> None:
    """The process that sent the first one is dead, and its successor has given its blocks to others."""
    world = World()
    world.receives(FIRST, "d-0")
    world.network.connected["D"] = ("d-new",)
    world.receives(SECOND, "d-new")
    assert (world.is_current(FIRST), world.is_current(SECOND)) == (False, True)
    assert [world.take_registration(), world.take_registration("a/q")] == [SECOND, None]
    assert world.peer_errors.counts == {}


def test_a_different_registration_is_refused_during_the_push() -> None:
    world = World()
    world.served(FIRST)
    world.begin("a/q")
    world.receives(SECOND, "d-1")
    assert world.received() == [failure("another request of this id is being pushed", epoch=0)]
    assert world.peer_errors.counts == {"id in use": 1}
    assert world.pushes == {"a/p": "a/d"}
    assert (world.is_current(FIRST), world.is_current(SECOND)) == (True, False)
    world.receives(FIRST, "d-1")
    assert world.received() == [Accepted("a/d")], "the older one has not failed"
    world.cancels(FIRST)
    assert world.writer.cancelled == [("a/p", FIRST.key)]


@pytest.mark.parametrize("end", ["failed", "cancelled", "completed"])
def test_a_reused_id_starts_without_the_earlier_result(end: str) -> None:
    """The end of the id's earlier request does not count."""
    world = World()
    world.served(FIRST)
    if end == "failed":
        world.fails(FIRST, "cut off")
    elif end == "cancelled":
        world.cancels(FIRST)
    world.closes(FIRST)
    world.received()
    world.receives(SECOND)
    assert world.received() == [Accepted("a/d")]
    assert world.take_registration("a/q") == SECOND
    assert world.peer_errors.counts == {}


def test_a_ping_is_answered_only_for_a_known_agent() -> None:
    world = World()
    world.claims.on_ping("d-0", Ping("D", 7))
    world.served()
    world.claims.on_ping("d-1", Ping("D", 8))
    world.claims.on_ping("d-new", Ping("D", 9))
    assert world.mail.taken() == [("d-1", Pong(8))]


# Lost connections: WRITEs must end first; no push begins and no answer is sent meanwhile.

FAILS = [failure("cut off", drained=False), failure("cut off")]


def doomed(*served: str) -> tuple[World, Registration]:
    """A push to D has failed with its connection, and another WRITE to D is still on the wire. D's requests "<name>/d"
    are served, too.
    """
    world = World()
    for name in served:
        world.served(asks(f"{name}/d"), f"{name}/p")
    wanted = world.served()
    world.writer.engines_in_flight = {"D"}
    world.loses("D")
    world.fails(wanted, "cut off", drained=False)
    world.fails(wanted, "cut off")
    world.closes(wanted)
    world.tick()
    assert world.mail.sent == []
    return world, wanted


def drops(world: World) -> None:
    """The last WRITE has ended."""
    world.writer.engines_in_flight = {"E"}
    world.tick()
    assert world.network.forgotten == ["D"]


def sorted_messages(world: World, *ranks: str) -> list[str]:
    """Sorted: the message that begins the handshake waits for it, and later messages overtake it."""
    return sorted(map(repr, world.received(*ranks)))


def these(*messages: Message) -> list[str]:
    return sorted(map(repr, messages))


@pytest.mark.parametrize("how", ["registers", "cancels"])
@pytest.mark.parametrize("about", ["the same", "another"])
def test_withheld_messages_are_sent_once_to_an_engine_that_sends_again(how: str, about: str) -> None:
    world, wanted = doomed()
    drops(world)
    assert world.mail.sent == [], "D may be dead"
    assert world.network.handshakes == []
    asked = wanted if about == "the same" else asks("b/d")
    if how == "registers":
        world.receives(asked)
        answer: Message = FAILS[1] if about == "the same" else Accepted("b/d")
    else:
        world.cancels(asked)
        answer = Cancelled(asked.request_id)
    assert sorted_messages(world) == these(*FAILS, answer)
    assert len(world.network.handshakes) == 1
    world.receives(asks("c/d"))
    assert world.received() == [Accepted("c/d")]


@pytest.mark.parametrize("dropped", [True, False])
def test_withheld_messages_expire(dropped: bool) -> None:
    world, wanted = doomed("b", "e")
    if dropped:
        drops(world)
    world.now += ENDED_S / 2
    world.fails(asks("b/d"), "cut off")
    assert world.mail.sent == []
    world.tick(ENDED_S / 2)
    if not dropped:
        drops(world)
    world.claims.requests_arrived([Arrived("c/p")])
    world.receives(asks("c/d"))
    assert sorted_messages(world) == these(failure("cut off", request_id="b/d"), Accepted("c/d"))
    world.receives(wanted)
    assert world.received() == [FAILS[1]], "the failure is still known"
    world.loses("D")
    world.fails(asks("e/d"), "cut off")
    world.tick(ENDED_S)
    assert len(world.claims.peers._withheld) == 0


def test_refusals_are_withheld_until_the_connection_is_dropped() -> None:
    world = World()
    world.receives(asks("b/d"))
    world.received()
    world.writer.engines_in_flight = {"D"}
    world.loses("D")
    world.ends("b/p")
    world.receives(asks("b/d"), "d-1")
    assert world.received() == []
    drops(world)
    assert failure("aborted", request_id="b/d", epoch=0) in world.received()


def test_no_lost_engine_gets_a_message_before_its_connection_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world, _ = doomed("b")
    monkeypatch.setattr(decode_peers, "HELD", 2)
    world.writer.engines_in_flight = {"D", "E", "F", "G"}
    world.loses("E", "F", "G")
    world.fails(asks("b/d"), "cut off")
    world.tick()
    assert world.mail.sent == []
    assert world.network.handshakes == []


def test_a_cancel_is_not_answered_before_the_lost_connection_is_dropped() -> None:
    """This holds for any request, with or without a WRITE on the wire."""
    world, wanted = doomed()
    for cancelled in (wanted, asks("never/registered")):
        world.cancels(cancelled)
        assert world.received() == []
    assert world.network.handshakes == []
    assert world.writer.cancelled == []
    drops(world)
    assert world.mail.sent == []
    world.cancels(wanted)
    assert sorted_messages(world) == these(*FAILS, Cancelled("a/d"))


@pytest.mark.parametrize("rank", ["d-0", "d-1", "d-new"])
def test_a_registration_is_deferred_until_the_lost_connection_is_dropped(rank: str) -> None:
    world, wanted = doomed()
    world.begin("b/p")
    world.receives(asks("b/d"), rank)
    world.receives(wanted, rank)
    world.tick()
    assert world.mail.sent == []
    assert "b/p" not in world.pushes
    assert world.probed == [], "the sender makes no difference"
    world.network.listening["D"] = ("d-new",) if rank == "d-new" else ("d-0", "d-1")
    drops(world)
    assert world.writer.pushes[1:] == [("b/p", asks("b/d"))]
    assert world.is_current(asks("b/d"))
    assert sorted_messages(world, *world.network.connected["D"]) == these(*FAILS, Accepted("b/d"), FAILS[1])
    world.tick()
    assert len(world.pushes) == 2


def test_messages_to_other_engines_are_sent_at_once() -> None:
    world, _ = doomed()
    other = asks("b/d", engine="E")
    world.begin("b/p")
    world.receives(other, "e-0")
    world.fails(other, "cut off")
    assert world.received("e-0") == [Accepted("b/d"), failure("cut off", request_id="b/d")]


# Strangers: an unknown agent registers in an engine's name.


def strange(host: str = "10.0.0.7", allowed: tuple[str, ...] | None = None) -> tuple[World, Registration]:
    """D is connected; another agent registers as D. D's side channel is asked about the known agent."""
    world = World(allowed_hosts=allowed)
    contact = b"contact of d-new" if allowed is None else b"contact of somebody else"
    known, newer = world.served(), asks("n/d", host=host, contact=contact)
    world.begin("n/p")
    world.receives(newer, "d-new")
    assert "n/p" not in world.pushes
    if host != "10.0.0.7":
        assert world.asked(Verdict.REPLACED) == [("d-0", (0, 0), address_of(newer))]
    assert [(one.agent, one.address) for one in world.probe.asked] == [("d-0", address_of(known))]
    return world, newer


def test_a_restarted_engine_is_connected_again() -> None:
    world, newer = strange()
    world.receives(asks("m/d"), "d-new")
    assert len(world.probed) == 1
    world.network.listening["D"] = ("d-new",)
    world.probe.answer(Verdict.ENDED)
    world.writer.engines_in_flight = {"D"}
    world.tick()
    assert "n/p" not in world.pushes, "the old agent's WRITEs have not ended"
    world.receives(asks("l/d"), "d-new")
    world.writer.engines_in_flight = set()
    world.tick()
    assert world.network.forgotten == ["D"]
    assert set(world.writer.failed) == {("D", "the decode engine was restarted")}
    assert world.writer.pushes[1:] == [("n/p", newer)]
    assert sorted(message.request_id for message in world.received("d-new")) == ["l/d", "m/d", "n/d"]
    assert world.take_registration("l/p") == asks("l/d")


def test_registrations_from_before_a_restart_are_dropped() -> None:
    world = World()
    world.receives(asks("old/d"))
    world.receives(asks("other/d", engine="E"), "e-0")
    world.receives(asks("n/d"), "d-new")
    world.probe.answer(Verdict.ENDED)
    assert world.take_registration("old/p") is None
    assert world.take_registration("other/p") is not None


@pytest.mark.parametrize("verdicts", [[Verdict.ALIVE], [Verdict.UNKNOWN] * PROBES], ids=["alive", "no answer"])
def test_an_unknown_agent_of_a_possibly_live_engine_is_ignored(verdicts: list[Verdict]) -> None:
    """The stranger may be left over from an earlier process, whose blocks have other owners by now. Or it is a rank
    that we do not write to.
    """
    world, _ = strange()
    for verdict in verdicts:
        assert world.peer_errors.counts == {}
        assert len(world.probed) == 1
        world.probe.answer(verdict)
    assert world.probed == []
    assert world.peer_errors.counts == {"engine id in use": 1}
    assert "n/p" not in world.pushes
    assert (world.writer.failed, world.network.forgotten, world.mail.taken()) == ([], [], [])


TWO = "two engines have the id 'D': one lives at 10.0.0.7:5600, and another at 10.6.6.6:5600"


@pytest.mark.parametrize("allowed", [None, ("10.0.0.0/8",)])
def test_the_second_of_two_living_engines_is_refused(
    allowed: tuple[str, ...] | None, caplog: pytest.LogCaptureFixture
) -> None:
    """P has written to it nowhere, so it may use its blocks again."""
    world, newer = strange("10.6.6.6", allowed)
    other = asks("m/d", host="10.6.6.6", contact=newer.contact)
    world.search.named = {"10.6.6.6": (b"contact of d-new",)}
    for again in (newer, other, newer):
        world.receives(again, "d-new")
    world.asked(Verdict.SPEAKS_LAYERPUSH)
    refused = [failure(TWO, request_id=each.request_id, epoch=0) for each in (newer, other)]
    assert sorted({*world.received("d-new")}, key=lambda each: each.request_id, reverse=True) == refused
    assert f"agent d-new registers n/d: {TWO}" in caplog.text
    world.network.connected["D"] = ("d-new",)
    world.receives(newer, "d-new")
    assert world.received("d-new") == refused[:1], "the answer is final: the blocks have other owners by now"
    assert "n/p" not in world.pushes


def test_an_engine_that_answers_no_probe_is_replaced_by_one_that_registers() -> None:
    """It has vanished: it proves nothing, and it keeps what WRITEs on their way to it read."""
    world, newer = strange("10.6.6.6")
    world.network.written_to = world.writer.engines_in_flight = {"D"}
    world.network.listening["D"] = ("d-new",)
    while world.probe.asked:
        assert "n/p" not in world.pushes
        world.asked(Verdict.UNKNOWN)
    assert world.network.retired == {"d-0", "d-1"}
    assert world.connections.address("D") == address_of(newer)
    assert world.writer.failed == [("D", DROPPED)]
    assert world.writer.pushes[1:] == [("n/p", newer)]
    assert world.is_current(newer)
    assert not world.is_current(asks())
    assert world.received("d-new") == [Accepted("n/d")]
    world.search.named = {"10.0.0.7": (b"contact of d-0",)}
    world.fails(asks(), "aborted")
    assert world.received("d-0") == [failure("aborted")], "it is no business of the new one"
    world.network.written_to = set()
    world.tick()
    assert world.network.retired == set()


def test_answers_that_were_kept_for_an_engine_do_not_go_to_its_namesake() -> None:
    world, _ = doomed()
    world.network.listening["D"] = ("d-new",)
    world.receives(asks("n/d", host="10.6.6.6"), "d-new")
    drops(world)
    world.begin("n/p")
    world.tick()
    assert {message.request_id for message in world.received("d-new")} == {"n/d"}


def test_a_registration_shows_another_address_of_its_sender() -> None:
    """A turn's request may have named it otherwise."""
    world = World("a/p")
    world.receives(asks(host="d.local"))
    assert world.pushes == {"a/p": "a/d"}
    world.receives(asks("n/d", host="d.local"), "d-2")
    assert world.asked(Verdict.ALIVE) == [("d-0", (0, 0), address_of(asks()))]
    assert {agent for agent, _ in world.mail.taken()} == {"d-0", "d-1"}, "d-2 is no engine of its own"


def test_a_registration_with_another_number_of_ranks_ends_a_connection() -> None:
    """Somebody named a wrong one, and the handshake accepted it: every answer would be dropped."""
    world = World("a/p")
    known = asks()
    world.network.connect(Address("D", "10.0.0.7", 5600, tp_size=1), "d-0")
    world.receives(known)
    world.tick()
    assert world.network.forgotten == ["D"]
    assert world.connections.address("D") == address_of(known)
    assert world.received() == [Accepted("a/d")]
    assert world.pushes == {"a/p": "a/d"}


def test_an_unknown_rank_is_probed_only_if_its_registration_differs() -> None:
    """Ranks that this rank does not write to register, too."""
    world = World()
    world.served(FIRST)
    world.receives(FIRST, "d-2")
    assert world.probed == []
    world.received()
    world.receives(SECOND, "d-new")
    assert world.probed == ["d-0"]
    assert world.received() == []


def test_a_registration_is_current_only_while_its_sender_is_connected() -> None:
    """A process that was restarted under the same name has given the same blocks to other requests."""
    world, wanted = World(), asks()
    world.receives(wanted, "d-1")
    assert world.is_current(wanted)
    world.network.connected["D"] = ("d-new",)
    assert not world.is_current(wanted)
    assert not world.is_current(asks("never/registered"))
    world.connections.forget("D")
    assert not world.is_current(wanted)


@pytest.mark.parametrize("verdict", Verdict)
def test_a_probe_verdict_changes_nothing_while_the_connection_closes(verdict: Verdict) -> None:
    world, newer = strange()
    world.receives(asks("m/d"), "d-0")
    world.received()
    world.writer.engines_in_flight = {"D"}
    world.loses("D")
    world.probe.answer(verdict)
    assert world.probed == []
    assert world.connections.closing("D") == LOST
    assert world.peer_errors.counts == {}
    world.tick()
    assert "n/p" not in world.pushes
    world.network.listening["D"] = ("d-new",)
    drops(world)
    assert world.writer.pushes[1:] == [("n/p", newer)]
    assert {reason for _, reason in world.writer.failed} == {LOST}


@pytest.mark.parametrize("verdict", Verdict)
def test_an_unknown_agent_is_served_after_the_engine_is_forgotten(verdict: Verdict) -> None:
    """vLLM forgets an engine after a long silence."""
    world, newer = strange()
    world.network.listening["D"] = ("d-new",)
    world.connections.forget("D")
    world.probe.answer(verdict)
    world.tick()
    assert world.writer.pushes[1:] == [("n/p", newer)]


def test_an_engine_connected_by_vllm_is_probed_at_its_own_address() -> None:
    """vLLM's heartbeats connect, too."""
    world = World("n/p")
    world.network.connected["D"] = ("d-0",)
    world.receives(asks("n/d"), "d-new")
    assert world.probe.asked[0].address == address_of(asks("n/d"))
    world.network.listening["D"] = ("d-new",)
    world.probe.answer(Verdict.ENDED)
    world.tick()
    assert world.writer.pushes == [("n/p", asks("n/d"))]


# Decode engines that cannot be connected.


def unreached(world: World, *ranks: str) -> Registration:
    """A request whose decode engine no handshake reaches, although its ranks have registered."""
    world.network.listening = {}
    world.begin("a/p")
    for rank in ranks:
        world.receives(asks(contact=f"contact of {rank}".encode()), rank)
        world.network.reject("D", OSError("connection refused"))
        world.settle()
    assert world.mail.taken() == []
    return world.writer.pushes[0][1]


def test_a_failed_handshake_is_reported_through_the_contact() -> None:
    """Else D would take this engine for a stock one, and wait for its own deadline."""
    world = World(connected=False)
    served = unreached(world, "d-0", "d-1")
    world.fails(served, "no handshake")
    assert world.received() == [failure("no handshake")]
    assert world.network.handshakes[2:] == [], "no further try delays it"


def test_a_cancel_of_an_unreachable_engine_is_answered() -> None:
    world = World(connected=False)
    served = unreached(world, "d-0")
    world.cancels(served)
    assert world.received("d-0") == [Cancelled("a/d")]


@pytest.mark.parametrize("reached", [True, False])
def test_answers_keep_their_order_during_a_handshake(reached: bool) -> None:
    world = World("a/p", connected=False)
    world.network.listening = {}
    world.receives(asks(contact=b"contact of d-0"))
    (_, served), *_ = world.writer.pushes
    world.fails(served, "aborted")
    assert world.mail.taken() == []
    if reached:
        world.network.answer("D", "d-0")
    else:
        world.network.reject("D", OSError("connection refused"))
    world.settle()
    assert world.received("d-0") == [Accepted("a/d"), failure("aborted")][0 if reached else 1 :]


def test_a_connected_engine_gets_its_answer_over_the_connection() -> None:
    world = World()
    served = world.served(asks(contact=b"contact of somebody else"))
    world.fails(served, "aborted")
    assert world.received() == [failure("aborted")]


def test_an_engine_without_a_usable_contact_gets_a_handshake() -> None:
    world = World(connected=False)
    world.network.listening = {}
    world.begin("a/p")
    world.receives(asks(contact=b"garbage"))
    world.network.reject("D", OSError("connection refused"))
    world.settle()
    world.fails(world.writer.pushes[0][1], "no handshake")
    assert world.mail.taken() == []
    assert len(world.network.handshakes) == 2


@pytest.mark.parametrize("allowed", [True, False])
def test_with_allowed_hosts_answers_use_contacts_of_allowed_side_channels(allowed: bool) -> None:
    """Never to the contact in the registration: it may lead anywhere."""
    world = World(allowed_hosts=(asks().decode_host if allowed else "10.9.9.9",), connected=False)
    world.network.listening = {}
    world.search.named = {asks().decode_host: (b"contact of d-0", b"contact of d-1")}
    world.begin("a/p")
    world.receives(asks(contact=b"contact of somebody else"))
    if allowed:
        world.network.reject("D", RuntimeError("NIXL compatibility hash mismatch"))
    world.settle()
    world.fails(world.writer.pushes[0][1], "no handshake")
    reached_agents = [agent for agent, _ in world.mail.taken()]
    assert reached_agents == (["d-0", "d-1"] if allowed else [])
    assert len(world.network.handshakes) == allowed


def test_an_engine_has_as_many_contacts_as_ranks() -> None:
    """The newest count: the engine may have been restarted."""
    world = World(connected=False)
    for rank in range(5):
        world.receives(asks(contact=b"contact of d-%d" % rank), f"d-{rank}")
    world.mail.taken()
    world.cancels(asks())
    assert world.received("d-3", "d-4") == [Cancelled("a/d")]


# Requests that P does not know are no reason to connect.


def test_a_registration_of_an_unknown_request_causes_no_handshake() -> None:
    """Anybody may name any host, and a silent one keeps the only handshake thread busy for seconds."""
    world = World(connected=False)
    for engine, rank in product(("D", "E"), ("d-0", "d-1")):
        world.receives(asks(engine=engine), rank)
        world.cancels(asks("unknown/d", engine=engine), rank)
    world.tick(UNKNOWN_S)
    world.tick(2.0)
    assert world.claims.pending == 0
    assert world.network.handshakes == []


@pytest.mark.parametrize("begun", [True, False])
def test_an_early_registration_is_accepted_once_its_request_comes(begun: bool) -> None:
    """When it comes, not when it leaves the queue: the handshake must not delay the push."""
    world, wanted = World(connected=False), asks(sampling="greedy")
    world.receives(wanted)
    world.tick()
    assert world.network.handshakes == []
    world.claims.requests_arrived([Arrived("b/p"), Arrived("a/p")])
    if begun:
        assert world.take_registration() == wanted
    world.tick()
    assert world.network.handshakes == [address_of(wanted)]
    assert world.received() == [Accepted("a/d", first_token=True)]
    world.claims.requests_arrived([Arrived("a/q")])
    world.tick()
    assert world.received() == [], "once is enough"


def test_a_registration_is_accepted_at_once_if_its_request_is_in_the_queue() -> None:
    world = World(connected=False)
    world.claims.requests_arrived([Arrived("a/p")])
    world.receives(asks())
    assert world.received() == [Accepted("a/d")]


def test_an_engine_that_was_connected_meanwhile_gets_its_answer() -> None:
    world = World("b/p", connected=False)
    world.receives(asks())
    world.receives(asks("b/d"))
    assert world.received() == [Accepted("b/d")]
    world.claims.requests_arrived([Arrived("a/p")])
    world.tick()
    assert world.received() == [Accepted("a/d")]


def test_an_unconnected_engine_hears_that_p_lives() -> None:
    """Else it would take P for a stock engine, or for a silent one, while its request waits with the router."""
    world = World(connected=False)
    for rank in ("d-0", "d-1"):
        world.receives(asks(contact=f"contact of {rank}".encode()), rank)
    assert set(world.mail.taken()) == {("d-0", Accepted("a/d")), ("d-1", Accepted("a/d"))}
    for sender in ("d-1", "d-2"):
        world.claims.on_ping(sender, Ping("D", 8))
    assert world.mail.taken() == [("d-1", Pong(8))]
    assert world.network.handshakes == []
    world.claims.requests_arrived([Arrived("a/p")])
    world.tick()
    assert len(world.network.handshakes) == 1


@pytest.mark.parametrize("allowed", ["any host", "its host", "another host"])
@pytest.mark.parametrize("message", ["cancel", "refusal"])
@pytest.mark.parametrize("contact", [True, False])
def test_the_end_of_an_unknown_request_needs_no_handshake(allowed: str, message: str, contact: bool) -> None:
    hosts = {"any host": None, "its host": (asks().decode_host,), "another host": ("10.9.9.9",)}[allowed]
    world = World(connected=False, allowed_hosts=hosts)
    world.search.named = {asks().decode_host: (b"contact of d-0",)}
    world.receives(asks(contact=b"contact of d-0" if contact else None))
    world.mail.taken()
    if message == "cancel":
        world.cancels(asks())
    else:
        world.tick(UNKNOWN_S)
        world.tick(2.0)
    answer = Cancelled("a/d") if message == "cancel" else UNKNOWN
    assert world.received("d-0") == ([] if allowed == "another host" else [answer])
    assert world.network.handshakes == []


# Requests that a decode engine declines.


def declined(request_id: str = "a/d", prefill: str | None = None, digest: str | None = None) -> Decline:
    return Decline(request_id, "D", prefill, digest)


def test_a_decline_releases_a_finished_request(caplog: pytest.LogCaptureFixture) -> None:
    world = World("a/p")
    world.writer.finished = {"a/p"}
    world.claims.on_decline(declined(), world.now)
    assert world.writer.declined == ["a/p"]
    assert not world.is_unwanted()
    assert world.received() == [], "D does not wait for an answer"


@pytest.mark.parametrize("begun", [["a/p"], []])
def test_a_decline_releases_an_unfinished_request_later(begun: list[str]) -> None:
    world = World(*begun)
    world.claims.on_decline(declined(), world.now)
    assert [world.is_unwanted(name) for name in ("b/p", "a/p", "a/p")] == [False, True, False]


def test_a_decline_keeps_another_prompt_of_the_same_id() -> None:
    world = World("a/p", digests={"a/p": "one"})
    world.writer.finished = {"a/p"}
    world.claims.on_decline(declined(digest="other"), world.now)
    assert world.writer.declined == []
    assert not world.is_unwanted()


def test_a_registration_takes_precedence_over_a_decline() -> None:
    """A decode engine that has registered cancels, and waits for the answer."""
    world = World()
    world.receives(asks())
    world.claims.on_decline(declined(), world.now)
    assert not world.is_unwanted()
    assert world.take_registration() == asks()


def test_a_decline_expires() -> None:
    world = World()
    world.claims.on_decline(declined(), world.now)
    world.tick(WAITING_S)
    assert not world.is_unwanted()


# A decode engine that computes several answers (``n``) to a prompt that has one on the prefill engine.


def answers(count: int = 2, prefill: str = "chat-a") -> list[Registration]:
    return [asks(f"{number}_chat-a/d", prefill=prefill) for number in range(count)]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
@pytest.mark.parametrize("named", ["chat-a", "chat-a/p"], ids=["at once", "one after the other"])
def test_the_first_answer_gets_the_only_push(order: tuple[int, ...], named: str) -> None:
    world, wanted = World("chat-a/p"), answers(3, named)
    for number in order:
        world.receives(wanted[number])
    assert world.pushes == {"chat-a/p": "0_chat-a/d"}
    failures = [message for message in world.received() if isinstance(message, Fail)]
    assert failures == [Fail(wanted[each].request_id, 0, SPARE_ANSWER, True) for each in order if each]


def test_spare_answers_fail_at_the_start_of_the_only_request() -> None:
    world, wanted = World(), answers()
    for registration in wanted:
        world.receives(registration)
    world.received()
    assert world.take_registration("chat-a/p") == wanted[0]
    world.settle()
    assert world.received() == [Fail("1_chat-a/d", 0, SPARE_ANSWER, True)]
    assert world.claims.pending == 0


def test_a_spare_answer_fails_until_the_ended_request_is_forgotten() -> None:
    world, (first, spare) = World("chat-a/p"), answers()
    world.receives(first)
    world.closes(first)
    world.ends("chat-a/p", None)
    world.received()
    world.receives(spare)
    assert world.received()[1:] == [Fail("1_chat-a/d", 0, SPARE_ANSWER, True)]
    world.tick(ENDED_S)
    world.receives(asks("2_chat-a/d", prefill="chat-a"))
    assert world.claims.pending == 1


@pytest.mark.parametrize("first", ["P", "D"])
def test_the_only_answer_gets_the_first_of_several_pushes(first: str) -> None:
    world, wanted, begun = World(), asks("cmpl-x-0/d", prefill="cmpl-x-0"), ["1_cmpl-x-0/p", "0_cmpl-x-0/p"]
    if first == "D":
        world.receives(wanted)
    world.begin(*begun)
    if first == "P":
        world.receives(wanted)
    assert world.claims.pending == 0
    assert world.pushes == ({begun[1]: wanted.request_id} if first == "P" else {})
    assert world.taken == ({} if first == "P" else {begun[1]: wanted})


def test_an_answer_to_another_prompt_is_not_spare() -> None:
    world = World("chat-a/p", digests={"chat-a/p": "one"})
    world.receives(asks("1_chat-a/d", prefill="chat-a", digest="other"))
    assert world.received() == [Accepted("1_chat-a/d")]
    assert world.claims.pending == 1


# Prompts that wait for blocks, and registrations that decode engines take back.


def unregister(registration: Registration, attempt: int = 0) -> Unregister:
    named = registration
    address = named.decode_engine_id, named.decode_host, named.decode_port, named.decode_tp_size
    return Unregister(named.request_id, *address, attempt)


def full(*computed: str, layerpush: int = 2) -> World:
    """P has no blocks for "a/p", which D has registered, and holds those of ``computed`` prompts."""
    world = World()
    world.comes("a/p", "one")
    world.receives(asks(layerpush=layerpush))
    world.writer.finished = set(computed)
    world.comes("c/p", "two")
    world.claims.short_of_blocks = True
    world.received()
    world.tick()
    return world


def test_a_decode_engine_learns_that_its_prompt_waits_for_blocks() -> None:
    world = full("b/p", "c/p")
    assert world.received() == [Queued("a/d", ("b/", "c/two"))]
    world.tick(QUEUED_EVERY_S)
    assert world.received() == [Queued("a/d", ("b/", "c/two"))], "the message may be lost"
    world.claims.short_of_blocks = False
    world.tick(QUEUED_EVERY_S)
    assert world.received() == []


@pytest.mark.parametrize("layerpush", [0, 1], ids=["stock", "older"])
def test_an_older_decode_engine_does_not_learn_it(layerpush: int) -> None:
    world = full("b/p", layerpush=layerpush)
    assert world.received() == []
    assert world.claims.may_lapse("b/p"), "the wait must end all the same"


def test_a_lease_may_lapse_only_while_a_registered_prompt_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    world = full("b/p")
    monkeypatch.delattr(type(world.writer), "computed")  # a heartbeat names thousands: no list of them for each
    assert world.claims.may_lapse("b/p")
    assert not world.claims.may_lapse("c/p"), "a decode engine has registered it"
    monkeypatch.undo()
    assert world.take_registration() == asks(layerpush=2)
    world.tick(QUEUED_EVERY_S)
    assert not world.claims.may_lapse("b/p")


def test_a_registration_can_be_taken_back_before_its_push_begins() -> None:
    world = full("b/p")
    world.received()
    world.takes_back(asks(layerpush=2))
    assert world.received() == [Unregistered("a/d", 0)]
    assert world.take_registration() is None
    assert not world.is_unwanted(), "it will be registered again"
    world.receives(asks(layerpush=2))
    assert world.received() == [Unregistered("a/d", 0)], "a late copy"
    again = msgspec.structs.replace(asks(layerpush=2, blocks=(7, 8)), attempt=1)
    world.receives(again)
    world.receives(asks(layerpush=2))
    world.takes_back(asks(layerpush=2))
    assert world.take_registration() == again


def test_a_failure_is_not_forgotten_when_the_registration_is_taken_back() -> None:
    world = World()
    world.receives(asks(layerpush=2))
    world.ends("a/p")
    world.received()
    world.takes_back(asks(layerpush=2))
    assert [type(message) for message in world.received()] == [Fail]


def test_a_decline_counts_after_the_registration_was_taken_back() -> None:
    world = World("a/p")
    world.writer.unclaimed = []
    world.receives(asks(layerpush=2))
    world.takes_back(asks(layerpush=2))
    world.claims.on_decline(Decline("a/d", "D"), world.now)
    assert world.is_unwanted()


def test_a_cancel_counts_for_a_later_attempt() -> None:
    """It may overtake the registration of the attempt that D had begun before it cancelled."""
    world = full("b/p")
    world.takes_back(asks(layerpush=2))
    world.cancels(asks(layerpush=2))
    again = msgspec.structs.replace(asks(layerpush=2, blocks=(7, 8)), attempt=1)
    world.received()
    world.receives(again)
    world.receives(asks(layerpush=2))
    world.receives(again, "d-1")
    assert world.received() == [Cancelled("a/d")] * 3
    assert world.take_registration() is None


def test_a_stranger_takes_no_registration_back() -> None:
    world = full()
    world.claims.on_unregister("stranger", unregister(asks()), world.now)
    assert world.take_registration() is not None


# Turns that a decode engine keeps: here it has P's part, and a prefill engine has D's.

TURN = Prefixes.of(range(12), 4)
KEPT = Arrived("a/old", prefixes=TURN)


def asks_for_turn(tokens: int = 8, digest: str | None = TURN.digest(8), name: str | None = "a/old") -> Registration:
    return msgspec.structs.replace(asks("a/new", prefill=name, digest=digest), prefix_tokens=tokens)


def keeping() -> World:
    """A world with the turn."""
    world = World()
    world.claims.requests_arrived([KEPT])
    assert world.take_registration(KEPT.request_id) is None
    world.writer.unclaimed.append(KEPT.request_id)
    return world


def test_a_kept_turn_is_found_by_its_whole_name_and_the_digest_of_its_first_tokens() -> None:
    world = keeping()
    world.receives(asks_for_turn())
    assert world.pushes == {"a/old": "a/new"}


def test_a_prefill_engine_may_ask_before_the_turn_is_known() -> None:
    world = World()
    world.receives(asks_for_turn())
    world.claims.requests_arrived([KEPT])
    assert world.take_registration("a/old") == asks_for_turn()


@pytest.mark.parametrize(
    "registration",
    [
        asks_for_turn(digest=TURN.digest(4)),
        asks_for_turn(digest=None),
        asks_for_turn(tokens=7, digest=None),
        asks_for_turn(tokens=16, digest=TURN.digest(12)),
        asks_for_turn(tokens=0),
    ],
)
def test_other_tokens_are_refused_at_once(registration: Registration) -> None:
    world = keeping()
    world.receives(registration)
    assert world.pushes == {}
    assert world.received()[-1] == failure(OTHER_PROMPT, request_id="a/new", epoch=0)


@pytest.mark.parametrize(
    "registration", [asks("a/d"), asks("a/d", digest=TURN.digest(12)), asks("a/old"), asks("a/d", layerpush=0)]
)
def test_no_decode_engine_gets_a_kept_turn(registration: Registration) -> None:
    world = keeping()
    world.receives(registration)
    assert world.pushes == {}


def test_no_prompt_is_taken_for_a_kept_turn() -> None:
    world = World("a/old", digests={"a/old": "one"})
    for digest in ("one", TURN.digest(8)):
        world.receives(msgspec.structs.replace(asks_for_turn(digest=digest), request_id=f"{digest}/new"))
    assert world.pushes == {}


@pytest.mark.parametrize(("failed", "reason"), [(None, NOT_KEPT), ("its lease ran out", "its lease ran out")])
def test_a_turn_that_is_over_is_refused_at_once(failed: str | None, reason: str) -> None:
    world = keeping()
    world.writer.unclaimed.remove("a/old")
    world.ends("a/old", failed)
    world.receives(asks_for_turn())
    (_, answer) = world.received()
    assert isinstance(answer, Fail)
    assert reason in answer.reason


def test_a_turn_that_another_gets_is_refused_at_once() -> None:
    world = keeping()
    world.receives(asks_for_turn())
    world.received()
    world.receives(msgspec.structs.replace(asks_for_turn(), request_id="b/new"))
    assert world.received()[-1] == failure(NOT_KEPT, request_id="b/new", epoch=0)


def test_an_unknown_turn_is_refused_soon() -> None:
    """The engine was restarted, or kept it long ago."""
    world = World()
    world.receives(asks_for_turn())
    assert world.received() == [Accepted("a/new", prefix_tokens=8)]
    world.tick(OTHER_PROMPT_S - 0.1)
    assert world.received() == []
    world.tick(1.1)
    assert world.received() == [failure(NOT_KEPT, request_id="a/new", epoch=0)]
    assert world.claims.pending == 0


def test_a_declined_turn_is_dropped() -> None:
    """By a prompt that shares some of its tokens. Its name is no secret of the conversation."""
    world = keeping()
    world.writer.finished.add("a/old")
    for number, digest in enumerate((None, "digest", Prefixes.of(range(12), 4, salt="b").digest(4))):
        world.claims.on_decline(Decline(f"a/{number}", "D", "a/old", digest), world.now)
    world.claims.on_decline(Decline("a/new", "E", "a/other", TURN.digest(4)), world.now)
    assert world.writer.declined == []
    world.claims.on_decline(Decline("a/new", "D", "a/old", TURN.digest(4)), world.now)
    assert world.writer.declined == ["a/old"]
