"""Measure a head's tokens per verify step, with its chains of drafts over the target's greedy answers.

While all drafts of a chain are right, the head's input is the same as in decoding. So a chain from each token of an
answer, cut at its first wrong draft, yields the acceptance lengths of greedy decoding.

    slot            L-1               L              L+1
    head reads  (token L, aux)  (draft, hidden)  (draft, hidden)      aux: the target's; hidden: the head's own
    head drafts   token L+1       token L+2        token L+3
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import cast

import torch

from deploy.tools.head.generate import PAGE, Generator, Task
from deploy.tools.head.prompts import OWN_PROMPTS, prompt_ids, read_kinds
from deploy.tools.head.settings import EvaluateConfig
from router.text.load import load_text_model
from shared.config.models.model_path import resolve_model
from shared.config.settings.frozen import ENCODER
from shared.core.errors import ConfigError
from shared.kernel.attention.attention import AttentionInputs
from shared.kernel.code.step_layout import Layout
from shared.kv.layout import page_windows
from shared.kv.pool import KVPool
from shared.model.formats.opened import LoadOptions
from shared.model.llama.eagle_head import DraftTarget, EagleHead
from shared.model.loading.load import load_eagle_head, load_model
from shared.model.math.draft_head import DraftOutput
from shared.model.math.interface import Model, ModelInputs

LONGEST_PROMPT = 1024
SHORTEST = 3  # an answer of fewer ids has no room for a chain
ALL = "all"


@dataclass(frozen=True, slots=True)
class HeadAcceptance:
    """Acceptance over greedy answers. `tokens_per_verify[k]`: tokens per verify step with chains of k + 1 drafts.

    `by_step[k]`: the share of right drafts at step k, if all earlier drafts are right.
    """

    answers: int
    tokens: int
    tokens_per_verify: tuple[float, ...]
    by_step: tuple[float, ...]


def evaluate(config: EvaluateConfig) -> None:
    """Print the acceptance by kind of prompt, as a table and as JSON. Raise ConfigError for unfit files."""
    settings, target = config.test, config.target
    if resolve_model(target.model).path is None:
        raise ConfigError(f"--model {target.model} has no hidden states for a head to read")
    torch.set_num_threads(target.threads)
    text, device = load_text_model(target.model), torch.device(target.device)
    asked = read_kinds(Path(settings.prompts) if settings.prompts else OWN_PROMPTS)
    model = load_model(target.model, LoadOptions(target.dtype, threads=target.threads), target.device)
    ENCODER.refuse({"--spec eagle": model.spec.has_encoder}, of=model.spec.name)
    longest = min(model.spec.max_context, LONGEST_PROMPT + settings.max_new)
    tasks = [Task(n, prompt_ids(text, prompt), settings.max_new) for n, (_, prompt) in enumerate(asked)]
    with closing(Generator(model, settings.rows, longest, device)) as generator:
        made = {task.key: answer for task, answer in generator.run(tasks)}
    head = load_eagle_head(settings.head, target.model, cast(DraftTarget, model))
    with closing(Chains(model, head, longest, settings.chain, device)) as chains:
        lengths = {
            task.key: chains.accept_lengths(task.prompt, made[task.key])
            for task in tasks
            if len(made[task.key]) >= SHORTEST
        }
    kinds = {kind: [lengths[n] for n in lengths if asked[n][0] == kind] for kind, _ in asked}
    kinds[ALL] = list(lengths.values())
    found = {kind: acceptance(ones, settings.chain) for kind, ones in kinds.items()}
    print(table(found))
    print(json.dumps({kind: asdict(one) for kind, one in found.items()}))


class Chains:
    """Own the KV memory of one sequence of at most `longest` tokens, for the target and the head."""

    def __init__(self, model: Model, head: EagleHead, longest: int, steps: int, device: torch.device) -> None:
        cast(DraftTarget, model).capture_aux(head.aux_layers)
        self._model, self._head, self._steps, self._device = model, head, steps, device
        self._map = head.d2t.tolist()
        planes = model.kv_planes(PAGE) + head.kv_planes(PAGE)
        num_groups = len(page_windows(planes))
        pages = 1 + torch.arange(num_groups * -(-longest // PAGE), dtype=torch.int32)  # page 0 is the sink
        self._pool = KVPool(planes, len(pages) + 1, PAGE, device)
        self._tables = pages.view(num_groups, 1, -1).to(device).unbind()

    def close(self) -> None:
        self._pool.close()

    @torch.inference_mode()
    def accept_lengths(self, prompt: Sequence[int], answer: Sequence[int]) -> list[int]:
        """Return how many drafts of a chain are right before the first wrong one.

        There is one chain per id of the answer but the last: it begins after this id, and ends with the answer.
        """
        ids = [*prompt, *answer]
        aux = self._aux(ids)
        first, end = len(prompt) - 1, len(ids) - 2  # slots; the head's slot s holds token s + 1 and drafts token s + 2
        self._extend(ids, aux, 0, first)
        return [self._chain(ids, aux, slot, min(self._steps, end - slot)) for slot in range(first, end)]

    def _chain(self, ids: Sequence[int], aux: torch.Tensor, slot: int, steps: int) -> int:
        output = self._extend(ids, aux, slot, slot + 1)
        for step in range(steps):
            draft = self._map[int(output.logits[0].argmax())]
            at = slot + 1 + step
            if draft != ids[at + 1]:
                return step
            if step + 1 < steps:
                # A later `extend` writes this slot again.
                view = self._head_view(at, at + 1)
                output = self._head.forward(self._tensor([draft]), output.hidden, view, self._pool)
        return steps

    def _extend(self, ids: Sequence[int], aux: torch.Tensor, start: int, stop: int) -> DraftOutput:
        """Write the head's KV of these slots. Return the last slot's output; with no slot, no output."""
        last = self._tensor([stop - start - 1] if stop > start else [])
        view = self._head_view(start, stop)
        return self._head.extend(self._tensor(ids[start + 1 : stop + 1]), aux[start:stop], view, self._pool, last)

    def _aux(self, ids: Sequence[int]) -> torch.Tensor:
        """Return what the target leaves for the head at each token: (n, 3H)."""
        view, last = self._view(0, len(ids)), self._tensor([len(ids) - 1])
        aux = self._model.forward(ModelInputs(self._tensor(ids), view.positions, view.layout, last), self._pool).aux
        assert aux is not None
        return aux

    def _view(self, start: int, stop: int) -> AttentionInputs:
        positions = torch.arange(start, stop, device=self._device)
        bounds = torch.tensor([0, stop - start], dtype=torch.int32, device=self._device)
        return AttentionInputs(positions, Layout(bounds, self._tables, stop - start, stop))

    def _head_view(self, start: int, stop: int) -> AttentionInputs:
        view = self._view(start, stop)
        return replace(view, layout=view.layout.of_group())

    def _tensor(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)


def acceptance(lengths: Sequence[Sequence[int]], steps: int) -> HeadAcceptance:
    """`lengths`: Chains.accept_lengths of each answer, for chains of `steps` drafts."""
    walks = [[walk(one, step + 1) for one in lengths] for step in range(steps)]
    tried = [
        sum(min(right, len(one) - at - 1) >= step for one in lengths for at, right in enumerate(one))
        for step in range(steps)
    ]
    kept = [sum(right > step for one in lengths for right in one) for step in range(steps)]
    return HeadAcceptance(
        answers=len(lengths),
        tokens=sum(map(len, lengths)),
        tokens_per_verify=tuple(sum(t for t, _ in w) / max(1, sum(v for _, v in w)) for w in walks),
        by_step=tuple(k / max(1, t) for k, t in zip(kept, tried, strict=True)),
    )


def walk(lengths: Sequence[int], steps: int) -> tuple[int, int]:
    """Decode an answer with chains of at most `steps` drafts. Return (tokens, verify steps)."""
    at, verifies = 0, 0
    while at < len(lengths):
        verifies += 1
        at += min(lengths[at], steps) + 1
    return min(at, len(lengths)), verifies


def table(found: Mapping[str, HeadAcceptance]) -> str:
    steps = len(next(iter(found.values())).by_step)
    head = [f"{'kind':<14}{'tokens':>8}", *(f"{n + 1:>7}" for n in range(steps)), "   right drafts, first to last"]
    lines = [f"{'':22}tokens per verify with this many drafts in a row", "".join(head)]
    for name, one in found.items():
        rates = "".join(f"{value:7.2f}" for value in one.tokens_per_verify)
        shares = "".join(f"{value:7.0%}" for value in one.by_step)
        lines.append(f"{name:<14}{one.tokens:>8}{rates}   {shares}")
    return "\n".join(lines)
