"""What is measured of a node's engine: every step of a load, with its shape."""

from __future__ import annotations

from deploy.tools.plan.step_bench import Bench
from shared.device.streams import make_streams
from shared.model.formats.opened import LoadOptions
from shared.model.loading.load import load_model
from shared.node.assembly.assemble import CoreSizes, assemble_core
from shared.sched.steps.settings import SchedSettings

CHUNK, MIXED_CHUNK, MOST_ROWS = 64, 32, 9


def make_bench() -> Bench:
    settings = SchedSettings(page_size=16, max_context=300, chunk_size=CHUNK, mixed_chunk_size=MIXED_CHUNK)
    sizes = CoreSizes(num_pages=300, max_running=MOST_ROWS, prefix_cache=False)
    model = load_model("hashlm", LoadOptions("float32", threads=1))
    return Bench(assemble_core(model, make_streams("inline"), settings, sizes, overlap=False))


def test_prompts_come_in_chunks_and_tokens_read_all_before_them() -> None:
    bench = make_bench()
    bench.ask(100, 1)
    bench.finish()
    shapes = bench.log.shapes
    assert [shape.tokens for shape in shapes] == [64, 36]
    assert [shape.samples for shape in shapes] == [0, 1]
    assert sum(shape.pairs for shape in shapes) == 100 * 101 // 2
    assert all(shape.keys == 0 for shape in shapes) and min(bench.log.seconds) > 0


def test_decode_rows_read_all_that_they_have() -> None:
    bench = make_bench()
    for _ in range(2):
        bench.ask(10, 4)
    bench.finish()
    decoding = [shape for shape in bench.log.shapes if shape.keys]
    assert [(shape.tokens, shape.samples, shape.pairs) for shape in decoding] == [(2, 2, 0)] * 3
    assert [shape.keys for shape in decoding] == [22, 24, 26]


def test_the_whole_load_fits_a_small_node_and_leaves_nothing() -> None:
    bench = make_bench()
    bench.prompts()
    bench.batches()
    bench.mixed()
    shapes = bench.log.shapes
    assert len(shapes) == len(bench.log.seconds) > 100
    assert max(shape.tokens for shape in shapes if not shape.keys) == CHUNK
    assert {shape.samples for shape in shapes} >= {1, 2, 4, 8}
    mixed = [shape for shape in shapes if shape.keys and shape.pairs]
    assert mixed and max(shape.tokens for shape in mixed) <= MIXED_CHUNK + MOST_ROWS
    bench.core.check_integrity(idle=True)
