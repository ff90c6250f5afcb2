"""Run a few tokens through the library's layers, and note what each layer asks of attention.

Nothing is attended here. A request that PagedAttention doesn't know becomes a sentence in `problems`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from shared.model.library.attend.indexer import Indexer
from shared.model.library.attend.latents import shape_of_layer
from shared.model.library.attend.layer_places import IndexKey, LayerShape

# Arguments of the whole model that some layers pass on. None changes the weights of attention.
_HARMLESS = (
    "cache_position logits_to_keep output_attentions output_hidden_states output_router_logits position_embeddings "
    "position_ids return_dict use_cache"
)
HARMLESS = frozenset(_HARMLESS.split())
ANY = 1 << 62  # a mask that hides no earlier token of the survey: the layer says its window
MaskFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class LayerSurvey:
    """Stands for the attention of a network (`__call__`) and for the maker of its masks (`mask`)."""

    offsets = 0  # of PagedAttention

    def __init__(self, max_context: int) -> None:
        self._max_context = max_context
        self.called: list[int] = []  # layers, in the order of their calls
        self.layers: list[LayerShape] = []
        self.modules: list[torch.nn.Module] = []  # that called, one for each of `layers`
        self.problems: list[str] = []
        self._index: dict[int, IndexKey] = {}  # by layer
        self._latest: tuple[torch.Tensor, int] | None = None  # what stands for the last choice, and its size

    def mask(
        self,
        *,
        q_length: int,
        kv_length: int,
        mask_function: MaskFunction,
        device: torch.device | str = "cpu",
        **_: Any,
    ) -> torch.Tensor:
        """Return a mask that only says which window the library's own mask has; 0: none; less: the size of chunks.

        So a window is seen that is longer than any prompt of the check. A mask that looks tokens up is asked only
        about the survey's."""
        # a mask of chunks reads a tensor there
        with torch.device(device), _WithinBounds():
            try:
                window = window_of(mask_function, self._max_context)
                chunk = 0 if window is not None else chunk_of(mask_function, self._max_context)
            except IndexError:  # it looks tokens up, as those of images do: beyond the survey's there are none
                window, chunk = window_of(mask_function, q_length), 0
                window = ANY if window == 0 else window
        if window is None and not chunk:
            self.problems.append("a layer's mask is neither causal nor a sliding window, nor chunks")
        return torch.full((1, 1, q_length, kv_length), window or -chunk)

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        dropout: float = 0.0,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        is_causal: bool | None = None,
        indices: torch.Tensor | None = None,
        **more: object,
    ) -> tuple[torch.Tensor, None]:
        """Return zeros, (1, T, heads, output_size). `indices`: what an indexer chose."""
        layer = len(self.called)
        window = int(sliding_window or 0)
        window = window if window < self._max_context else 0
        chunk = chunk_of_mark(attention_mask)
        strange = sorted(name for name, given in more.items() if given is not None and name not in HARMLESS)
        strange += ["dropout"] * bool(dropout) + ["is_causal"] * (is_causal is False)
        if strange:
            self.problems.append(f"layer {layer} gives attention {', '.join(strange)}, which Baton doesn't know")
        asked = window or -chunk
        if attention_mask is not None and not is_mark(attention_mask, asked):
            self.problems.append(f"layer {layer} asks for a window of {window} (0: none), but its mask has another")
        self.called.append(getattr(module, "layer_idx", -1))
        self.modules.append(module)
        shape = replace(shape_of_layer(module, query, key, value, window or chunk), in_chunks=bool(chunk))
        if indices is not None:
            own = self._index.get(self.called[-1])
            shape = replace(shape, num_chosen=self._num_chosen(layer, indices, shape.window), index=own)
        self.layers.append(shape)
        return query.new_zeros(1, query.shape[2], query.shape[1], self.layers[-1].output_size), None

    def choose(self, indexer: Indexer, given: Mapping[str, Any]) -> torch.Tensor:
        """Note what the indexer keeps, and return what stands for its choice."""
        hidden = given["hidden_states"]
        own: list[torch.Tensor] = []

        def take(keys: torch.Tensor) -> torch.Tensor:
            own.append(keys)
            return keys

        scores = indexer.scores(given, hidden.new_zeros(1, hidden.shape[1], hidden.shape[1]), take)
        if scores is None or len(own) != 1:
            self.problems.append(f"layer {indexer.layer} has an indexer that Baton doesn't know")
        else:
            self._index[indexer.layer] = IndexKey(own[0].shape[-1], own[0].dtype)
        if len(set(self._index.values())) > 1:
            self.problems.append("the keys of its indexers differ in size")
        self._latest = torch.empty(0), indexer.num_chosen
        return self._latest[0]

    def _num_chosen(self, layer: int, indices: torch.Tensor, window: int) -> int:
        if window or self._latest is None or indices is not self._latest[0]:
            self.problems.append(f"layer {layer} reads tokens that were chosen in a way that Baton doesn't know")
            return 0
        return self._latest[1]

    def check_layers(self, num_layers: int) -> None:
        """Add a problem unless each layer has called."""
        if {*self.called} == {*range(num_layers)}:
            return
        silent = sorted({*range(num_layers)} - {*self.called})
        if silent:
            listed = ", ".join(map(str, silent[:8])) + ", ..." * (len(silent) > 8)
            self.problems.append(
                f"{len(silent)} of {num_layers} layers ({listed}) do not call attention: "
                "they keep a state, which pages can't hold, or attend in a way of their own"
            )
        else:
            self.problems.append(f"its {num_layers} layers call attention in the order {self.called}")


class _WithinBounds(TorchFunctionMode):
    """Raises IndexError where a tensor is asked for an entry beyond its end. A GPU says so later, and is lost."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__getitem__:
            tensor, asked = args
            for size, one in zip(tensor.shape, asked if isinstance(asked, tuple) else (asked,), strict=False):
                if isinstance(one, torch.Tensor) and not one.is_floating_point() and int(one.max()) >= size:
                    raise IndexError(f"entry {int(one.max())} of {size}")
        return func(*args, **(kwargs or {}))


def is_mark(mask: torch.Tensor, window: int) -> bool:
    """Return whether `mask` is one of LayerSurvey.mask, with this window. ANY stands for one that hides no token."""
    hides = 0 < window < mask.shape[-1]
    return mask.dtype == torch.int64 and bool(((mask == window) | ((mask == ANY) & (not hides))).all())


def chunk_of_mark(mask: torch.Tensor | None) -> int:
    """Return the size of the chunks that one of LayerSurvey.mask says; 0: none."""
    return max(0, -int(mask.flatten()[0])) if mask is not None and mask.dtype == torch.int64 else 0


def window_of(mask_function: MaskFunction, max_context: int) -> int | None:
    """Return the window of a mask; 0 if it hides no earlier token; None for another kind of mask.

    The two last queries tell a window, which moves with them, from chunks, which don't."""
    query = torch.arange(max_context - 2, max_context)[:, None]
    key = torch.arange(max_context)[None]
    zero = torch.zeros((), dtype=torch.int64)
    seen = mask_function(zero, zero, query, key).expand(2, max_context)
    window = int(seen[1].sum())
    if not torch.equal(seen, (key <= query) & (key > query - window)):
        return None
    return window if window < max_context else 0


def chunk_of(mask_function: MaskFunction, max_context: int) -> int:
    """Return the size of the chunks whose tokens read each other; 0 for another kind of mask.

    The last query tells where a chunk begins, and the query before it where the one before does."""
    zero, key = torch.zeros((), dtype=torch.int64), torch.arange(max_context)

    def seen_by(*queries: int) -> torch.Tensor:
        query = torch.tensor(queries)[:, None]
        return mask_function(zero, zero, query, key[None]).expand(len(queries), max_context)

    last = max_context - 1
    begin = int(seen_by(last)[0].int().argmax())
    chunk = begin - int(seen_by(begin - 1)[0].int().argmax()) if begin else 0
    if not chunk:
        return 0
    queries = (0, chunk - 1, chunk, begin - 1, begin, last)
    query = torch.tensor(queries)[:, None]
    right = (key <= query) & (key // chunk == query // chunk)
    return chunk if torch.equal(seen_by(*queries), right) else 0
