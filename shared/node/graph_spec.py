"""Choose the steps whose forwards a node captures as CUDA graphs, and capture them."""

from __future__ import annotations

from dataclasses import dataclass

from shared.config.processes import NodeParts
from shared.device.gpu import Gpu
from shared.device.streams import StreamSet
from shared.engine.buckets import PROMPT_TOKENS, Buckets, some_up_to, some_widths
from shared.engine.drafter import Drafter
from shared.engine.graphs import GraphRunner
from shared.kv.pool import KVPool
from shared.model.interface import Model
from shared.sched.draft_length import step_widths
from shared.sched.settings import SchedSettings

GRAPH_TOKENS = 1024  # `most_tokens` of a model whose attention gathers a fixed number of tokens


@dataclass(frozen=True, slots=True)
class GraphSpec:
    """Decode steps of these widths run as graphs while no row has more than `most_tokens` tokens.

    `prompts`: and so do steps of up to the last of these numbers of prompt tokens, without decode rows."""

    gpu: Gpu
    widths: tuple[int, ...]
    most_tokens: int
    prompts: tuple[int, ...] = ()


def graphs_of(parts: NodeParts, gpu: Gpu | None, model: Model) -> GraphSpec | None:
    """Return None for a node without graphs. A prefill node has none of decode steps, which it seldom runs."""
    if gpu is None or parts.sched.cuda_graphs == "off":
        return None
    reads_lengths = not getattr(model, "gathers", True)
    # attention that gathers would read as many keys for each of a graph's rows, so prompts would be slower in a graph
    most, prompts = (model.spec.max_context, PROMPT_TOKENS) if reads_lengths else (GRAPH_TOKENS, ())
    if model.spec.needs_cpu_seq_lens:  # such attention is planned for graphs of decode rows
        prompts = ()
    widths = () if parts.node.role == "prefill" else some_widths(step_widths(parts.spec))
    return GraphSpec(gpu, widths, most, prompts=prompts) if widths or prompts else None


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
    buckets = Buckets.up_to(max_running, spec.widths, most_tokens, bool(model.spec.adapters), prompts)
    trees = drafter is not None and drafter.drafts_trees
    runner = GraphRunner(model, kv, spec.gpu, buckets, trees=trees, device=settings.device)
    streams.forward.launch(runner.capture, label="graphs").take()
    return runner
