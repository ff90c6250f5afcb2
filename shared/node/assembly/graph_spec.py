"""Choose the steps whose forwards a node captures as CUDA graphs, and capture them."""

from __future__ import annotations

from dataclasses import dataclass

from shared.config.processes import NodeParts
from shared.device.gpu import Gpu
from shared.device.streams import StreamSet
from shared.engine.buckets import PROMPT_TOKENS, Buckets, lengths_up_to, some_up_to, some_widths
from shared.engine.drafter import Drafter
from shared.engine.graphs import GraphRunner
from shared.kernel.product.experts import has_grouped_product
from shared.kv.pool import KVPool
from shared.model.math.interface import Model, ModelSpec
from shared.sched.steps.draft_length import step_widths
from shared.sched.steps.settings import SchedSettings

GRAPH_TOKENS = 1024  # `most_tokens` of a model whose attention gathers a fixed number of tokens


@dataclass(frozen=True, slots=True)
class GraphSpec:
    """Decode steps of these widths run as graphs while no row has more than `most_tokens` tokens.

    `prompts`: and so do steps of up to the last of these numbers of prompt tokens, without decode rows.

    `refused`: why no step of this model can be captured; "" if all can. `by_length`: see buckets.py."""

    gpu: Gpu
    widths: tuple[int, ...]
    most_tokens: int
    prompts: tuple[int, ...] = ()
    refused: str = ""
    by_length: bool = True


def graphs_of(parts: NodeParts, gpu: Gpu | None, model: Model) -> GraphSpec | None:
    """Return None for a node without graphs. A prefill node has none of decode steps, which it seldom runs.

    Ranks have none so far: each would capture the same graph, with NCCL's launches in it."""
    if gpu is None or parts.sched.cuda_graphs == "off" or parts.parallel.num_ranks > 1:
        return None
    reads_lengths = not getattr(model, "gathers", True)
    # attention that gathers would read as many keys for each of a graph's rows, so prompts would be slower in a graph
    most, prompts = (model.spec.max_context, PROMPT_TOKENS) if reads_lengths else (GRAPH_TOKENS, ())
    is_planned = model.spec.needs_cpu_seq_lens  # by exact lengths, for graphs of decode rows
    if is_planned:
        prompts = ()
    widths = () if parts.node.role == "prefill" else some_widths(step_widths(parts.spec))
    if not widths and not prompts:
        return None
    return GraphSpec(gpu, widths, most, prompts, why_not_captured(model.spec, gpu), by_length=not is_planned)


def why_not_captured(spec: ModelSpec, gpu: Gpu) -> str:
    """Return why a model's steps wait for the host; "" if they don't."""
    if not spec.has_grouped_experts:
        return ""
    major, minor = gpu.describe(gpu.current_device()).capability
    if has_grouped_product(spec.dtype, major):
        return ""
    return (
        f"torch multiplies {spec.dtype} experts on a GPU of compute capability {major}.{minor} one by one, and waits "
        "for their numbers of tokens"
    )


def make_graphs(
    model: Model,
    kv: KVPool,
    drafter: Drafter | None,
    spec: GraphSpec | None,
    settings: SchedSettings,
    max_running: int,
    streams: StreamSet,
) -> GraphRunner | None:
    if spec is None:
        return None
    most_tokens = min(settings.history_len, spec.most_tokens)
    prompts = some_up_to(spec.prompts, settings.chunk_size)
    lengths = lengths_up_to(most_tokens) if spec.by_length else (most_tokens,)
    has_adapters = bool(model.spec.adapters or model.spec.short_context)
    buckets = Buckets.up_to(max_running, spec.widths, lengths, has_adapters, prompts)
    trees = drafter is not None and drafter.drafts_trees
    runner = GraphRunner(model, kv, spec.gpu, buckets, trees=trees, device=settings.device, refused=spec.refused)
    streams.forward.launch(runner.capture, label="graphs").take()
    return runner
