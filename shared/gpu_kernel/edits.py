"""Apply penalties, bias and masks to the logits of E outputs, in two kernels.

    mark    history, drafts, stop ids, allowed ids, bad words --> marks: flags and a count per (output, id)
    edit    logits, marks, bias, grammar's bits               --> edited logits

Programs add integers and set bits, so their order changes no result.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
import triton
import triton.language as tl

from shared.core.sampling_params import PENALTIES
from shared.gpu_kernel.launch.launcher import launch, recorded
from shared.gpu_kernel.launch.real_models import REAL_MODELS
from shared.gpu_kernel.launch.signatures import REAL_BATCH, REAL_CONTEXT, Signature
from shared.gpu_kernel.ranks import BLOCK
from shared.kernel.sampling import sample_constants

EXACT = True  # see noise.py
IN_PROMPT = tl.constexpr(1 << 30)  # a mark (int32): flags in the high bits, a count in the low ones
STOPS_EARLY = tl.constexpr(1 << 29)
IS_ALLOWED = tl.constexpr(1 << 28)
IS_BAD = tl.constexpr(1 << 27)
COUNT = tl.constexpr((1 << 27) - 1)  # mask of the count: uses in the answer and its drafts
BARRED = tl.constexpr(float(sample_constants.BARRED))

PROGRAMS = tl.constexpr(8)  # programs per output
ENTRIES = tl.constexpr(256)  # list entries that a program reads at a time
DRAFTS = tl.constexpr(64)  # the most drafts in a window


@dataclass(frozen=True, slots=True)
class Edits:
    """Parameters of E outputs' edits: device tensors, int64 unless noted. See shared/sample/params.py.

    It has many fields because a kernel takes tensors only.
    """

    rows: torch.Tensor  # (E,)
    is_penalised: torch.Tensor  # (B,)
    repetition_penalty: torch.Tensor  # (B,) float32
    presence_penalty: torch.Tensor  # (B,) float32
    frequency_penalty: torch.Tensor  # (B,) float32
    prompt_lens: torch.Tensor  # (B,)
    first_stop: torch.Tensor  # (B,)
    stop_ids: torch.Tensor
    stop_ends: torch.Tensor
    bias_ids: torch.Tensor
    bias_values: torch.Tensor  # float32
    bias_ends: torch.Tensor
    is_limited: torch.Tensor  # (B,)
    allowed_ids: torch.Tensor
    allowed_ends: torch.Tensor
    bad_ids: torch.Tensor
    bad_before: torch.Tensor  # (words, longest - 1): ids before a word's last one, padded with -1 on the left
    bad_ends: torch.Tensor


@dataclass(frozen=True, slots=True)
class Past:
    """The tokens before each output. See shared/sample/interface.py's History."""

    tokens: torch.Tensor  # (rows, max_context) int32
    rows: torch.Tensor  # (B,) int64
    common: torch.Tensor  # (E,) int64
    drafted: torch.Tensor | None  # (E, N) int32


@triton.jit
def _mark_tokens(words, tokens, is_wanted, is_output, vocab_size):
    is_wanted = is_wanted & (tokens >= 0) & (tokens < vocab_size)
    tl.atomic_add(words + tokens, 1, mask=is_wanted & is_output)
    tl.atomic_or(words + tokens, IN_PROMPT, mask=is_wanted & (is_output == 0))


@triton.jit
def _last_token(tokens, drafts, nth, common, prompt_len):
    """Return the answer's nth token from its end, drafts included, or -1 if the answer is shorter."""
    is_draft = drafts >= 0
    num_drafts = tl.sum(is_draft.to(tl.int32), 0)
    from_end = num_drafts - tl.cumsum(is_draft.to(tl.int32), 0) + 1
    drafted = tl.sum(tl.where(is_draft & (from_end == nth), drafts, 0), 0)
    place = common - (nth - num_drafts)
    emitted = tl.load(tokens + place, mask=(nth > num_drafts) & (place >= prompt_len) & (place >= 0), other=-1)
    return tl.where(nth <= num_drafts, drafted, emitted)


@triton.jit(do_not_specialize=["context_len", "num_drafted", "num_before"])
def mark_kernel(
    marks, rows, positions, history, history_rows, common, drafted, is_penalised, prompt_lens, first_stop,
    stop_ids, stop_ends, allowed_ids, allowed_ends, bad_ids, bad_before, bad_ends,
    vocab_size, context_len, num_drafted, num_before,
):  # fmt: skip
    """Program (e, p) reads part p of output e's lists, and adds their marks to marks[e, :] (int32, zeroed)."""
    output, program = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows + output)
    words = marks + output.to(tl.int64) * vocab_size
    entries = tl.arange(0, ENTRIES)
    prompt_len, counted = tl.load(prompt_lens + row), tl.load(common + output)
    slots = tl.arange(0, DRAFTS)
    drafts = tl.load(drafted + output.to(tl.int64) * num_drafted + slots, mask=slots < num_drafted, other=-1)
    begin, end = tl.load(bad_ends + row), tl.load(bad_ends + row + 1)
    is_read = (tl.load(is_penalised + row) != 0) | ((num_before > 0) & (begin < end))
    tokens = history + tl.load(history_rows + row, mask=is_read, other=0) * context_len

    if tl.load(is_penalised + row) != 0:
        for start in range(program * ENTRIES, counted, PROGRAMS * ENTRIES):
            places = start + entries
            found = tl.load(tokens + places, mask=places < counted, other=-1)
            _mark_tokens(words, found, places < counted, places >= prompt_len, vocab_size)
        if program == 0:
            _mark_tokens(words, drafts, slots < num_drafted, slots >= 0, vocab_size)

    for start in range(begin + program * ENTRIES, end, PROGRAMS * ENTRIES):
        word = start + entries
        is_next = word < end
        for nth in range(1, num_before + 1):
            wanted = tl.load(bad_before + word * num_before + (num_before - nth), mask=word < end, other=-1)
            is_next = is_next & ((wanted < 0) | (wanted == _last_token(tokens, drafts, nth, counted, prompt_len)))
        tl.atomic_or(words + tl.load(bad_ids + word, mask=word < end, other=0), IS_BAD, mask=is_next)

    if tl.load(positions + output) + 1 < tl.load(first_stop + row):
        end = tl.load(stop_ends + row + 1)
        for start in range(tl.load(stop_ends + row) + program * ENTRIES, end, PROGRAMS * ENTRIES):
            ids = tl.load(stop_ids + start + entries, mask=start + entries < end, other=0)
            tl.atomic_or(words + ids, STOPS_EARLY, mask=start + entries < end)

    end = tl.load(allowed_ends + row + 1)
    for start in range(tl.load(allowed_ends + row) + program * ENTRIES, end, PROGRAMS * ENTRIES):
        ids = tl.load(allowed_ids + start + entries, mask=start + entries < end, other=0)
        tl.atomic_or(words + ids, IS_ALLOWED, mask=start + entries < end)


@triton.jit(do_not_specialize=["mask_words"])
def edit_kernel(
    logits, marks, edited, rows, repetition, presence, frequency, bias_ids, bias_values, bias_ends, is_limited,
    mask_rows, mask_bits, stride, vocab_size, mask_words, HAS_MASKS: tl.constexpr,
):  # fmt: skip
    output = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = ids < vocab_size
    row = tl.load(rows + output)
    values = tl.load(logits + output * stride + ids, mask=inside, other=0.0)
    marked = tl.load(marks + output * vocab_size + ids, mask=inside, other=0)

    count, rate = marked & COUNT, tl.load(repetition + row)
    repeated = tl.where(values > 0.0, tl.math.div_rn(values, rate), values * rate)
    # with a rate of 1, values stay the same, bit for bit
    values = tl.where((marked & (COUNT | IN_PROMPT)) != 0, repeated, values)
    per_use = tl.load(frequency + row) * count.to(tl.float32)
    values = tl.where(count > 0, values - (per_use + tl.load(presence + row)), values)

    for entry in range(tl.load(bias_ends + row), tl.load(bias_ends + row + 1)):
        values = tl.where(ids == tl.load(bias_ids + entry), values + tl.load(bias_values + entry), values)

    values = tl.where((marked & STOPS_EARLY) != 0, BARRED, values)
    is_left = (tl.load(is_limited + row) == 0) | ((marked & IS_ALLOWED) != 0)
    if HAS_MASKS:
        mask_row = tl.load(mask_rows + output)
        bits = tl.load(mask_bits + mask_row * mask_words + (ids >> 5), mask=inside & (mask_row >= 0), other=-1)
        is_left = is_left & (((bits >> (ids & 31)) & 1) != 0)
    values = tl.where(is_left, values, float("-inf"))
    values = tl.where(((marked & IS_BAD) != 0) & (values > float("-inf")), BARRED, values)
    tl.store(edited + output * vocab_size + ids, values, mask=inside)


def edit_logits(
    logits: torch.Tensor,
    positions: torch.Tensor,
    edits: Edits,
    past: Past | None,
    masks: tuple[torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:
    """Return edited logits (E, vocab) float32, equal to `sampler_torch`'s, bit for bit.

    logits: (E, vocab) float32, rows of any stride. positions: (E,) int64. `past` may be None if no row is penalised or
    has bad words of several tokens. `masks`: rows (E,) int64 and bits (M, words) int32. rows[e] is output e's row of
    the bits; -1 means no mask."""
    num, vocab_size = logits.shape
    marks = torch.zeros((num, vocab_size), dtype=torch.int32, device=logits.device)
    edited = torch.empty((num, vocab_size), dtype=torch.float32, device=logits.device)
    none = marks  # never read
    tokens, history_rows, common, drafted = none, positions, positions, None
    if past is not None:
        tokens, history_rows, common, drafted = past.tokens, past.rows, past.common, past.drafted
    launch(
        mark_kernel, (num, PROGRAMS.value), marks, edits.rows, positions, tokens, history_rows, common,
        none if drafted is None else drafted, edits.is_penalised, edits.prompt_lens, edits.first_stop,
        edits.stop_ids, edits.stop_ends, edits.allowed_ids, edits.allowed_ends,
        edits.bad_ids, edits.bad_before, edits.bad_ends,
        vocab_size, tokens.shape[1], 0 if drafted is None else drafted.shape[1], edits.bad_before.shape[1],
    )  # fmt: skip
    mask_rows, bits = (positions, none) if masks is None else masks
    launch(
        edit_kernel, (num, triton.cdiv(vocab_size, BLOCK.value)), logits, marks, edited, edits.rows,
        edits.repetition_penalty, edits.presence_penalty, edits.frequency_penalty,
        edits.bias_ids, edits.bias_values, edits.bias_ends, edits.is_limited, mask_rows, bits,
        logits.stride(0), vocab_size, bits.shape[1], HAS_MASKS=masks is not None,
    )  # fmt: skip
    return edited


def real_signatures() -> set[Signature]:
    with recorded() as signatures:
        integers, floats = torch.empty(REAL_BATCH, dtype=torch.int64, device="meta"), torch.empty(1, device="meta")
        words = torch.empty(REAL_BATCH, 4, dtype=torch.int32, device="meta")
        columns = {one.name: integers for one in fields(Edits)} | {
            name: floats for name in (*(one.array for one in PENALTIES), "bias_values")
        }
        edits = Edits(**columns | {"bad_before": torch.empty(3, 5, dtype=torch.int64, device="meta")})
        tokens = torch.empty(REAL_BATCH, REAL_CONTEXT, dtype=torch.int32, device="meta")
        for model in REAL_MODELS:
            logits = torch.empty(REAL_BATCH, model.vocab_size, device="meta")
            for past in (None, Past(tokens, integers, integers, None), Past(tokens, integers, integers, words)):
                for masks in (None, (integers, words)):
                    edit_logits(logits, integers, edits, past, masks)
    return signatures
