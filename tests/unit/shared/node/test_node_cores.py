"""What a node does with its cores: who borrows and lends, who keeps to its plan and says why, when it rests."""

from __future__ import annotations

import functools
import io
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from shared.config.core_plan import CorePlan
from shared.config.settings.settings import ParallelConfig
from shared.core.errors import ConfigError
from shared.kernel.code.jit import compile_task, longs_at
from shared.kernel.team import core_table
from shared.kernel.team.core_table import CoreTable, Owner
from shared.kernel.team.program import Program
from shared.model.hashlm.model import HashLM
from shared.model.llama.llama_compiled import CompiledLlama
from shared.node.loop.daemon import Daemon
from shared.node.machine.cores import IN_STEP, NO_CPUS, NO_PROGRAM, NodeCores
from shared.observe.log import Logger
from tests.support.cores.core_rig import CoreKnobs
from tests.support.worlds.node_pair import make_node
from tests.unit.shared.node.test_node_rounds import Line

ALONE = ParallelConfig()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The machine's table is another here."""
    monkeypatch.setattr(core_table, "SHARED_MEMORY", tmp_path)
    return tmp_path


@pytest.fixture
def watcher(folder: Path) -> Iterator[CoreTable]:
    table = CoreTable(Owner("watcher", (9,), ()))
    yield table
    table.close()


def holders(table: CoreTable) -> dict[int, tuple[str, ...]]:
    return {use.core: use.holders for use in table.uses() if use.core != 9}


def taken(plan: CorePlan, parallel: ParallelConfig = ALONE, device: str = "cpu") -> tuple[NodeCores, str]:
    log = io.StringIO()
    cores = NodeCores(plan, parallel, "decode-0")
    cores.take_cores(device, Logger("n", log))
    return cores, log.getvalue()


def compute(cores: NodeCores) -> None:
    words = np.zeros((1, 3), np.int64)
    counts = np.zeros(cores.team.size, np.int64)
    words[0, 2] = counts.ctypes.data
    Program(cores.team, [compiled()], words).run()
    assert counts.all()


def count(words, share: int, worker: int) -> None:  # type: ignore[no-untyped-def]
    longs_at(words[2])[share] += 1


compiled = functools.cache(lambda: compile_task(count))


def test_a_node_holds_its_cores_while_it_computes_and_rests(watcher: CoreTable) -> None:
    cores, said = taken(CorePlan(threads=1, cpus=(1,), borrow=(0, 1)))
    assert cores.team.size == 2 and said == "" and cores.describe_cores() == "1"
    assert holders(watcher) == {0: (), 1: ()}
    compute(cores)
    cores.settle(CompiledLlama.__new__(CompiledLlama), Logger("n", io.StringIO()))
    assert holders(watcher) == {0: (), 1: ("decode-0",)} and cores.why_fixed == ""
    cores.rest()
    assert holders(watcher) == {0: (), 1: ()}
    compute(cores)
    cores.close()
    assert holders(watcher) == {}


@pytest.mark.parametrize("parallel", [ParallelConfig(tp=2), ParallelConfig(dp=2), ParallelConfig(pp=2)])
def test_ranks_and_stages_keep_all_their_cores(watcher: CoreTable, parallel: ParallelConfig) -> None:
    cores, said = taken(CorePlan(threads=2, cpus=(0, 1), borrow=(0, 1, 2, 3)), parallel)
    assert holders(watcher) == {0: ("decode-0",), 1: ("decode-0",)}
    assert IN_STEP in said and cores.describe_cores() == f"0,1; it uses only these: {IN_STEP}"
    assert cores.team.size == 1, "each has its own"
    cores.close()


def test_a_model_that_is_not_one_program_keeps_its_cores(watcher: CoreTable) -> None:
    """Its shares have no bound, and nobody says when it has work."""
    cores, _ = taken(CorePlan(threads=1, cpus=(1,), borrow=(0, 1)))
    compute(cores)
    cores.settle(HashLM(), Logger("n", io.StringIO()))
    assert holders(watcher)[1] == ("decode-0",) and NO_PROGRAM in cores.describe_cores()
    cores.rest()
    assert holders(watcher)[1] == ("decode-0",)
    for _ in range(20):
        compute(cores)
        assert cores.describe_cores() == f"1; it uses only these: {NO_PROGRAM}" and watcher._words[0, 0] == 0, (
            "it takes none"
        )
    cores.close()


def test_without_cpus_nobody_is_told(folder: Path) -> None:
    cores, said = taken(CorePlan(threads=2))
    assert cores.why_fixed == NO_CPUS and cores.team.size == 2 and said == "" and cores.describe_cores() == ""
    cores.close()
    assert not any(folder.iterdir())


def test_without_a_table_the_plan_stays_fixed_and_it_says_so(folder: Path) -> None:
    (folder / core_table.FOLDER.format(os.getuid())).touch()
    cores, said = taken(CorePlan(threads=1, cpus=(1,), borrow=(0, 1)))
    assert (
        cores.team.size == 1 and "not a private folder" in said and "1; it uses only these: " in cores.describe_cores()
    )
    compute(cores)
    cores.close()


def test_on_a_gpu_there_is_nothing_to_share(folder: Path) -> None:
    cores, said = taken(CorePlan(threads=1, cpus=(1,), borrow=(0, 1)), device="cuda")
    assert said == "" and not any(folder.iterdir())
    cores.close()


def test_what_is_borrowed_is_told(watcher: CoreTable) -> None:
    cores, _ = taken(CorePlan(threads=1, cpus=(1,), borrow=(0, 1)))
    slot = 1
    watcher._words[0, 0] = slot + 1
    assert cores.describe_cores() == "1; borrowed: 0"
    watcher._words[0, 0], watcher._words[1, 0] = 0, watcher.slot + 1
    assert cores.describe_cores() == "1; 1 is lent to watcher"
    watcher._words[1, 0] = 0
    cores.close()


@pytest.mark.parametrize(
    ("plan", "said"),
    [({"borrow": (0,)}, "--borrow needs --cpus too"), ({"cpus": (0,), "borrow": (-1,)}, "--borrow is -1")],
)
def test_what_makes_no_sense_is_refused(plan: dict[str, tuple[int, ...]], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        CorePlan(**plan)


def test_a_daemon_rests_when_there_is_nothing_to_compute() -> None:
    rested: list[bool] = []

    class Watched(NodeCores):
        def rest(self) -> None:
            rested.append(node.ctx.core.loop.idle and not node.busy)

    node = make_node("decode", "d0", CoreKnobs())
    cores = Watched(CorePlan(threads=1), ALONE, "d0")
    daemon = Daemon(node, Line([], []), Logger("d", io.StringIO()), 1.0, lambda: 0.0, cores=cores)  # type: ignore[arg-type]
    daemon.round()
    assert rested == [True]
    node.busy = True
    daemon.round()
    assert rested == [True], "a round that had work is followed by another at once"
