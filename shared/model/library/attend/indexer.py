"""The indexer of sparse attention: which tokens of a row a query reads (DeepSeek-V3.2, arXiv 2512.02556, section 2).

    a token in pages    one more vector, the key of the layer's own indexer, in a plane beside keys and values
    score of a token    what the library's own code computes, of the index keys of all tokens that the query may read
    chosen              the k tokens with the highest scores; of equal scores, those of the lower positions

Layers without an own indexer read what the last one before them chose. The library leaves open which of equal scores
its `topk` takes. So it never chooses: what it would choose from is taken out of its call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad
from torch.overrides import TorchFunctionMode
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from shared.kernel.attention.attention import MOST_NUMBERS
from shared.kv.pool import KVPool
from shared.model.library.attend.latents import OWN, Pair
from shared.model.library.attend.layer_pages import PagesOfIndex, ReadKeys
from shared.model.library.attend.layer_places import ModelPlaces
from shared.model.library.attend.step_rows import StepRows

MASK, CACHE = "attention_mask", "cache"  # arguments of an indexer's forward, which others take the place of
NO_MASK = torch.empty(1, 1, 0, 0)  # (B, heads, Q, num)
TakeKeys = Callable[[torch.Tensor], torch.Tensor]


def keep_index(network: nn.Module) -> None:
    """Let indexers ask Baton's attentions (by their `choose`) instead of the library's cache."""
    for module in network.modules():
        if hasattr(module, "index_topk") and hasattr(module, "n_heads"):
            signature = inspect.signature(module.forward)
            if signature.parameters.keys() >= {MASK, CACHE}:
                Indexer(module, signature)


class Indexer:
    """An indexer module of the library, whose `forward` this object stands for."""

    def __init__(self, module: Any, signature: inspect.Signature) -> None:
        self._module, self._forward, self._signature = module, module.forward, signature
        self.layer: int = module.layer_idx
        self.num_heads: int = module.n_heads
        self.num_chosen: int = module.index_topk  # of a query's tokens, if it may read more
        module.forward = self._choose

    def _choose(self, *args: Any, **named: Any) -> torch.Tensor:
        name = self._module.config._attn_implementation
        if not name.startswith(OWN):
            indices: torch.Tensor = self._forward(*args, **named)
            return indices
        given = self._signature.bind(*args, **named).arguments
        mark: torch.Tensor = ALL_ATTENTION_FUNCTIONS[name].choose(self, given)
        return mark

    def scores(self, given: Mapping[str, Any], hidden: torch.Tensor, take_keys: TakeKeys) -> torch.Tensor | None:
        """Return (B, Q, num) float32; None if the module doesn't choose by `topk`.

        given: the other arguments of `forward`, of B rows of Q tokens. hidden (B, Q, num): is added to scores.
        take_keys: gets the tokens' own keys (B, Q, size), and returns those to be scored, (B, num, size)."""
        found = _Scores()
        with found:
            self._forward(**{**given, MASK: hidden, CACHE: _Keys(take_keys)})
        return found.scores


class _Keys:
    """Stands for the library's cache."""

    def __init__(self, take_keys: TakeKeys) -> None:
        self._take_keys = take_keys

    def update_indexer(self, keys: torch.Tensor, layer: int) -> torch.Tensor:
        return self._take_keys(keys)


class _Scores(TorchFunctionMode):
    """Keeps what `topk` should choose from, and lets it choose nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.scores: torch.Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.topk or func is torch.topk:
            self.scores = args[0]
            return func(args[0][..., :0], 0)
        return func(*args, **(kwargs or {}))


class ChosenKeys:
    """What the rows of one step read, as the last indexer chose."""

    def __init__(self, places: ModelPlaces, kv: KVPool, has_bytes: bool) -> None:
        self._keys = kv.plane(places.index_name)
        self._scales = kv.plane(places.index_scales_name) if has_bytes else None
        self._found: dict[int, ReadKeys] = {}  # by the number of the first row
        self.mark = torch.empty(0)

    def keys_of(self, rows: StepRows) -> ReadKeys:
        return self._found[rows.first]

    def choose(
        self,
        indexer: Indexer,
        slot: int,
        given: Mapping[str, Any],
        rows: Sequence[StepRows],
        places: Pair,
        find_keys: Callable[[StepRows], ReadKeys],
    ) -> None:
        """`slot`: of ModelPlaces.index_slots. `given`: of PagedAttention.choose. `places`: pages, slots, (T,) int64."""
        pages = PagesOfIndex(self._keys[:, slot], None if self._scales is None else self._scales[:, slot])
        arguments = {name: value for name, value in given.items() if name not in (MASK, CACHE)}
        for joined in rows:
            keys, kept = find_keys(joined), []
            for part in joined.split(MOST_NUMBERS // (keys.num * indexer.num_heads)):
                own = keys if part == joined else find_keys(part)
                page, slots = (one[part.start : part.stop] for one in places)
                found = choose_keys(indexer, part_of(arguments, part), own, pages, (page, slots))
                kept.append(pad(found, (0, keys.num - own.num)))
            few = keys.num <= indexer.num_chosen
            self._found[joined.first] = keys if few else keys.only(torch.cat(kept, dim=1), indexer.num_chosen)


def choose_keys(
    indexer: Indexer, given: Mapping[str, Any], keys: ReadKeys, pages: PagesOfIndex, places: Pair
) -> torch.Tensor:
    """Write the rows' index keys, and return which of `keys` their queries read, (B, Q, num) bool.

    given: arguments of these rows. places: of the tokens, (B * Q,) each. Few keys are all read, without scores."""
    tokens: torch.Tensor = given["hidden_states"]
    has_scores = keys.num > indexer.num_chosen

    def take(new: torch.Tensor) -> torch.Tensor:
        pages.write(*places, new.flatten(0, 1))
        return pages.read(keys, new.dtype) if has_scores else new[:, :0]

    hidden = tokens.new_zeros(1, 1, 1) if keys.mask is None else keys.mask[:, 0]
    scores = indexer.scores(given, hidden if has_scores else hidden[..., :0], take)
    if not has_scores or scores is None:
        return torch.ones(*tokens.shape[:2], keys.num, dtype=torch.bool, device=tokens.device)
    return best_of(scores, indexer.num_chosen)


def part_of(given: Mapping[str, Any], rows: StepRows) -> dict[str, Any]:
    """Return the arguments of B rows of Q tokens, (B, Q, ...). given: of all tokens, (1, T, ...), or tuples, or
    positions of several axes, (A, 1, T)."""

    def part(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and len(value) > 1:
            return torch.stack([part(axis) for axis in value])
        if isinstance(value, torch.Tensor):
            return value[0, rows.start : rows.stop].unflatten(0, (len(rows.lengths), -1))
        return tuple(map(part, value)) if isinstance(value, tuple) else value

    return {name: part(value) for name, value in given.items()}


def best_of(scores: torch.Tensor, num: int) -> torch.Tensor:
    """(..., n) -> (..., n) bool, of which `num` < n are True: the highest scores, and of equal ones the first."""
    least = scores.topk(num).values[..., -1:]
    above, equal = scores > least, scores == least
    room = num - above.sum(dim=-1, keepdim=True)
    return above | (equal & (equal.cumsum(dim=-1, dtype=torch.int32) <= room))
