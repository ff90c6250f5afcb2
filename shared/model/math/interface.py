"""Define what the engine asks of a model: Model, Stage and the ragged batch ModelInputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Protocol

import torch

from shared.device.events import Event
from shared.kernel.attention.attention import AttentionInputs
from shared.kernel.code.step_layout import Layout
from shared.kv.layout import PlaneSpec
from shared.kv.pool import KVPool


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """A LoRA adapter. Clients use `name`; `digest` identifies the content."""

    name: str
    digest: str


def path_digest(path: str) -> str:
    """Return the digest of HashLM's adapter of this name: it has no files."""
    return f"hashlm {path}"


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """What a model's weights are in its files, and how many bytes they take there and, at most, in memory.

    `mapped_bytes` of these lie in the mapped files themselves, which the system counts as free memory."""

    format: str
    file_bytes: int
    memory_bytes: int
    mapped_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Facts about a loaded model. `weights_hash` enters the node's fingerprint."""

    name: str
    vocab_size: int
    max_context: int
    dtype: str  # "float32" | "bfloat16" | "int" (HashLM)
    weights_hash: str
    eos_ids: tuple[int, ...]
    adapters: tuple[AdapterSpec, ...] = ()
    has_encoder: bool = False  # a prompt's last token begins the decoder's text; the other tokens are the encoder's
    kv_dtype: str = "auto"  # "int8" | "fp8": KV in bytes, with a scale per token and head; "auto": in `dtype`
    weight_dtype: str = "auto"  # of the products, as Formats.weights; "auto": in `dtype`
    stored: StoredWeights | None = None  # None for models without files
    needs_cpu_seq_lens: bool = False  # whether attention needs exact lengths on the host
    has_grouped_experts: bool = False  # whether torch's grouped product runs experts; some GPUs have no kernel for it
    library: str = ""  # the library that runs the layers, and its version; "": Baton does
    tie: float = 0.0  # logits that are nearer may change places with the batch; 0: none do
    short_context: int = 0  # the KV of longer texts is another one, from their first token on; 0: no such bound


class LayerMarks:
    """Signals that a step's first layers have written KV.

    events[i], armed by Engine.launch, fires on the forward stream after ends[i] layers. Layers after the last
    mark are ready when the step ends.
    """

    def __init__(self, ends: Sequence[int]) -> None:
        self.ends = tuple(ends)
        self.events = tuple(Event(f"layers {end}") for end in self.ends)

    def reached(self, num_layers: int) -> None:
        for end, event in zip(self.ends, self.events, strict=True):
            if end <= num_layers and not event.fired:
                event.fire()

    def reached_all(self) -> None:
        """Signal all layers, for models that signal none themselves."""
        self.reached(self.ends[-1])


@dataclass(slots=True)
class ModelInputs:
    """One ragged step of any kind (prefill chunk, mixed, decode, verify): T tokens, B rows, E outputs.

        the layout says which tokens row b owns; its token at position p reads KV of positions 0..p and
        writes its own KV at page page_table[b, p // page_size], slot p % page_size, before it reads.

    In a verify tree siblings share a position, so `slots` and `visible` keep their KV apart:

        token          b     x     y     z      x and y follow b, z follows x
        slots          9    10    11    12
        positions      9    10    10    11      place in the text, for rotation (HashLM: weights) and sampling noise
        visible     0001  0011  0101  1011      bit j: the token reads slot 9 + j, as well as all slots before 9

    Tokens of a chunk have `visible` -1: each reads all slots up to its own.

    The forward stream makes and reads all tensors, on the model's device. The layout's ints are upper bounds and need
    no sync.
    """

    input_ids: torch.Tensor  # (T,) int64
    positions: torch.Tensor  # (T,) int64
    layout: Layout[torch.Tensor]
    logits_idx: torch.Tensor  # (E,) int64 indices into T: the tokens whose logits are wanted
    slots: torch.Tensor | None = None  # (T,) int64, KV slots; None: equal to positions
    visible: torch.Tensor | None = None  # (T,) int64; None: -1 everywhere; the highest bit is the token's own slot
    # (T,) int64; n: the spec's n-th adapter, 0: none; with `short_context` 1: of a longer text; None: all 0
    adapters: torch.Tensor | None = None
    layers: LayerMarks | None = None  # a model may report its progress here

    def for_attention(self) -> AttentionInputs:
        return AttentionInputs(self.positions, self.layout, self.slots, self.visible)

    def per_token(self) -> dict[str, torch.Tensor]:
        """Return the tensors with one element per token."""
        return {name: value for name in PER_TOKEN if (value := getattr(self, name)) is not None}


PER_TOKEN = tuple(
    one.name for one in fields(ModelInputs) if str(one.type).startswith("torch.Tensor") and one.name != "logits_idx"
)


@dataclass(slots=True)
class ModelOutput:
    logits: torch.Tensor  # (E, vocab) float32
    hidden: torch.Tensor  # (E, H), the states from which the logits were made
    aux: torch.Tensor | None = None  # (T, layers * H) in the model's dtype: the residual before each captured layer


class Model(Protocol):
    spec: ModelSpec

    def kv_planes(self, page_size: int) -> tuple[PlaneSpec, ...]: ...

    def forward(self, inputs: ModelInputs, kv: KVPool) -> ModelOutput:
        """Write KV of all T tokens and return the E wanted logits, on the forward stream.

        The caller owns the returned tensors.
        """
        ...


@dataclass(slots=True)
class Carried:
    """A pipeline stage's result, in fresh tensors that the receiver owns."""

    values: torch.Tensor  # (T, H) float32, the residual so far; HashLM: (T,) int64 sums
    aux: torch.Tensor | None = None  # ModelOutput.aux of the layers so far


class Stage(Protocol):
    """Neighbouring layers of a model, on their own stream."""

    def __call__(self, inputs: ModelInputs, carried: Carried | None, kv: KVPool) -> Carried | ModelOutput:
        """Write the stage's KV of all T tokens. The first stage gets no `carried`; the last stage returns the model's
        output."""
        ...
