"""A cache salt keeps prefix caches apart: who sends another one learns nothing from how fast an answer is."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from shared.core.page_identity import prefix_keys
from shared.core.sampling_params import SamplingParams
from shared.wire.messages import Grant
from tests.support.cores.core_rig import CoreKnobs, Job, Outcome, assert_streams, assert_whole, make_core, run_local
from tests.support.worlds.node_pair import Net, assert_clean, make_node

SAMPLING = SamplingParams(max_tokens=10, temperature=0.0)
PROMPT = tuple(random.Random(4).randrange(95) for _ in range(70))
SALTS = (5, 6, 0, 2**62 + 5, 2**63 - 1)


def job(rid: int, salt: int) -> Job:
    return Job(rid, PROMPT, SAMPLING, 5, cache_salt=salt)


def salted(tokens: npt.NDArray[np.int64], salt: int) -> npt.NDArray[np.int64]:
    return np.frombuffer(prefix_keys(tokens.tobytes(), "", 0, salt), np.int64)


def test_a_salt_changes_the_first_key_alone() -> None:
    keys = np.arange(1, 40, dtype=np.int64)
    own = salted(keys, 5)
    assert own[0] < 0 and (own[1:] == keys[1:]).all()
    assert salted(keys, 6)[0] != own[0]
    assert len(salted(keys[:0], 5)) == 0


@pytest.mark.parametrize("width", [1, 3])
def test_only_the_same_salt_finds_the_prefix(width: int) -> None:
    """With drafts, keys cover the token after them too."""
    core = make_core(CoreKnobs(width=width))
    outcome, cached = Outcome(), []
    for rid, salt in enumerate((5, 6, 0, 5, 0, 6)):
        core.scheduler.intake.submit(job(rid, salt).request())
        while core.queues.requests or not core.loop.idle:
            core.loop.step(block=True)
            outcome.take(core)
        cached.append(outcome.ends[f"r{rid}"].cached_tokens)
        assert outcome.streams[f"r{rid}"] == job(rid, salt).expected()
    assert cached == [0, 0, 0, 64, 64, 64]
    core.check_integrity(idle=True)


def test_a_decode_node_grants_no_prefix_of_another_salt() -> None:
    p, d = make_node("prefill", "p0", CoreKnobs()), make_node("decode", "d0", CoreKnobs())
    net = Net([p, d])
    for rid, salt in enumerate((5, 6, 0, 5)):
        key = net.generate(p, job(rid, salt), d)
        net.run()
        assert net.router.streams[key] == job(rid, salt).expected()
        known = 64 if rid == 3 else 0
        assert net.router.end(key).cached_tokens == net.messages(Grant)[-1].cached_prefix_len == known
    assert_clean(p, d)


def test_cold_pages_keep_their_salt() -> None:
    """The same prompt under five salts through a pool that is too small for all of them."""
    core, rng = make_core(CoreKnobs(num_pages=16, cold_pages=30)), random.Random(1)
    for wave in range(4):
        jobs = [replace(job(10 * wave + n, salt), prompt=PROMPT[:48]) for n, salt in enumerate(SALTS)]
        outcome = run_local(core, jobs, retract_every=5, rng=rng)
        assert_streams(jobs, outcome)
        if not wave:
            assert all(end.cached_tokens == 0 for end in outcome.ends.values())
    assert core.queues.counters.restored_pages >= 5
    assert_whole(core)
