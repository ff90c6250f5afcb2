"""Compare a LibraryModel's logits with the library's own, before it serves anything.

    ours       three rows in ragged chunks over pages, which cross the borders of pages and of short windows
    the right  the same rows whole, through the library's own "eager" attention
    noise      how far the library's results differ from each other: "eager" whole, "sdpa" whole and in chunks

Rounding differs between all of these. A model that differs by more than MOST_NOISE times the noise is wrong. The
library's chunks take twice the time of all the rest, so they are computed only if the whole rows' noise excuses too
little; ranks always compute them, because all must compute the same.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from transformers import Cache, DynamicCache, PreTrainedModel

from shared.core.errors import ConfigError
from shared.kernel.code.step_layout import HostLengths, Layout
from shared.kv.layout import page_windows
from shared.kv.pool import KVPool
from shared.model.library.long_factors import short_context_of
from shared.model.library.model import LibraryModel, run
from shared.model.library.parts import NetworkParts
from shared.model.math.interface import ModelInputs

PAGE, PAGE_ON_GPU = 8, 16  # kernels are compiled for a page's size: for the usual one, which is served
LENGTHS = (5, 18, 37)  # tokens of the rows; the longest also crosses windows of up to LONGEST_WINDOW
LONGEST_WINDOW = 256  # a longer one, or more chosen tokens, are checked by the survey alone
COMPARED = 16  # about how many tokens are compared in the longest row
FEW = 2  # tokens of a short chunk
MOST_NOISE = 4.0
MOST_BY_CHUNKS = 4.0  # of the noise without them: a library whose cache is wrong must not loosen the bound
BARRED = -1e30  # and less: a logit of a token that the network never says
ONE_ATTENTION = 8.0  # more noise than float32's own is taken for granted where the library has nothing to compare
MOST_NOISE_OF_RANKS = 8.0  # their sums, one part from each rank, round in still another way


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Differences are shares of `largest`, the largest logit."""

    difference: float
    noise: float
    most_noise: float = MOST_NOISE
    largest: float = 0.0

    @property
    def bound(self) -> float:
        return self.most_noise * self.noise

    @property
    def tie(self) -> float:
        """Return how far two logits may be apart and still change places: each may move by the bound."""
        return 2 * self.bound * self.largest

    def __str__(self) -> str:
        return (
            f"its logits differ by {self.difference:.1e} of the largest from the library's own whole forward, whose "
            f"attentions differ by {self.noise:.1e} among themselves; the bound is {self.bound:.1e}"
        )


def check_logits(network: PreTrainedModel, model: LibraryModel, parts: NetworkParts | None = None) -> CheckResult:
    """Raise ConfigError if the model differs. Leave the network with the model's attention.

    If ranks have parts of the network, the right is what each of them computes with the whole."""
    rows = draw_rows(model)
    wanted = compared_positions(len(rows[-1]))
    with torch.inference_mode():
        network.set_attn_implementation("eager")
        own = own_logits(network, rows, wanted)
        noise = noise_of_wholes(network, rows, wanted, own)
        right = own
        if parts is not None:
            network.set_attn_implementation("eager")
            with parts.whole():
                right = own_logits(network, rows, wanted)
        model.attach()
        most = MOST_NOISE if parts is None else MOST_NOISE_OF_RANKS
        found = difference(paged_logits(model, rows, wanted), right, network.dtype)
        result = CheckResult(found, noise, most, float(right.abs().max()))
        if parts is not None or not result.difference <= result.bound:
            use_other_attention(network)
            chunked = difference(chunked_logits(network, rows, wanted), own, network.dtype)
            result = replace(result, noise=max(noise, min(chunked, MOST_BY_CHUNKS * noise)))
            model.attach()
    if not result.difference <= result.bound:  # also if it is NaN
        raise ConfigError(f"{model.spec.name}: {result}")
    return result


def bytes_difference(exact: LibraryModel, rounded: LibraryModel) -> float:
    """Return how far logits are apart with KV in bytes, as a share of the largest. Raise ConfigError if they are NaN.

    Leave the network with the attention of `rounded`."""
    rows = draw_rows(exact)
    wanted = compared_positions(len(rows[-1]))
    with torch.inference_mode():
        exact.attach()
        right = paged_logits(exact, rows, wanted)
        rounded.attach()
        found = difference(paged_logits(rounded, rows, wanted), right, torch.float32)
    if not found < float("inf"):
        raise ConfigError(f"{exact.spec.name}: with KV in {rounded.spec.kv_dtype} its logits are not numbers")
    return found


def draw_rows(model: LibraryModel) -> list[torch.Tensor]:
    reaches = [reach for layer in model.layers for reach in (layer.window, layer.num_chosen)]
    reaches = [reach for reach in (0, *reaches, model.spec.short_context) if reach <= LONGEST_WINDOW]
    lengths = (*LENGTHS[:-1], LENGTHS[-1] + max(reaches))
    draw = torch.Generator().manual_seed(1)
    return [
        torch.randint(0, model.spec.vocab_size, (min(length, model.spec.max_context),), generator=draw)
        for length in lengths
    ]


def compared_positions(longest: int) -> torch.Tensor:
    """Return about half of them behind the first token that a window hides from."""
    spread = {1, *range(0, longest, -(-longest // COMPARED)), *range(longest - 1, longest - LENGTHS[-1], -3)}
    ends = (length - 1 for length in LENGTHS)
    return torch.tensor(sorted(position for position in {*spread, *ends} if 0 <= position < longest))


def difference(ours: torch.Tensor, right: torch.Tensor, dtype: torch.dtype) -> float:
    """Return the largest difference, as a share of the largest logit.

    In bfloat16 a tenth of the tokens doesn't count: rounding may give a token other experts than the library's."""
    by_token = (ours - right).abs().amax(dim=1) / right.abs().max()
    return float(by_token.quantile(1.0 if dtype == torch.float32 else 0.9))


def own_logits(network: PreTrainedModel, rows: Sequence[torch.Tensor], wanted: torch.Tensor) -> torch.Tensor:
    """Return the library's logits of the wanted tokens, row by row. No token sees the padding behind its row.

    Rows beyond the short context run apart: the library would compute the others like them."""
    shorter = [row for row in rows if len(row) <= short_context_of(network.config)]  # they come first
    if 0 < len(shorter) < len(rows):
        parts = shorter, rows[len(shorter) :]
        return torch.cat([own_logits(network, part, wanted[wanted < len(part[-1])]) for part in parts])
    ids = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    logits = host_logits(network, ids, positions, wanted)
    return torch.cat([one[wanted < len(row)] for one, row in zip(logits, rows, strict=True)])


def use_other_attention(network: PreTrainedModel) -> bool:
    """Return whether the library has another attention than "eager" for the network."""
    network.set_attn_implementation("eager")
    try:
        network.set_attn_implementation("sdpa")
    except ValueError:
        return False
    return True


def noise_of_wholes(
    network: PreTrainedModel, rows: Sequence[torch.Tensor], wanted: torch.Tensor, right: torch.Tensor
) -> float:
    """Return how far the library's other attention is from `right`."""
    has_other = use_other_attention(network)
    least = least_noise(network.dtype, has_other)
    return max(least, difference(own_logits(network, rows, wanted), right, network.dtype)) if has_other else least


def least_noise(dtype: torch.dtype, has_other: bool) -> float:
    """Return the noise that is taken for granted. `has_other`: whether two attentions of the library are compared."""
    return 2 * torch.finfo(dtype).eps * (1.0 if has_other or dtype != torch.float32 else ONE_ATTENTION)


def chunked_logits(network: PreTrainedModel, rows: Sequence[torch.Tensor], wanted: torch.Tensor) -> torch.Tensor:
    """Return the same as `own_logits`, in chunks by the library's own cache: few tokens at a row's begin and end.

    Where the network divides by small numbers, one token's error can be ten times the others'. Whether it shows depends
    on how a product is rounded, and products of few tokens are rounded in another way than those of whole rows. A row
    beyond the short context stays whole: the library would compute its first chunk as a shorter text."""
    found = []
    for row in rows:
        cache = DynamicCache(config=network.config)
        few = 0 if 0 < short_context_of(network.config) < len(row) else FEW
        bounds = sorted({0, min(few, len(row)), max(0, len(row) - few), len(row)})
        for begin, end in itertools.pairwise(bounds):
            own = wanted[(wanted >= begin) & (wanted < end)] - begin
            logits = host_logits(network, row[None, begin:end], torch.arange(begin, end)[None], own, cache)[0]
            found.append(logits)
    return torch.cat(found)


def host_logits(
    network: PreTrainedModel,
    ids: torch.Tensor,
    positions: torch.Tensor,
    wanted: torch.Tensor,
    cache: Cache | None = None,
) -> torch.Tensor:
    """Return what `run` returns, in host memory, where its arguments may be, too."""
    ids, positions, wanted = (one.to(network.device) for one in (ids, positions, wanted))
    return without_barred(run(network, ids, positions, wanted, cache).cpu())


def without_barred(logits: torch.Tensor) -> torch.Tensor:
    """Return zeros for tokens that a network never says (Chameleon's images): their logits would be the largest."""
    return logits.masked_fill(logits < BARRED, 0)


def paged_logits(
    model: LibraryModel, rows: Sequence[torch.Tensor], wanted: torch.Tensor, unwritten: float = float("nan")
) -> torch.Tensor:
    """Return the same as `own_logits`, by steps over pages. `unwritten`: what pages hold at first."""
    page = PAGE if model.device.type == "cpu" else PAGE_ON_GPU
    most, planes = -(-max(map(len, rows)) // page), model.kv_planes(page)
    shape = (len(page_windows(planes)), len(rows), most)
    num_pages = math.prod(shape)
    tables = 1 + torch.randperm(num_pages, generator=torch.Generator().manual_seed(2)).view(shape)
    pool = KVPool(planes, 1 + num_pages, page, model.device)
    for plane in pool.planes:
        filled = pool.plane(plane.name)
        filled.fill_(unwritten if filled.dtype.is_floating_point else 0)
    found: list[list[torch.Tensor]] = [[] for _ in rows]
    for parts in ragged_steps([len(row) for row in rows]):
        inputs, owners = step_inputs(rows, tables.int(), parts, wanted, model)
        for owner, logits in zip(owners, without_barred(model.forward(inputs, pool).logits.cpu()), strict=True):
            found[owner].append(logits)
    pool.close()
    return torch.stack([logits for row in found for logits in row])


def ragged_steps(lengths: Sequence[int]) -> Iterator[dict[int, tuple[int, int]]]:
    """Yield each step's (begin, end) of the rows that take part.

    Each row starts one step later than the one before. At last all rows decode two tokens together."""
    bounds = [np.cumsum([0, n // 2, 1, n - n // 2 - 3, 1, 1]).tolist() for n in lengths]
    num_apart = len(bounds[0]) - 3
    parts = [{row: step - row for row in range(len(lengths))} for step in range(len(lengths) + num_apart - 1)]
    together = [dict.fromkeys(range(len(lengths)), part) for part in (num_apart, num_apart + 1)]
    for step in [{row: part for row, part in step.items() if 0 <= part < num_apart} for step in parts] + together:
        found = {row: (bounds[row][part], bounds[row][part + 1]) for row, part in step.items()}
        yield {row: (begin, end) for row, (begin, end) in found.items() if begin < end}


def step_inputs(
    rows: Sequence[torch.Tensor],
    tables: torch.Tensor,
    parts: dict[int, tuple[int, int]],
    wanted: torch.Tensor,
    model: LibraryModel,
) -> tuple[ModelInputs, list[int]]:
    """Return the inputs, and the row of each wanted token. The host knows exact lengths if the model needs them.

    tables: (page groups, rows, pages) int32."""
    begins, ends = zip(*parts.values(), strict=True)
    bounds = np.cumsum([0, *(end - begin for begin, end in parts.values())]).astype(np.int32)
    positions = torch.cat([torch.arange(begin, end) for begin, end in parts.values()])
    owners = [row for row, (begin, end) in parts.items() for _ in range(begin, end)]
    idx = torch.isin(positions, wanted).nonzero().flatten()
    layout = Layout(
        cu_q_lens=torch.from_numpy(bounds),
        page_tables=tuple(table[list(parts)] for table in tables),
        max_q_len=int(np.diff(bounds).max()),
        max_seq_len=max(ends),
        host=HostLengths(bounds, np.asarray(begins, np.int64) if model.spec.needs_cpu_seq_lens else None, 0),
    )
    device = model.device
    layout = layout.with_arrays({name: array.to(device) for name, array in layout.arrays().items()})
    ids = torch.cat([rows[row][begin:end] for row, (begin, end) in parts.items()])
    is_long = torch.tensor([0 < model.spec.short_context < len(rows[row]) for row in owners], dtype=torch.int64)
    adapters = is_long.to(device) if model.spec.short_context else None
    inputs = ModelInputs(ids.to(device), positions.to(device), layout, idx.to(device), adapters=adapters)
    return inputs, [owners[index] for index in idx.tolist()]
