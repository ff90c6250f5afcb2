"""The sampler on torch tensors of any device: sorts, cumulative sums and masks. Gives the ids of the numba kernels.

It never waits for the device: what depends on device values (positions, history) stays there as masks. Sums are of
integer weights and every float operation is elementwise, so the same bits come out on every device.
Knows nothing of requests, streams or scheduling.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from shared.kernel.noise import (
    WEIGHT_BITS,
    torch_gumbel,
    torch_log,
    torch_noise_bits,
    torch_row_keys,
    torch_weight,
)
from shared.kernel.sample_cpu import GREEDY_BELOW
from shared.kernel.sample_edits import BARRED
from shared.sample.interface import History, SampleOutput, SamplingBatch, TokenMasks

Rows = npt.NDArray[np.int64]
SCORED_AT_ONCE = 256  # tokens of a prompt


class _Group(NamedTuple):
    """Outputs that take the same way through the sampler: their indices and their batch rows, on the host."""

    outputs: Rows
    rows: Rows


def sample_torch(
    logits: torch.Tensor,
    batch: SamplingBatch,
    row_of: Rows,
    positions: torch.Tensor,
    history: History | None,
    masks: TokenMasks | None = None,
) -> SampleOutput:
    """As `sampler.sample`; every tensor on the device of `logits`, but the masks, which are copied there."""
    edited = _edit(logits, batch, row_of, positions, history, masks)
    ids = torch.zeros(len(row_of), dtype=torch.int64, device=logits.device)
    greedy = batch.temperature[row_of] < GREEDY_BELOW
    filtered = ~greedy & (
        ((batch.top_k[row_of] > 0) & (batch.top_k[row_of] < logits.shape[1]))
        | (batch.top_p[row_of] < 1)
        | (batch.min_p[row_of] > 0)
    )
    for mask, draw in ((greedy, _argmax), (filtered, _draw_filtered), (~greedy & ~filtered, _draw)):
        if mask.any():
            group = _Group(np.flatnonzero(mask), row_of[mask])
            where = _to(group.outputs, logits.device)
            ids[where] = draw(edited[where], batch, group, positions[where])
    return with_logprobs_torch(logits, batch.num_logprobs[row_of], ids)


def _to(values: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(device, non_blocking=True)


def _column(values: npt.NDArray[np.generic], rows: Rows, device: torch.device) -> torch.Tensor:
    """(len(rows), 1) of a batch array."""
    return _to(values[rows], device).unsqueeze(1)


# --- penalties, bias, masks ------------------------------------------------------------------------------------------
def _edit(
    logits: torch.Tensor,
    batch: SamplingBatch,
    row_of: Rows,
    positions: torch.Tensor,
    history: History | None,
    masks: TokenMasks | None = None,
) -> torch.Tensor:
    """A copy where any output is edited: the raw logits are needed for logprobs."""
    penalised = np.flatnonzero(
        (batch.repetition_penalty[row_of] != 1)
        | (batch.presence_penalty[row_of] != 0)
        | (batch.frequency_penalty[row_of] != 0)
    )
    stops = [(e, i) for e, b in enumerate(row_of) if batch.min_tokens[b] > 0 for i in batch.stop_ids[b]]
    biases = [(e, i, value) for e, b in enumerate(row_of) for i, value in batch.logit_bias[b]]
    allowed = [(e, i) for e, b in enumerate(row_of) for i in batch.allowed_ids[b]]
    bad_words = [(e, word) for e, b in enumerate(row_of) for word in batch.bad_words[b]]
    if not len(penalised) and not stops and not biases and not allowed and not bad_words and masks is None:
        return logits
    logits = logits.clone()
    if len(penalised):
        assert history is not None
        where = _to(penalised, logits.device)
        past = _past(history, row_of, positions, penalised)
        logits[where] = _penalise(logits[where], batch, row_of[penalised], past)
    _add_bias(logits, biases)
    _mask_stops(logits, batch, row_of, positions, stops)
    _allow(logits, allowed)
    if masks is not None:
        _keep(logits, masks)
    _bar(logits, batch, row_of, positions, history, bad_words)
    return logits


class _Past(NamedTuple):
    """What E outputs count or have behind them, as in History."""

    tokens: torch.Tensor  # (E, max_context) int32
    common: torch.Tensor  # (E,)
    drafted: torch.Tensor | None  # (E, N) int32

    def uses(self, prompt_lens: torch.Tensor, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(E, vocab) int32: how often each id came before, and how often in the output; prompt_lens (E, 1)."""
        steps = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        past = steps < self.common.unsqueeze(1)
        seen = _uses(self.tokens, past, vocab_size)
        counts = _uses(self.tokens, past & (steps >= prompt_lens), vocab_size)
        if self.drafted is not None:
            drafted = _uses(self.drafted, self.drafted >= 0, vocab_size)
            seen, counts = seen + drafted, counts + drafted
        return seen, counts


def _last_tokens(
    history: History, row_of: Rows, positions: torch.Tensor, outputs: Rows, num: int, batch: SamplingBatch
) -> torch.Tensor:
    """(len(outputs), num) int32, the last tokens of each answer, drafts included; -1 before its first. Takes no more
    of the history than that."""
    device, where = positions.device, _to(outputs, positions.device)
    common = (positions + 1 if history.common is None else history.common)[where]
    at = common.unsqueeze(1) - torch.arange(num, 0, -1, device=device)
    rows = _to(history.rows[row_of[outputs]], device).unsqueeze(1)
    prompt_lens = _column(batch.prompt_lens, row_of[outputs], device)
    emitted = history.tokens[rows, at.clamp(min=0)].masked_fill(at < prompt_lens, -1)
    if history.drafted is None:
        return emitted
    answer = torch.cat((emitted, history.drafted[where]), dim=1)
    order = torch.sort(answer >= 0, dim=1, stable=True).indices  # tokens go to the end, in their order
    return answer.gather(1, order)[:, -num:]


def _past(history: History, row_of: Rows, positions: torch.Tensor, outputs: Rows) -> _Past:
    """Of some of the outputs."""
    where = _to(outputs, positions.device)
    common = positions + 1 if history.common is None else history.common
    drafted = None if history.drafted is None else history.drafted[where]
    return _Past(history.tokens[_to(history.rows[row_of[outputs]], positions.device)], common[where], drafted)


def _uses(tokens: torch.Tensor, wanted: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """(E, vocab) int32"""
    wanted = wanted & (tokens >= 0) & (tokens < vocab_size)
    counts = torch.zeros((len(tokens), vocab_size), dtype=torch.int32, device=tokens.device)
    return counts.scatter_add_(1, tokens.clamp(0, vocab_size - 1).to(torch.int64), wanted.to(torch.int32))


def _penalise(logits: torch.Tensor, batch: SamplingBatch, rows: Rows, past: _Past) -> torch.Tensor:
    device = logits.device
    seen, counts = past.uses(_column(batch.prompt_lens, rows, device), logits.shape[1])
    repetition = _column(batch.repetition_penalty, rows, device)
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where((seen > 0) & (repetition != 1), repeated, logits)
    per_use = _column(batch.frequency_penalty, rows, device) * counts.to(torch.float32)
    reduced = logits - (per_use + _column(batch.presence_penalty, rows, device))
    return torch.where(counts > 0, reduced, logits)


def _add_bias(logits: torch.Tensor, biases: list[tuple[int, int, float]]) -> None:
    biases = [entry for entry in biases if 0 <= entry[1] < logits.shape[1]]
    if not biases:
        return
    outputs, ids, values = (np.array(column) for column in zip(*biases, strict=True))
    where = (_to(outputs, logits.device), _to(ids, logits.device))
    logits.index_put_(where, _to(values.astype(np.float32), logits.device), accumulate=True)


def _mask_stops(
    logits: torch.Tensor, batch: SamplingBatch, row_of: Rows, positions: torch.Tensor, stops: list[tuple[int, int]]
) -> None:
    stops = [entry for entry in stops if 0 <= entry[1] < logits.shape[1]]
    if not stops:
        return
    outputs, ids = (np.array(column) for column in zip(*stops, strict=True))
    where = (_to(outputs, logits.device), _to(ids, logits.device))
    first_allowed = _to((batch.prompt_lens + batch.min_tokens)[row_of[outputs]], logits.device)
    early = positions[where[0]] + 1 < first_allowed
    logits[where] = torch.where(early, float(BARRED), logits[where])


def _allow(logits: torch.Tensor, allowed: list[tuple[int, int]]) -> None:
    """Outputs that have pairs (output, id) are left with these ids."""
    if not allowed:
        return
    outputs, ids = (np.array(column) for column in zip(*allowed, strict=True))
    keep = np.ones(logits.shape, dtype=np.bool_)
    keep[outputs] = False
    inside = ids < logits.shape[1]
    keep[outputs[inside], ids[inside]] = True
    logits.masked_fill_(~_to(keep, logits.device), -torch.inf)


def _keep(logits: torch.Tensor, masks: TokenMasks) -> None:
    """Outputs with a mask are left with the ids whose bit is set."""
    outputs = np.flatnonzero(masks.rows >= 0)
    if not len(outputs):
        return
    bits = _to(masks.bits[masks.rows[outputs]].view(np.int32), logits.device)
    ids = torch.arange(logits.shape[1], device=logits.device)
    keep = (bits[:, ids >> 5] >> (ids & 31).to(torch.int32)) & 1
    where = _to(outputs, logits.device)
    logits[where] = logits[where].masked_fill(keep == 0, -torch.inf)


def _bar(
    logits: torch.Tensor,
    batch: SamplingBatch,
    row_of: Rows,
    positions: torch.Tensor,
    history: History | None,
    bad_words: list[tuple[int, tuple[int, ...]]],
) -> None:
    """No word of the pairs (output, word) is completed."""
    bad_words = [(e, word) for e, word in bad_words if 0 <= word[-1] < logits.shape[1]]
    if not bad_words:
        return
    outputs, last = np.array([e for e, _ in bad_words]), np.array([word[-1] for _, word in bad_words])
    where = (_to(outputs, logits.device), _to(last, logits.device))
    length = max(len(word) for _, word in bad_words) - 1
    is_next = torch.ones(len(bad_words), dtype=torch.bool, device=logits.device)
    if length:
        assert history is not None
        before = np.array([(-1,) * (length + 1 - len(word)) + word[:-1] for _, word in bad_words], dtype=np.int32)
        wanted = _to(before, logits.device)
        some, which = np.unique(outputs, return_inverse=True)
        answers = _last_tokens(history, row_of, positions, some, length, batch)
        is_next = ((wanted == answers[_to(which, logits.device)]) | (wanted < 0)).all(dim=1)
    barred = torch.zeros(logits.shape, dtype=torch.int32, device=logits.device)
    barred.index_put_(where, is_next.to(torch.int32), accumulate=True)  # two words may end alike
    logits.masked_fill_((barred > 0) & (logits > -torch.inf), float(BARRED))


# --- drawing --------------------------------------------------------------------------------------------------------
def _argmax(
    logits: torch.Tensor, batch: SamplingBatch | None, group: _Group | None, positions: torch.Tensor | None
) -> torch.Tensor:
    """Of equal ones the lowest id, which torch.argmax does not promise."""
    ids = torch.arange(logits.shape[1], device=logits.device)
    best = logits.amax(dim=1, keepdim=True)
    return torch.where(logits == best, ids, logits.shape[1]).amin(dim=1).clamp(max=logits.shape[1] - 1)


def _scaled(logits: torch.Tensor, batch: SamplingBatch, group: _Group) -> torch.Tensor:
    scale = _to(np.float32(1) / batch.temperature[group.rows], logits.device).unsqueeze(1)
    return (logits - logits.amax(dim=1, keepdim=True)) * scale


def _noise(batch: SamplingBatch, group: _Group, positions: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    seeds = _to(batch.seeds.view(np.int64)[group.rows], ids.device)
    first, second = torch_row_keys(seeds, positions + 1)
    return torch_gumbel(torch_noise_bits(first.unsqueeze(1), second.unsqueeze(1), ids.to(torch.int32)))


def rank_candidates_torch(
    logits: torch.Tensor, batch: SamplingBatch, row_of: Rows, positions: torch.Tensor, history: History | None, num: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `candidates.rank_candidates`; every tensor on the device of `logits`."""
    first = sample_torch(logits, batch, row_of, positions, history).ids.unsqueeze(1)
    scores = _edit(logits, batch, row_of, positions, history)
    warm = np.flatnonzero(batch.temperature[row_of] >= GREEDY_BELOW)
    if len(warm):
        where, group = _to(warm, logits.device), _Group(warm, row_of[warm])
        noise = _noise(batch, group, positions[where], torch.arange(logits.shape[1], device=logits.device))
        temperature = _column(batch.temperature, group.rows, logits.device)
        scores = scores.index_copy(0, where, scores[where] + temperature * noise)
    best = scores.amax(dim=1, keepdim=True)
    mass = torch_weight(scores - best).sum(dim=1, keepdim=True)
    log_total = torch_log(mass.to(torch.float32) * 2.0**-WEIGHT_BITS)
    log_probs = ((scores - best) - log_total).scatter(1, first, 0.0 - log_total)
    ids = torch.sort(scores.scatter(1, first, torch.inf), dim=1, descending=True, stable=True).indices[:, :num]
    return ids, log_probs.gather(1, ids)


def _draw(logits: torch.Tensor, batch: SamplingBatch, group: _Group, positions: torch.Tensor) -> torch.Tensor:
    ids = torch.arange(logits.shape[1], device=logits.device)
    return _argmax(_scaled(logits, batch, group) + _noise(batch, group, positions, ids), None, None, None)


def _draw_filtered(logits: torch.Tensor, batch: SamplingBatch, group: _Group, positions: torch.Tensor) -> torch.Tensor:
    """Everything in the order of the ranking: by logit, equal ones by id."""
    device, vocab_size = logits.device, logits.shape[1]
    order = torch.sort(logits, dim=1, descending=True, stable=True).indices
    scaled = _scaled(logits, batch, group).gather(1, order)
    top_k = np.where(batch.top_k > 0, batch.top_k, vocab_size)
    keep = torch.arange(vocab_size, device=device) < _column(top_k, group.rows, device)
    weights = torch.where(keep, torch_weight(scaled), 0)
    reached = weights.cumsum(dim=1)
    top_p = _column(batch.top_p, group.rows, device)
    wanted = (top_p.to(torch.float64) * reached[:, -1:].to(torch.float64)).to(torch.int64).clamp(min=1)
    keep &= (reached - weights < wanted) | (top_p >= 1)
    with np.errstate(divide="ignore"):
        keep &= scaled >= _column(np.log(batch.min_p).astype(np.float32), group.rows, device)
    scores = torch.where(keep, scaled + _noise(batch, group, positions, order), -torch.inf)
    best = scores.amax(dim=1, keepdim=True)
    return torch.where(keep & (scores == best), order, vocab_size).amin(dim=1).clamp(max=vocab_size - 1)


# --- logprobs -------------------------------------------------------------------------------------------------------
def with_logprobs_torch(logits: torch.Tensor, num_best: npt.NDArray[np.int32], ids: torch.Tensor) -> SampleOutput:
    """As `sampler.with_logprobs`; every tensor on the device of `logits`."""
    device, width = logits.device, max(0, int(num_best.max(initial=-1)))
    chosen = torch.zeros(len(ids), dtype=torch.float32, device=device)
    best_ids = torch.full((len(ids), width), -1, dtype=torch.int64, device=device)
    best = torch.zeros((len(ids), width), dtype=torch.float32, device=device)
    asking = np.flatnonzero(num_best >= 0)
    if len(asking):
        where = _to(asking, device)
        rows = logits[where]
        top = rows.amax(dim=1, keepdim=True)
        mass = torch_weight(rows - top).sum(dim=1, keepdim=True)
        log_probs = (rows - top) - torch_log(mass.to(torch.float32) * 2.0**-WEIGHT_BITS)
        chosen[where] = log_probs.gather(1, ids[where].unsqueeze(1)).squeeze(1)
        if width:
            ranking = torch.sort(rows, dim=1, descending=True, stable=True).indices[:, :width]
            wanted = torch.arange(ranking.shape[1], device=device) < _to(num_best[asking], device).unsqueeze(1)
            best_ids[where, : ranking.shape[1]] = torch.where(wanted, ranking, -1)
            best[where, : ranking.shape[1]] = torch.where(wanted, log_probs.gather(1, ranking), 0.0)
    return SampleOutput(ids, chosen, best_ids, best)


def score_torch(logits: torch.Tensor, num_best: npt.NDArray[np.int32], ids: torch.Tensor) -> SampleOutput:
    """As `sampler.score`, some tokens at a time: sorting their logits takes several copies of them."""
    parts = [
        with_logprobs_torch(logits[some], num_best[some], ids[some])
        for some in (slice(begin, begin + SCORED_AT_ONCE) for begin in range(0, len(ids), SCORED_AT_ONCE))
    ]
    return SampleOutput(
        torch.cat([part.ids for part in parts]),
        torch.cat([part.logprobs for part in parts]),
        torch.cat([part.top_ids for part in parts]),
        torch.cat([part.top_logprobs for part in parts]),
    )
