"""Errors of a node as the router sees them: the node's state machine, the wire, the dispatcher. No sockets."""

from __future__ import annotations

import pytest

from router.requests.effects import Effects, Failure
from router.requests.faults import can_resume, error_of_end, is_node_fault
from shared.core import errors
from shared.core.errors import (
    Aborted,
    BatonError,
    BodyTooLarge,
    DeadlineExceeded,
    DeadlineUnreachable,
    HandoffFailed,
    InvalidRequest,
    ModelNotFound,
    NodeDraining,
    NodeLost,
    NoNodes,
    Overloaded,
    PartnerDraining,
    PartnerOverloaded,
    QueueFull,
    RateLimited,
    RequestKillsNodes,
    TooLarge,
)
from shared.core.keys import RequestKey
from shared.core.states import FinishReason
from shared.node.loop.node import Node
from shared.node.records.convert import end_of
from shared.node.records.mail import Outgoing
from shared.sched.steps.events import Ended
from shared.wire.codec import decode, encode, to_wire
from shared.wire.errors import BY_CODE, NODE_ERRORS, error_of, error_of_peer, failed, refuse
from shared.wire.messages import Failed, Generate, Message, Refuse, Tokens, Welcome
from shared.wire.peers import Inbound, PeerUp, Received
from shared.wire.ranges import MAX_TEXT
from tests.support.cores.core_rig import CoreKnobs
from tests.support.worlds.node_pair import ROUTER, make_node
from tests.support.worlds.router_rig import RouterRig, failures, generates

SMALL = CoreKnobs(num_pages=5, page_size=16)  # 64 tokens, though its Hello promises 100
KEY = RequestKey("r", 9, "x", 0, 0)
ROUTERS_OWN = (
    Aborted, BodyTooLarge, DeadlineUnreachable, ModelNotFound, NodeLost, NoNodes, QueueFull, RateLimited,
    RequestKillsNodes,
)  # fmt: skip


class OneNode:
    """A real node behind a real dispatcher; every message is encoded and decoded on its way."""

    def __init__(self, role: str) -> None:
        self.rig = RouterRig(max_attempts=3)
        self.at_router = self.rig.join(role, "small")
        self.node: Node = make_node(role, "small", SMALL)
        self.tick(PeerUp(ROUTER))
        self.say(Welcome("r", 9, connection=1))

    def say(self, message: Message, now: float = 0.0) -> list[Effects]:
        return self.tick(Received(ROUTER, decode(encode(message))), now=now)

    def tick(self, *inbox: Inbound, now: float = 0.0) -> list[Effects]:
        """What the dispatcher makes of the tokens and ends of one tick."""
        actions = self.node.tick(inbox, now)
        sent = [action.message for action in actions if isinstance(action, Outgoing) and action.peer == ROUTER]
        heard = [decode(encode(message)) for message in sent if isinstance(message, Tokens)]
        return [self.rig.dispatcher.tokens(message, now) for message in heard if isinstance(message, Tokens)]


def open_at_first_node(cell: OneNode, num_prompt: int) -> Generate:
    """A request that goes to the node under test. A spare node comes only then: it could take a second attempt."""
    (generate,) = cell.rig.open([1] * num_prompt, max_tokens=30)
    cell.rig.join("decode", "spare")
    return generate


def forget_spare(cell: OneNode) -> None:
    spare = cell.rig.registry.named("spare")
    assert spare is not None
    cell.rig.registry.remove(spare)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_request_too_large_for_its_node_is_the_clients_error(role: str) -> None:
    cell = OneNode(role)
    if role == "prefill":
        cell.rig.join("decode", "partner")
    for _ in range(4):  # more than open a breaker
        (effects,) = cell.say(open_at_first_node(cell, num_prompt=60))
        assert failures(effects) == ["too_large"] and not generates(effects), "no other attempt"
        (failure,) = effects.news
        assert isinstance(failure, Failure) and 400 <= failure.error.status < 500
        assert "can never fit" in failure.error.message
        forget_spare(cell)
    assert cell.at_router.breaker._faults == 0 and cell.at_router.can_take(0.0)
    cell.rig.check_quiet()


def test_a_deadline_passed_at_the_node_is_final_and_blames_none() -> None:
    cell = OneNode("decode")
    generate = open_at_first_node(cell, num_prompt=20)
    cell.node.ctx.core.kv.alloc_pages(4)  # it waits for memory
    assert not cell.say(generate)
    (effects,) = cell.tick(now=generate.remaining_ms / 1000 + 1)
    assert failures(effects) == ["deadline_exceeded"] and not generates(effects)
    assert cell.at_router.breaker._faults == 0


# ---- the table


@pytest.mark.parametrize("kind", NODE_ERRORS)
def test_a_nodes_error_is_the_same_class_at_the_router(kind: type[BatonError]) -> None:
    end = decode(encode(Tokens("n", 1, [], [end_of(Ended(KEY, FinishReason.ERROR, 3, 0, kind("why")))])))
    assert isinstance(end, Tokens)
    error = error_of_end(end.ends[0], "n")
    assert type(error) is kind and (error.message, error.subject) == ("why", "n")


def test_each_code_has_one_class() -> None:
    assert len({kind.code for kind in NODE_ERRORS}) == len(NODE_ERRORS) == len(BY_CODE)


def test_each_core_error_is_in_the_table_or_the_router_s_own() -> None:
    known = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, BatonError)]
    assert set(known) - set(NODE_ERRORS) == {BatonError, *ROUTERS_OWN} and not set(ROUTERS_OWN) & set(NODE_ERRORS)


def test_a_code_of_another_version_is_a_fault_of_its_node() -> None:
    error = error_of("made_up", "why")
    assert type(error) is BatonError and error.status == 500 and is_node_fault(error) and can_resume(error)


# ---- between nodes


WORDS = [
    (Overloaded, PartnerOverloaded),
    (NodeDraining, PartnerDraining),
    (DeadlineExceeded, DeadlineExceeded),
    (InvalidRequest, InvalidRequest),
    (TooLarge, HandoffFailed),
    (Aborted, HandoffFailed),
]


@pytest.mark.parametrize(("said", "kind"), WORDS)
def test_a_decode_nodes_word_is_known_by_its_code(said: type[BatonError], kind: type[BatonError]) -> None:
    for answer in (refuse(to_wire(KEY), said("why")), failed(to_wire(KEY), 7, said("why"))):
        message = decode(encode(answer))
        assert isinstance(message, Refuse | Failed) and message.code == said.code
        heard = error_of_peer("d@1", message)
        assert type(heard) is kind and heard.message == "d@1: why"


def test_a_word_of_another_version_is_a_failed_hand_off() -> None:
    assert type(error_of_peer("d@1", Refuse(to_wire(KEY), "made_up", "why"))) is HandoffFailed


def test_a_refusal_is_cut_to_what_the_wire_takes() -> None:
    assert decode(encode(refuse(to_wire(KEY), HandoffFailed("x" * (MAX_TEXT + 1)))))
