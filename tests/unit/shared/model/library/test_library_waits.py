"""Who waits for exact lengths: a drafted step of an attention that loops over rows on the host, and no other step."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from shared.model.formats.opened import LoadOptions
from shared.model.loading.load import load_model
from tests.support.cores.core_rig import make_core, run_local
from tests.support.models.library_families import KNOBS, greedy_jobs, save

DRAFTED = dataclasses.replace(KNOBS, width=4, spec="ngram")


def num_waits(folder: Path, library: str, drafted: bool) -> tuple[int, int]:
    """Return how often the loop read lengths on the host, and how often an event made it wait before."""
    model = load_model(str(folder), LoadOptions("float32", kernels="torch", library=library))
    core = make_core(DRAFTED if drafted else KNOBS, model=model)
    engine, resolve = core.engine, core.engine.future_map.resolve_seq_lens_cpu
    found = []

    def watched(rows, ready):  # type: ignore[no-untyped-def]
        assert ready is engine.newest_publish(), "it waits for the newest step's lengths, and for nothing behind them"
        found.append(ready is not None)
        return resolve(rows, ready)

    engine.future_map.resolve_seq_lens_cpu = watched  # type: ignore[method-assign]
    outcome = run_local(core, greedy_jobs())
    core.close()
    assert all(end.error is None for end in outcome.ends.values())
    return len(found), sum(found)


@pytest.mark.rule("S6")
def test_only_drafts_of_an_attention_that_asks_wait_for_lengths(tmp_path: Path) -> None:
    save("llama", tmp_path)
    reads, waits = num_waits(tmp_path, "transformers", drafted=True)
    assert 0 < waits <= reads
    assert num_waits(tmp_path, "transformers", drafted=False) == (0, 0), "without drafts the host knows all lengths"
    assert num_waits(tmp_path, "baton", drafted=True) == (0, 0), "paged kernels need no lengths on the host"
