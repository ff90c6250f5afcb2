"""Run a few tokens through the library's layers, and note what each layer asks of attention.

Nothing is attended here. A request that PagedAttention doesn't know becomes a sentence in `problems`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shared.model.library.latents import shape_of_layer
from shared.model.library.layer_places import LayerShape

# Arguments of the whole model that some layers pass on. None changes the weights of attention.
_HARMLESS = (
    "cache_position logits_to_keep output_attentions output_hidden_states output_router_logits position_embeddings "
    "position_ids return_dict use_cache"
)
HARMLESS = frozenset(_HARMLESS.split())
ANY = -2  # a mask that hides no earlier token of the survey: the layer says its window
MaskFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class LayerSurvey:
    """Stands for the attention of a network (`__call__`) and for the maker of its masks (`mask`)."""

    def __init__(self, max_context: int) -> None:
        self._max_context = max_context
        self.called: list[int] = []  # layers, in the order of their calls
        self.layers: list[LayerShape] = []
        self.modules: list[torch.nn.Module] = []  # that called, one for each of `layers`
        self.problems: list[str] = []

    def mask(self, *, q_length: int, kv_length: int, mask_function: MaskFunction, **_: Any) -> torch.Tensor:
        """Return a mask that only says which window the library's own mask has; 0: none.

        So a window is seen that is longer than any prompt of the check. A mask that looks tokens up is asked only
        about the survey's."""
        try:
            window = window_of(mask_function, self._max_context)
        except IndexError:  # it looks tokens up, as those of images do: beyond the survey's there are none
            window = window_of(mask_function, q_length)
            window = ANY if window == 0 else window
        if window is None:
            self.problems.append("a layer's mask is neither causal nor a sliding window")
        return torch.full((1, 1, q_length, kv_length), -1 if window is None else window)

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
        **more: object,
    ) -> tuple[torch.Tensor, None]:
        """Return zeros, (1, T, heads, output_size)."""
        layer = len(self.called)
        window = int(sliding_window or 0)
        window = window if window < self._max_context else 0
        strange = sorted(name for name, given in more.items() if given is not None and name not in HARMLESS)
        strange += ["dropout"] * bool(dropout) + ["is_causal"] * (is_causal is False)
        if strange:
            self.problems.append(f"layer {layer} gives attention {', '.join(strange)}, which Baton doesn't know")
        if attention_mask is not None and not is_mark(attention_mask, window):
            self.problems.append(f"layer {layer} asks for a window of {window} (0: none), but its mask has another")
        self.called.append(getattr(module, "layer_idx", -1))
        self.modules.append(module)
        self.layers.append(shape_of_layer(module, query, key, value, window))
        return query.new_zeros(1, query.shape[2], query.shape[1], self.layers[-1].output_size), None

    def check_layers(self, num_layers: int) -> None:
        """Add a problem unless each layer has called once, in order."""
        if self.called == list(range(num_layers)):
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


def is_mark(mask: torch.Tensor, window: int) -> bool:
    """Return whether `mask` is one of LayerSurvey.mask, with this window. ANY stands for one that hides no token."""
    hides = 0 < window < mask.shape[-1]
    return mask.dtype == torch.int64 and bool(((mask == window) | ((mask == ANY) & (not hides))).all())


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
