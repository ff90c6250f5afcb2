"""What each verify of a core accepted, against HashDraft's hash."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from shared.engine.plan import StepResult
from shared.node.records.core import NodeCore
from tests.support.cores.core_rig import Job
from tests.support.oracles.hash_draft import expected_accept_len

WIDTH = 4


@dataclass
class Trace:
    """(committed, accepted) of every verify by request, zombies left out."""

    verifies: dict[str, list[tuple[int, int]]] = field(default_factory=dict)

    def on(self, core: NodeCore) -> Trace:
        process, scheduler = core.scheduler.process, core.scheduler

        def record(result: StepResult) -> None:
            for b, row_id in enumerate(result.row_ids):
                req = scheduler.queues.requests.get(row_id.key)
                if b >= result.num_prefill and req is not None and req.incarnation == row_id.incarnation:
                    accepted = int(result.accept_lens[b])
                    committed = int(result.seq_lens[b]) - accepted
                    self.verifies.setdefault(row_id.key.rid, []).append((committed, accepted))
            process(result)

        core.scheduler.process = record  # type: ignore[method-assign]
        return self

    def check(self, jobs: Sequence[Job], hit_rate: int, width: int = WIDTH) -> int:
        """Every request's whole trace, from its prompt to its end; gives the number of verifies."""
        for one in jobs:
            committed, end = len(one.prompt), len(one.prompt) + len(one.expected()) - 1
            wanted = []
            while committed < end:
                wanted.append((committed, expected_accept_len(committed, width, hit_rate)))
                committed += wanted[-1][1]
            found = self.verifies.get(f"r{one.rid}", [])
            assert found[: len(wanted)] == wanted, f"r{one.rid}: accepted {found}, not {wanted} ({one.sampling})"
        return sum(map(len, self.verifies.values()))

    def check_each(self, hit_rate: int, width: int = WIDTH) -> int:
        """Wherever the windows began: what one accepts is a function of its length alone. Gives the number of them."""
        found = [pair for pairs in self.verifies.values() for pair in pairs]
        assert found == [(length, expected_accept_len(length, width, hit_rate)) for length, _ in found]
        return len(found)
