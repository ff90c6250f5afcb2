"""A node ends while pages are lent or pulled: its books add up, and nobody is blamed for a leak."""

from __future__ import annotations

import io

from shared.node.loop.node import Node
from shared.node.run import check_at_exit
from shared.observe.log import Logger
from shared.wire.messages import Ready
from tests.support.cores.core_rig import CoreKnobs
from tests.support.worlds.node_pair import name_of
from tests.support.worlds.prefix_pulls import PullPair, Slow, job


def leave(rig: PullPair, node: Node) -> str:
    """The end of a drain, as the daemon has it. Return what is logged."""
    node.fail_all("its time is up")
    rig.net.tick(name_of(node))
    node.goodbye()
    log = io.StringIO()
    check_at_exit(node, Logger("exit", log))
    return log.getvalue()


def test_a_loan_ends_with_the_node_that_lends() -> None:
    rig = PullPair()
    rig.warm(job(1))
    rig.net.drop = lambda source, target, message: isinstance(message, Ready)
    rig.ask(job(2))
    rig.net.run()
    assert rig.lender.loans.open and rig.s.idle, "a node does not stay for those that read its pages"
    assert leave(rig, rig.s) == ""
    rig.s.ctx.core.kv.check_integrity(idle=True)


def test_a_node_is_not_idle_while_a_copy_is_in_flight() -> None:
    rig = PullPair(CoreKnobs(backend="cpu"))
    rig.warm(job(1))
    rig.asker.pulls.copies.receivers = {"zmq": (slow := Slow(rig))}
    rig.ask(job(2))
    rig.turn_until(slow.has_begun.is_set)
    said = leave(rig, rig.p)
    assert not rig.p.idle and rig.asker.pulls.copies.held, "the copy still writes"
    assert said == ""
    slow.may_go.set()
    rig.turn_until(lambda: rig.p.idle)
    rig.p.ctx.core.kv.check_integrity(idle=True)


def test_a_pull_ends_with_its_node() -> None:
    rig = PullPair()
    rig.warm(job(1))
    rig.net.drop = lambda source, target, message: isinstance(message, Ready)
    rig.ask(job(2))
    rig.net.run()
    assert next(iter(rig.asker.pulls.open.values())).row
    assert leave(rig, rig.p) == ""
    rig.p.ctx.core.kv.check_integrity(idle=True)
