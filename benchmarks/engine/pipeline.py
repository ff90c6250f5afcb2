"""Engine level: decode throughput of a model in pipeline stages, beside the same threads under one stage.

python -m benchmarks.engine.pipeline --threads 2 --stages 2 [--pairs 5]
"""

from __future__ import annotations

import statistics
import sys

import torch

from benchmarks.engine_core import decode_rate
from benchmarks.report import parser_with_json, report
from shared.device.streams import make_streams
from shared.model.formats.opened import LoadOptions
from shared.model.loading.load import load_model
from shared.model.loading.pipeline import load_pipeline
from shared.node.assembly.assemble import CoreSizes, assemble_core
from shared.node.records.core import NodeCore
from shared.sched.steps.settings import SchedSettings

NUM_OUT = 48


def build(model: str, dtype: str, num_stages: int, threads: int) -> NodeCore:
    """`threads`: of each stage."""
    torch.set_num_threads(threads)
    settings = SchedSettings(page_size=16, max_context=2048, chunk_size=512, mixed_chunk_size=512)
    if num_stages == 1:
        loaded, stages = load_model(model, LoadOptions(dtype, threads=threads)), ()
    else:
        loaded, stages = load_pipeline(model, LoadOptions(dtype, threads=threads), num_stages)
    streams = make_streams("cpu", on_thread_start=lambda: torch.set_num_threads(threads), num_stages=num_stages)
    return assemble_core(loaded, streams, settings, CoreSizes(1200, 40, prefix_cache=False), stages=stages)


def main() -> int:
    parser = parser_with_json(__doc__)
    parser.add_argument("--threads", type=int, default=2, help="of all stages together")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--pairs", type=int, default=5, help="interleaved pairs of runs for each batch")
    args = parser.parse_args()
    counts = (1, args.stages)
    cores = {count: build(args.model, args.dtype, count, max(1, args.threads // count)) for count in counts}
    figures: dict[str, float] = {}
    for core in cores.values():
        decode_rate(core, 8, 8)
    for batch in (1, 8, 32):
        rates: dict[int, list[float]] = {count: [] for count in counts}
        for pair in range(args.pairs):
            for count in counts if pair % 2 else reversed(counts):
                rates[count].append(decode_rate(cores[count], batch, NUM_OUT))
        for count in counts:
            figures[f"decode_{batch}_stages_{count}"] = statistics.median(rates[count])
        ratios = [staged / one for staged, one in zip(rates[args.stages], rates[1], strict=True)]
        figures[f"decode_{batch}_ratio"] = statistics.median(ratios)
    for core in cores.values():
        core.close()
    report(figures, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
