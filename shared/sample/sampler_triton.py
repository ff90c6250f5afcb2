"""Sample with Triton kernels, without sorts, copies or waits. The ids equal sampler_torch's.

The host's copy of the parameters decides which kernels run. The device's copy decides how a kernel treats each output.
A row without finite logits gets the CPU kernels' id: the first of the largest logits, with NaN last.
"""

from __future__ import annotations

import numpy as np
import torch

from shared.gpu_kernel.candidates import score_candidates
from shared.gpu_kernel.edits import Edits, Past, edit_logits
from shared.gpu_kernel.logprobs import tell_logprobs
from shared.gpu_kernel.sample import Draws, draw_ids, find_heads, is_cut
from shared.sample.interface import DeviceMasks, History, SampleOutput
from shared.sample.params import FILTERED, GREEDY, Params
from shared.sample.sampler_torch import Ints, OutputRows


def sample_triton(
    logits: torch.Tensor,
    rows: OutputRows,
    positions: torch.Tensor,
    history: History | None,
    masks: DeviceMasks | None = None,
) -> SampleOutput:
    edited = _edited(logits, rows, positions.contiguous(), history, masks)
    heads, ids = _drawn(edited, rows, positions.contiguous())
    raw_heads, host_best = heads if edited is logits else None, rows.host["num_logprobs"][rows.host_rows]
    return _with_logprobs(logits, raw_heads, host_best, rows.params["num_logprobs"], rows.rows, ids)


def rank_candidates_triton(
    logits: torch.Tensor, rows: OutputRows, positions: torch.Tensor, history: History | None, num: int
) -> tuple[torch.Tensor, torch.Tensor]:
    params, positions = rows.params, positions.contiguous()
    scores = _edited(logits, rows, positions, history, None)
    first = _drawn(scores, rows, positions)[1].unsqueeze(1)
    if (rows.host["mode"][rows.host_rows] != GREEDY).any():
        columns = (rows.rows.contiguous(), params["mode"], params["temperature"], params["seeds"])
        scores = score_candidates(scores, positions, *columns)
    wanted = torch.full((len(rows),), num, dtype=torch.int64, device=logits.device)
    _, best, log_probs = tell_logprobs(scores, find_heads(scores), wanted, num, first)
    others = (best == first).to(torch.int8).argsort(dim=1, stable=True)[:, : num - 1]  # moves the drawn id to the end
    ids = torch.cat((first, best.gather(1, others)), dim=1)
    return ids, torch.cat((log_probs[:, :1], log_probs.gather(1, others)), dim=1)


def score_triton(logits: torch.Tensor, num_top: int, ids: torch.Tensor) -> SampleOutput:
    num_best = min(num_top, logits.shape[1])
    column = torch.full((len(ids),), num_best, dtype=torch.int64, device=logits.device)
    return _with_logprobs(logits, None, np.full(len(ids), num_best, np.int64), column, None, ids)


def _with_logprobs(
    logits: torch.Tensor,
    heads: torch.Tensor | None,
    host_best: Ints,
    num_best: torch.Tensor,
    rows: torch.Tensor | None,
    ids: torch.Tensor,
) -> SampleOutput:
    """`num_best`: one entry per batch row if `rows` is given, else one per output."""
    width = max(0, int(host_best.max(initial=-1)))
    if not (host_best >= 0).any():
        none = torch.zeros(len(ids), dtype=torch.float32, device=logits.device)
        return SampleOutput(ids, none, ids.new_empty((len(ids), 0)), none.new_empty((len(ids), 0)))
    heads = find_heads(logits) if heads is None else heads
    wanted = num_best if rows is None else num_best[rows]
    return SampleOutput(ids, *tell_logprobs(logits, heads, wanted, width, ids))


def _edited(
    logits: torch.Tensor,
    rows: OutputRows,
    positions: torch.Tensor,
    history: History | None,
    masks: DeviceMasks | None,
) -> torch.Tensor:
    if masks is None and not _is_edited(rows):
        return logits
    bits = None if masks is None else (masks.rows, masks.bits)
    return edit_logits(logits, positions, _edits(rows), _past(history, positions), bits)


def _drawn(edited: torch.Tensor, rows: OutputRows, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    own, heads = rows.host_rows, find_heads(edited)
    mode = rows.host["mode"][own]
    cuts = is_cut(rows.host, edited.shape[1])[own]
    filters = bool(((mode == FILTERED) & cuts).any())
    ids = draw_ids(edited, heads, positions, _draws(rows), is_warm=bool((mode != GREEDY).any()), filters=filters)
    return heads, ids


def _is_edited(rows: OutputRows) -> bool:
    host, own = rows.host, rows.host_rows
    lists = (host["stop_ends"], host["bias_ends"], host["bad_ends"])
    has_entries = any(bool((ends[own + 1] > ends[own]).any()) for ends in lists)
    return has_entries or bool(((host["is_penalised"][own] != 0) | (host["is_limited"][own] != 0)).any())


def _edits(rows: OutputRows) -> Edits:
    return Edits(rows.rows.contiguous(), **_columns(Edits, rows.params))


def _draws(rows: OutputRows) -> Draws:
    return Draws(rows.rows.contiguous(), **_columns(Draws, rows.params))


def _columns(kind: type[Edits] | type[Draws], params: Params[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: params[name] for name in kind.__slots__ if name != "rows"}


def _past(history: History | None, positions: torch.Tensor) -> Past | None:
    if history is None:
        return None
    common = positions + 1 if history.common is None else history.common
    drafted = None if history.drafted is None else history.drafted.contiguous()
    return Past(history.tokens, history.rows, common.contiguous(), drafted)
