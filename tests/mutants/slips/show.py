"""Show what each slip does: the same scene without it and with it. One that makes no difference is an error.

    python -m tests.mutants.slips.show [NAME ...]

Each scene runs twice, in a fork of its own; in the second the slip is put into the loaded module.
"""

from __future__ import annotations

import importlib
import multiprocessing
import sys
from collections.abc import Callable, Sequence

from tests.mutants.catalogue import ROOT, Slip, module_of, mutated, read_slips
from tests.mutants.graft import graft
from tests.mutants.slips import node_cases, router_cases

LIMIT_S = 180  # a hang guard
Case = Callable[[], list[str]]


def main(names: Sequence[str]) -> int:
    slips = read_slips(tuple(names))
    cases = {case.__name__: case for case in (*router_cases.CASES, *node_cases.CASES)}
    num_shown = 0
    for slip in slips:
        without, with_it = in_fork(cases[slip.name], None), in_fork(cases[slip.name], slip)
        num_shown += without != with_it
        print(f"{slip.name}: {slip.why}\n  without:  {without}\n  with it:  {with_it}", flush=True)
        if without == with_it:
            print("  NO DIFFERENCE")
    print(f"\n{num_shown} of {len(slips)} slips shown")
    return 0 if num_shown == len(slips) else 1


def in_fork(case: Case, slip: Slip | None) -> str:
    """Raises what the scene raises."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply_async(play, (case, slip)).get(LIMIT_S)


def play(case: Case, slip: Slip | None) -> str:
    if slip is not None:
        put_in(slip)
    return "\n            ".join(case())


def put_in(slip: Slip) -> None:
    for path, text in mutated(slip).items():
        module = importlib.import_module(module_of(path.relative_to(ROOT).as_posix()))
        graft(module, text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
