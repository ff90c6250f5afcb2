"""What this machine can do right now, by the same loads as when the peers' figures were taken down.

    python -m benchmarks.peers.machine --threads 2

Two threads read 270 MiB; two threads multiply 512 rows with [576 -> 1536], in bfloat16 and in bytes. The best of many
rounds counts: it is asked what the machine can do, not what it did.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch

from benchmarks.report import parser_with_json, report

READ_BYTES = 270 << 20
ROWS, INNER, OUTER = 512, 576, 1536
ROUNDS = 40


def best_s(work: Callable[[], object], rounds: int = ROUNDS) -> float:
    """Seconds of the fastest round, two first ones left out."""
    times = []
    for _ in range(rounds + 2):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times[2:])


def rates() -> dict[str, float]:
    """dram in GB/s; bfloat16 in GFLOP/s and int8 in GOP/s, a multiplication and an addition being two."""
    memory = torch.ones(READ_BYTES // 4)
    operations = 2 * ROWS * INNER * OUTER
    rows, weight = torch.randn(ROWS, INNER).bfloat16(), torch.randn(OUTER, INNER).bfloat16()
    byte_rows = torch.randint(-9, 9, (ROWS, INNER), dtype=torch.int8)
    byte_weight = torch.randint(-9, 9, (OUTER, INNER), dtype=torch.int8).t()
    return {
        "dram": READ_BYTES / best_s(memory.sum) / 1e9,
        "bfloat16": operations / best_s(lambda: torch.nn.functional.linear(rows, weight)) / 1e9,
        "int8": operations / best_s(lambda: torch._int_mm(byte_rows, byte_weight)) / 1e9,
    }


def main() -> int:
    parser = parser_with_json(__doc__)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with torch.inference_mode():
        report(rates(), args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
