"""What the engine asks of a model, and the ragged batch it hands over. Knows nothing of requests or scheduling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from shared.device.events import Event
from shared.kernel.attention import AttentionInputs, HostLengths
from shared.kv.layout import PlaneSpec
from shared.kv.pool import KVPool


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """A LoRA adapter of this model. `name` is what clients ask for, `digest` its content, which is what is compared."""

    name: str
    digest: str


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Facts about a loaded model. `weights_hash` is part of the node's fingerprint."""

    name: str
    vocab_size: int
    max_context: int
    dtype: str  # "float32" | "bfloat16" | "int" (HashLM)
    weights_hash: str
    eos_ids: tuple[int, ...]
    adapters: tuple[AdapterSpec, ...] = ()
    has_encoder: bool = False  # a prompt's tokens but the last are encoder input; the last begins the decoder's text
    kv_dtype: str = "auto"  # "int8" | "fp8": bytes with a scale per token and head; "auto": as dtype
    weight_dtype: str = "auto"  # "file" | "int8" | "fp8": how products keep their weights; "auto": as dtype
    needs_cpu_seq_lens: bool = False  # its attention plans on the host, with exact lengths; no kernel here does so yet


class LayerMarks:
    """Tells who waits for pages that the KV of a step's first layers is written. events[i] fires after ends[i] of them,
    on the forward stream; made and armed at the step's launch. What comes after the last end needs no mark: it is
    there when the step is."""

    def __init__(self, ends: Sequence[int]) -> None:
        self.ends = tuple(ends)
        self.events = tuple(Event(f"layers {end}") for end in self.ends)

    def reached(self, num_layers: int) -> None:
        """The model's, after so many layers."""
        for end, event in zip(self.ends, self.events, strict=True):
            if end <= num_layers and not event.fired:
                event.fire()

    def reached_all(self) -> None:
        """For models that do not say how far they are."""
        self.reached(self.ends[-1])


@dataclass(slots=True)
class ModelInputs:
    """One ragged step; prefill chunk, mixed, decode and verify are the same shape. T tokens, B rows, E outputs.

        row b owns tokens [cu_q_lens[b], cu_q_lens[b+1]); its token at position p reads KV of positions 0..p and
        writes its own KV at page page_table[b, p // page_size], slot p % page_size, before it reads.

    A verify window may be a tree: siblings have one position, and a KV slot each. Then `slots` and `visible` are there:

        token          b     x     y     z      x and y follow b, z follows x
        slots          9    10    11    12
        positions      9    10    10    11      of the token in the text: rotation, weights, noise
        visible     0001  0011  0101  1011      bit j is the window's j-th slot; -1: all slots up to its own (chunks)

    With an encoder a row's first encoder_lens[b] positions are the encoder's, whose tokens come in one step, together.
    Their KV is what the decoder's cross-attention reads; behind them lies the decoder's own.

    All tensors are on the model's device and were made on the forward stream, which is also the one that reads
    them. Host fields (ints) are upper bounds that never need a sync.
    """

    input_ids: torch.Tensor  # (T,) int64
    positions: torch.Tensor  # (T,) int64
    cu_q_lens: torch.Tensor  # (B+1,) int32
    page_table: torch.Tensor  # (B, P) int32; entries past a row's pages are 0 (page 0 is the sink)
    logits_idx: torch.Tensor  # (E,) int64 indices into T: the tokens whose logits are wanted
    max_q_len: int
    max_seq_len: int  # >= every committed + q_len of this step
    slots: torch.Tensor | None = None  # (T,) int64, the KV slot that each token writes; None: its position
    visible: torch.Tensor | None = None  # (T,) int64, None: -1 everywhere; the highest bit is the token's own
    adapters: torch.Tensor | None = None  # (T,) int64: 0 none, n the n-th of the spec; None: none everywhere
    layers: LayerMarks | None = None  # somebody wants to know how far the forward is; a model may say so, or not
    encoder_lens: torch.Tensor | None = None  # (B,) int64; None: the model has no encoder
    host: HostLengths | None = None  # as AttentionInputs.host

    def for_attention(self) -> AttentionInputs:
        return AttentionInputs(
            self.positions,
            self.cu_q_lens,
            self.page_table,
            self.max_q_len,
            self.max_seq_len,
            self.slots,
            self.visible,
            self.host,
        )


@dataclass(slots=True)
class ModelOutput:
    logits: torch.Tensor  # (E, vocab) float32
    hidden: torch.Tensor  # (E, H) what the logits were made of
    aux: torch.Tensor | None = None  # (T, layers * H) in the dtype: the residual before each captured layer, if asked


class Model(Protocol):
    spec: ModelSpec

    def kv_planes(self, page_size: int) -> tuple[PlaneSpec, ...]:
        """The tensors one page of this model's KV consists of."""
        ...

    def forward(self, inputs: ModelInputs, kv: KVPool) -> ModelOutput:
        """Runs on the forward stream; writes KV of all T tokens, returns logits of the E asked for."""
        ...


@dataclass(slots=True)
class Carried:
    """What a pipeline's stage gives to the next one, fresh tensors that are the receiver's from then on."""

    values: torch.Tensor  # (T, H) float32, the residual with all that the layers so far add; HashLM: (T,) int64 sums
    aux: torch.Tensor | None = None  # as ModelOutput.aux: of the layers so far, None while there are none


class Stage(Protocol):
    """A part of a model's layers, one after another: a pipeline stage. Runs on its own stream."""

    def __call__(self, inputs: ModelInputs, carried: Carried | None, kv: KVPool) -> Carried | ModelOutput:
        """`carried`: what the stage before gave, None for the first. The last one gives the model's output. Writes the
        KV of all T tokens in its layers, and touches no others."""
        ...
