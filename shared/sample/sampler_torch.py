"""Sample on torch tensors of any device, as a GPU without Triton does. The ids equal the numba kernels'.

The code never waits for the device or copies to it. Every tensor is on the device of `logits`. The host knows how many
outputs draw in each mode. Integer sums and elementwise floats have the same bits on every device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from shared.kernel.sampling.noise import (
    WEIGHT_BITS,
    torch_gumbel,
    torch_log,
    torch_noise_bits,
    torch_row_keys,
    torch_weight,
)
from shared.kernel.sampling.sample_constants import BARRED
from shared.sample.interface import DeviceMasks, History, SampleOutput
from shared.sample.params import FILTERED, GREEDY, PLAIN, Params

Ints = npt.NDArray[np.int64]
SCORED_AT_ONCE = 256  # prompt tokens


@dataclass(frozen=True, slots=True)
class OutputRows:
    """E outputs of a batch, with their rows' parameters on the host and on the device."""

    host_rows: Ints  # (E,)
    host: Params[np.ndarray]
    rows: torch.Tensor  # (E,) int64
    params: Params[torch.Tensor]

    def __len__(self) -> int:
        return len(self.host_rows)

    def of(self, name: str) -> torch.Tensor:
        """Return a (B,) parameter as (E, 1)."""
        return self.params[name][self.rows].unsqueeze(1)

    def pick(self, wanted: npt.NDArray[np.bool_], column: torch.Tensor) -> torch.Tensor:
        """Return the wanted outputs' indices, on the device. `wanted` (E,) on the host has a flag per output; `column`
        (B,) on the device has a flag per batch row."""
        return true_first(column[self.rows] != 0, int(wanted.sum()))

    def take(self, outputs: torch.Tensor, wanted: npt.NDArray[np.bool_]) -> OutputRows:
        return OutputRows(self.host_rows[wanted], self.host, self.rows[outputs], self.params)

    def entries(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the index pairs (output, entry) of a list parameter, ordered by output. `name`: of its ends."""
        host_ends, ends = self.host[name], self.params[name]
        total = int((host_ends[1:] - host_ends[:-1])[self.host_rows].sum())
        counts = (ends[1:] - ends[:-1])[self.rows]
        outputs = torch.arange(len(self), device=ends.device).repeat_interleave(counts, output_size=total)
        before = counts.cumsum(0) - counts  # number of entries of earlier outputs
        places = torch.arange(total, device=ends.device) - before[outputs]
        return outputs, ends[self.rows[outputs]] + places


def true_first(flags: torch.Tensor, num: int) -> torch.Tensor:
    """Return the indices, (num,) int64, of the true `flags` (E,). The host knows `num`, so it need not wait."""
    return flags.logical_not().to(torch.int8).argsort(stable=True)[:num]


def sample_torch(
    logits: torch.Tensor,
    rows: OutputRows,
    positions: torch.Tensor,
    history: History | None,
    masks: DeviceMasks | None = None,
) -> SampleOutput:
    edited = _edit(logits, rows, positions, history, masks)
    mode = rows.host["mode"][rows.host_rows]
    ids = torch.zeros_like(rows.rows)
    for name, draw in ((GREEDY, _argmax_of), (FILTERED, _draw_filtered), (PLAIN, _draw)):
        wanted = mode == name
        if wanted.any():
            where = rows.pick(wanted, rows.params["mode"] == name)
            ids[where] = draw(edited[where], rows.take(where, wanted), positions[where])
    num_best, host_best = rows.params["num_logprobs"][rows.rows], rows.host["num_logprobs"][rows.host_rows]
    return with_logprobs_torch(logits, host_best, num_best, ids)


# penalties, bias, masks
def _edit(
    logits: torch.Tensor,
    rows: OutputRows,
    positions: torch.Tensor,
    history: History | None,
    masks: DeviceMasks | None = None,
) -> torch.Tensor:
    """Return an edited copy, or `logits` if no output is edited. Keep `logits` unchanged, for logprobs."""
    host, own = rows.host, logits.clone
    penalised = host["is_penalised"][rows.host_rows] != 0
    limited = host["is_limited"][rows.host_rows] != 0
    has = [_has_entries(ends, rows) for ends in (host["stop_ends"], host["bias_ends"], host["bad_ends"])]
    if not (penalised.any() or limited.any() or any(has) or masks is not None):
        return logits
    logits = own()
    if penalised.any():
        assert history is not None
        where = rows.pick(penalised, rows.params["is_penalised"])
        some = rows.take(where, penalised)
        logits[where] = _penalise(logits[where], some, _past(history, some, positions, where))
    _add_bias(logits, rows)
    _mask_stops(logits, rows, positions)
    if limited.any():
        _allow(logits, rows)
    if masks is not None:
        _keep(logits, masks)
    _ban(logits, rows, positions, history)
    return logits


def _has_entries(ends: np.ndarray, rows: OutputRows) -> bool:
    return bool((ends[rows.host_rows + 1] > ends[rows.host_rows]).any())


class _Past(NamedTuple):
    """See History."""

    tokens: torch.Tensor  # (E, max_context) int32
    common: torch.Tensor  # (E,)
    drafted: torch.Tensor | None  # (E, N) int32

    def uses(self, prompt_lens: torch.Tensor, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each id's count in all earlier tokens and in the answer, both (E, vocab) int32. prompt_lens (E, 1)."""
        steps = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        past = steps < self.common.unsqueeze(1)
        seen = _uses(self.tokens, past, vocab_size)
        counts = _uses(self.tokens, past & (steps >= prompt_lens), vocab_size)
        if self.drafted is not None:
            drafted = _uses(self.drafted, self.drafted >= 0, vocab_size)
            seen, counts = seen + drafted, counts + drafted
        return seen, counts


def _last_tokens(history: History, rows: OutputRows, positions: torch.Tensor, num: int) -> torch.Tensor:
    """Return each answer's last tokens, (E, num) int32, drafts included; -1 before the answer's first token."""
    common = positions + 1 if history.common is None else history.common
    at = common.unsqueeze(1) - torch.arange(num, 0, -1, device=positions.device)
    is_prompt = at < rows.of("prompt_lens")
    emitted = history.tokens[history.rows[rows.rows].unsqueeze(1), at.clamp(min=0)].masked_fill(is_prompt, -1)
    if history.drafted is None:
        return emitted
    answer = torch.cat((emitted, history.drafted), dim=1)
    order = torch.sort(answer >= 0, dim=1, stable=True).indices  # moves the answer's tokens to the end
    return answer.gather(1, order)[:, -num:]


def _past(history: History, some: OutputRows, positions: torch.Tensor, where: torch.Tensor) -> _Past:
    common = positions + 1 if history.common is None else history.common
    drafted = None if history.drafted is None else history.drafted[where]
    return _Past(history.tokens[history.rows[some.rows]], common[where], drafted)


def _uses(tokens: torch.Tensor, wanted: torch.Tensor, vocab_size: int) -> torch.Tensor:
    wanted = wanted & (tokens >= 0) & (tokens < vocab_size)
    counts = torch.zeros((len(tokens), vocab_size), dtype=torch.int32, device=tokens.device)
    return counts.scatter_add_(1, tokens.clamp(0, vocab_size - 1).to(torch.int64), wanted.to(torch.int32))


def _penalise(logits: torch.Tensor, rows: OutputRows, past: _Past) -> torch.Tensor:
    seen, counts = past.uses(rows.of("prompt_lens"), logits.shape[1])
    repetition = rows.of("repetition_penalty")
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where((seen > 0) & (repetition != 1), repeated, logits)
    per_use = rows.of("frequency_penalty") * counts.to(torch.float32)
    reduced = logits - (per_use + rows.of("presence_penalty"))
    return torch.where(counts > 0, reduced, logits)


def _add_bias(logits: torch.Tensor, rows: OutputRows) -> None:
    params = rows.params
    outputs, entries = rows.entries("bias_ends")
    if len(entries):
        logits.index_put_((outputs, params["bias_ids"][entries]), params["bias_values"][entries], accumulate=True)


def _mask_stops(logits: torch.Tensor, rows: OutputRows, positions: torch.Tensor) -> None:
    params = rows.params
    outputs, entries = rows.entries("stop_ends")
    if not len(entries):
        return
    where = (outputs, params["stop_ids"][entries])
    early = (positions + 1 < params["first_stop"][rows.rows])[outputs]
    logits[where] = torch.where(early, float(BARRED), logits[where])


def _allow(logits: torch.Tensor, rows: OutputRows) -> None:
    outputs, entries = rows.entries("allowed_ends")
    is_free = rows.of("is_limited") == 0
    keep = is_free.expand(logits.shape).clone()
    keep[outputs, rows.params["allowed_ids"][entries]] = True
    logits.masked_fill_(~keep, -torch.inf)


def _keep(logits: torch.Tensor, masks: DeviceMasks) -> None:
    ids = torch.arange(logits.shape[1], device=logits.device)
    bits = masks.bits[masks.rows.clamp(min=0)]
    is_barred = ((bits[:, ids >> 5] >> (ids & 31).to(torch.int32)) & 1) == 0
    logits.masked_fill_(is_barred & (masks.rows >= 0).unsqueeze(1), -torch.inf)


def _ban(logits: torch.Tensor, rows: OutputRows, positions: torch.Tensor, history: History | None) -> None:
    """Bar the last id of each bad word where it would complete the word."""
    params = rows.params
    outputs, entries = rows.entries("bad_ends")
    if not len(entries):
        return
    is_next = torch.ones(len(entries), dtype=torch.bool, device=logits.device)
    length = params["bad_before"].shape[1]
    if length:
        assert history is not None
        wanted = params["bad_before"][entries]
        answers = _last_tokens(history, rows, positions, length)
        is_next = ((wanted == answers[outputs]) | (wanted < 0)).all(dim=1)
    barred = torch.zeros(logits.shape, dtype=torch.int32, device=logits.device)
    # accumulated, because two words may have the same last id
    barred.index_put_((outputs, params["bad_ids"][entries]), is_next.to(torch.int32), accumulate=True)
    logits.masked_fill_((barred > 0) & (logits > -torch.inf), float(BARRED))


# drawing
def _argmax_of(logits: torch.Tensor, rows: OutputRows, positions: torch.Tensor) -> torch.Tensor:
    return _argmax(logits)


def _argmax(logits: torch.Tensor) -> torch.Tensor:
    """Return the lowest id of the largest logit, which torch.argmax does not promise."""
    ids = torch.arange(logits.shape[1], device=logits.device)
    best = logits.amax(dim=1, keepdim=True)
    return torch.where(logits == best, ids, logits.shape[1]).amin(dim=1).clamp(max=logits.shape[1] - 1)


def _scaled(logits: torch.Tensor, rows: OutputRows) -> torch.Tensor:
    return (logits - logits.amax(dim=1, keepdim=True)) * rows.of("scale")


def _noise(rows: OutputRows, positions: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    first, second = torch_row_keys(rows.params["seeds"][rows.rows], positions + 1)
    return torch_gumbel(torch_noise_bits(first.unsqueeze(1), second.unsqueeze(1), ids.to(torch.int32)))


def rank_candidates_torch(
    logits: torch.Tensor, rows: OutputRows, positions: torch.Tensor, history: History | None, num: int
) -> tuple[torch.Tensor, torch.Tensor]:
    first = sample_torch(logits, rows, positions, history).ids.unsqueeze(1)
    scores = _edit(logits, rows, positions, history)
    is_warm = rows.host["mode"][rows.host_rows] != GREEDY
    if is_warm.any():
        where = rows.pick(is_warm, rows.params["mode"] != GREEDY)
        warm = rows.take(where, is_warm)
        noise = _noise(warm, positions[where], torch.arange(logits.shape[1], device=logits.device))
        scores = scores.index_copy(0, where, scores[where] + warm.of("temperature") * noise)
    best = scores.amax(dim=1, keepdim=True)
    mass = torch_weight(scores - best).sum(dim=1, keepdim=True)
    log_total = torch_log(mass.to(torch.float32) * 2.0**-WEIGHT_BITS)
    log_probs = ((scores - best) - log_total).scatter(1, first, 0.0 - log_total)
    ids = torch.sort(scores.scatter(1, first, torch.inf), dim=1, descending=True, stable=True).indices[:, :num]
    return ids, log_probs.gather(1, ids)


def _draw(logits: torch.Tensor, rows: OutputRows, positions: torch.Tensor) -> torch.Tensor:
    ids = torch.arange(logits.shape[1], device=logits.device)
    return _argmax(_scaled(logits, rows) + _noise(rows, positions, ids))


def _draw_filtered(logits: torch.Tensor, rows: OutputRows, positions: torch.Tensor) -> torch.Tensor:
    device, vocab_size = logits.device, logits.shape[1]
    order = torch.sort(logits, dim=1, descending=True, stable=True).indices
    scaled = _scaled(logits, rows).gather(1, order)
    keep = torch.arange(vocab_size, device=device) < rows.of("top_k")
    weights = torch.where(keep, torch_weight(scaled), 0)
    reached = weights.cumsum(dim=1)
    top_p = rows.of("top_p")
    wanted = (top_p.to(torch.float64) * reached[:, -1:].to(torch.float64)).to(torch.int64).clamp(min=1)
    keep &= (reached - weights < wanted) | (top_p >= 1)
    keep &= scaled >= rows.of("log_min_p")
    scores = torch.where(keep, scaled + _noise(rows, positions, order), -torch.inf)
    best = scores.amax(dim=1, keepdim=True)
    return torch.where(keep & (scores == best), order, vocab_size).amin(dim=1).clamp(max=vocab_size - 1)


# logprobs
def with_logprobs_torch(
    logits: torch.Tensor, host_best: Ints, num_best: torch.Tensor, ids: torch.Tensor
) -> SampleOutput:
    """See `sampler_numba.with_logprobs`. `num_best` is `host_best` on the device."""
    device, width = logits.device, max(0, int(host_best.max(initial=-1)))
    chosen = torch.zeros(len(ids), dtype=torch.float32, device=device)
    best_ids = torch.full((len(ids), width), -1, dtype=torch.int64, device=device)
    best = torch.zeros((len(ids), width), dtype=torch.float32, device=device)
    num_asking = int((host_best >= 0).sum())
    if num_asking:
        where = true_first(num_best >= 0, num_asking)
        rows = logits[where]
        top = rows.amax(dim=1, keepdim=True)
        mass = torch_weight(rows - top).sum(dim=1, keepdim=True)
        log_probs = (rows - top) - torch_log(mass.to(torch.float32) * 2.0**-WEIGHT_BITS)
        chosen[where] = log_probs.gather(1, ids[where].unsqueeze(1)).squeeze(1)
        if width:
            ranking = torch.sort(rows, dim=1, descending=True, stable=True).indices[:, :width]
            wanted = torch.arange(ranking.shape[1], device=device) < num_best[where].unsqueeze(1)
            best_ids[where, : ranking.shape[1]] = torch.where(wanted, ranking, -1)
            best[where, : ranking.shape[1]] = torch.where(wanted, log_probs.gather(1, ranking), 0.0)
    return SampleOutput(ids, chosen, best_ids, best)


def score_torch(logits: torch.Tensor, num_top: int, ids: torch.Tensor) -> SampleOutput:
    """Work in parts, because sorting takes several copies of the logits."""
    num_best = min(num_top, logits.shape[1])
    parts = []
    for begin in range(0, len(ids), SCORED_AT_ONCE):
        some = slice(begin, begin + SCORED_AT_ONCE)
        count = len(ids[some])
        every = torch.full((count,), num_best, dtype=torch.int64, device=logits.device)
        parts.append(with_logprobs_torch(logits[some], np.full(count, num_best, np.int64), every, ids[some]))
    return SampleOutput(
        torch.cat([part.ids for part in parts]),
        torch.cat([part.logprobs for part in parts]),
        torch.cat([part.top_ids for part in parts]),
        torch.cat([part.top_logprobs for part in parts]),
    )
