"""A row, a page, a lock and a lease that are leaked on purpose: the check names each, with its owner."""

from __future__ import annotations

import weakref

import pytest

from shared.core.errors import IntegrityError
from shared.model.math.interface import ModelOutput
from tests.support.cores.scripted_core import Script, job


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


def test_drained_steps_have_ended() -> None:
    """Before their pinned slots are another step's: what they have still to read would be that step's words."""
    script = Script()
    (req,) = script.submit(job(1, 12, 9))
    script.run_until_running(req)
    assert any(not lease.done.query() for lease in script.core.engine.leases)
    drained = script.core.engine.recover()
    assert drained and all(lease.done.query() for lease in drained)
    assert script.core.engine.worker.boundary.num_taken == 0
