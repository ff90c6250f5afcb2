"""A row, a page, a lock and a lease that are leaked on purpose: the check names each, with its owner."""

from __future__ import annotations

import weakref

import pytest

from shared.core.errors import IntegrityError
from shared.model.math.interface import ModelOutput
from tests.support.cores.scripted_core import Script, job


def served() -> Script:
    script = Script()
    script.submit(job(1, 12, 5), job(2, 9, 7))
    script.finish()
    script.core.check_integrity(idle=True)
    return script


def test_a_row_is_named() -> None:
    script = served()
    row = script.core.kv.alloc_row("the leaker")
    with pytest.raises(IntegrityError, match=f"row {row} of 'the leaker' leaked"):
        script.core.check_integrity(idle=True)


def test_a_page_is_named() -> None:
    script = served()
    pages = script.core.kv.alloc_pages(1, "the leaker")
    assert pages is not None
    with pytest.raises(IntegrityError, match=f"page {pages[0]} leaked, last owner 'the leaker'"):
        script.core.check_integrity()


def test_a_lock_is_named() -> None:
    script = served()
    req = job(1, 12).request()
    keys = script.core.queues.budget.prefix_keys(req, req.ask.prompt_ids)
    match = script.core.kv.cache.match(keys, 12, "the leaker")
    assert match.num_tokens == 12
    with pytest.raises(IntegrityError, match="lock of 'the leaker' on 3 pages is still held"):
        script.core.check_integrity(idle=True)


def test_a_lease_is_named() -> None:
    script = Script()
    (req,) = script.submit(job(1, 12, 9))
    script.run_until_running(req)
    script.core.check_integrity()
    script.core.engine.check_integrity()
    with pytest.raises(IntegrityError, match=r"lease of step 2 \(test\.1/r1#0\.0\) is still open"):
        script.core.engine.check_integrity(idle=True)
    lost = script.core.engine.leases.pop()
    with pytest.raises(IntegrityError, match=rf"lease of step {lost.step} \(test\.1/r1#0\.0\) was lost"):
        script.core.check_integrity()


@pytest.mark.parametrize("how", ["collect", "recover"])
def test_closed_leases_are_forgotten(how: str) -> None:
    script = Script()
    (req,) = script.submit(job(1, 12, 9))
    script.run_until_running(req)
    if how == "recover":
        script.core.engine.recover()
        script.core.queues.abort(req.key)
    else:
        script.finish()
    script.core.check_integrity(idle=True)


@pytest.mark.rule("H10")
def test_a_sampled_step_holds_no_logits() -> None:
    """H10, before anybody collects the step."""
    script = Script()
    (req,) = script.submit(job(1, 12, 9))
    script.run_until_running(req)
    lease = script.core.engine.leases[-1]
    assert lease.forward is not None and lease.carry is None
    lease.forward.done.synchronize()
    assert lease.carry is not None and isinstance(lease.carry.output, ModelOutput)
    logits = weakref.ref(lease.carry.output.logits)
    script.world.run_until_idle()
    assert lease.carry is None and logits() is None and not lease.closed
    script.finish()


def test_a_drained_step_holds_no_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """H10, where the sampling that would have dropped them raised."""

    def raises(*_: object) -> None:
        raise RuntimeError("injected")

    script = Script()
    (req,) = script.submit(job(1, 12, 9))
    script.run_until_running(req)
    monkeypatch.setattr(script.core.engine.worker, "sample", raises)
    script.world.run_until_idle()
    assert script.core.engine.leases[-1].carry is not None
    assert [lease.carry for lease in script.core.engine.recover()] == [None]


def test_drained_steps_have_ended() -> None:
    """Before their pinned slots are another step's: what they have still to read would be that step's words."""
    script = Script()
    (req,) = script.submit(job(1, 12, 9))
    script.run_until_running(req)
    assert any(not lease.done.query() for lease in script.core.engine.leases)
    drained = script.core.engine.recover()
    assert drained and all(lease.done.query() for lease in drained)
    assert script.core.engine.worker.boundary.num_taken == 0
