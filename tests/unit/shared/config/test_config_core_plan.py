"""The core plan: who gets which cores, and what a process sets before torch loads."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.config.core_plan import (
    CorePlan,
    cpu_quota,
    num_threads,
    of_node,
    of_rank,
    plan_cores,
)
from shared.config.settings.settings import ParallelConfig


@pytest.mark.parametrize(
    ("num_cores", "prefill", "decode", "shares"),
    [
        (1, 1, 1, [(0,), (0,)]),
        (2, 0, 1, [(0, 1)]),
        (3, 1, 1, [(0, 1), (2,)]),
        (4, 1, 1, [(0, 1), (2, 3)]),
        (5, 1, 1, [(1, 2), (3, 4)]),
        (2, 1, 2, [(0,), (1,), (0,)]),
        (8, 1, 2, [(1, 2, 3), (4, 5), (6, 7)]),
    ],
)
def test_shares(num_cores, prefill, decode, shares):
    plan = plan_cores(tuple(range(num_cores)), prefill, decode)
    assert [node.cpus for node in plan.prefill + plan.decode] == shares
    assert [node.threads for node in plan.prefill + plan.decode] == [len(share) for share in shares]


@given(
    cores=st.sets(st.integers(0, 300), min_size=1, max_size=64).map(lambda found: tuple(sorted(found))),
    prefill=st.integers(0, 8),
    decode=st.integers(1, 8),
)
def test_plans_use_only_given_cores_and_share_none_if_enough(cores, prefill, decode):
    plan = plan_cores(cores, prefill, decode)
    nodes = plan.prefill + plan.decode
    used = [cpu for node in nodes for cpu in node.cpus]
    assert (len(plan.prefill), len(plan.decode)) == (prefill, decode)
    assert set(used) <= set(cores) and all(node.cpus and node.threads == len(node.cpus) for node in nodes)
    if len(cores) >= len(nodes):
        assert len(used) == len(set(used))


@pytest.mark.parametrize(
    ("cpus", "size", "shares"),
    [
        ((0, 1, 2, 3), 1, [(0, 1, 2, 3)]),
        ((0, 1, 2, 3), 2, [(0, 1), (2, 3)]),
        ((4, 5), 2, [(4,), (5,)]),
        ((4,), 4, [(4,), (4,), (4,), (4,)]),
    ],
)
def test_a_node_s_cores_are_dealt_out_among_its_ranks(cpus, size, shares):
    plans = [of_rank(CorePlan(threads=len(cpus), cpus=cpus), rank, size) for rank in range(size)]
    assert [plan.cpus for plan in plans] == shares
    assert [num_threads(plan) for plan in plans] == [len(share) for share in shares]


@pytest.mark.parametrize(("threads", "stages", "each"), [(2, 1, 2), (2, 2, 1), (5, 2, 2), (8, 4, 2), (1, 2, 1)])
def test_a_node_s_stages_share_its_threads_and_stay_on_its_cores(threads, stages, each):
    cpus = tuple(range(threads))
    plan = of_node(CorePlan(cpus=cpus, wait_policy="active"), ParallelConfig(pp=stages))
    assert (num_threads(plan), plan.cpus, plan.wait_policy) == (each, cpus, "active")
    assert num_threads(plan) * stages <= max(threads, stages)


def test_no_cores_or_no_nodes_is_a_mistake_of_the_caller():
    for cores, prefill in (((), 1), ((0,), 0)):
        with pytest.raises(ValueError, match="at least one"):
            plan_cores(cores, prefill, 0)


def test_quota_of_a_control_group(tmp_path):
    file = tmp_path / "cpu.max"
    assert cpu_quota(file) is None
    for text, quota in (("max 100000\n", None), ("150000 100000\n", 1.5), ("nonsense", None)):
        file.write_text(text)
        assert cpu_quota(file) == quota


APPLY = """
import json, os, sys
from shared.config import core_plan
from shared.config.core_plan import CorePlan
core_plan.apply(CorePlan(cpus=(int(sys.argv[1]),)))
loaded = sorted({"torch", "numpy"} & set(sys.modules))
omp = [os.environ[name] for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")]
print(json.dumps([sorted(os.sched_getaffinity(0)), omp, loaded]))
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this platform has no affinity")
def test_apply_pins_a_fresh_process_and_loads_nothing_heavy():
    core = max(os.sched_getaffinity(0))
    done = subprocess.run([sys.executable, "-c", APPLY, str(core)], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [[core], ["1", "PASSIVE", "0", "0"], []], "idle threads sleep"


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this platform has no affinity")
def test_cores_that_are_not_there_are_a_clear_error():
    done = subprocess.run([sys.executable, "-c", APPLY, "1000"], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "ConfigError: --cpus 1000" in done.stderr and "may use" in done.stderr
