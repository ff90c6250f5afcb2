"""A cluster's layout: numbers of nodes, their cores and settings. Values only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ClusterLayout:
    """`per_host` nodes share a machine, and slow each other down as in `NodeProfile.beside`."""

    prefill: int  # 0: decode nodes also prefill (aggregated)
    decode: int
    cores: int
    per_host: int
    chunk_size: int
    mixed_chunk_size: int
    local_tokens: int  # prompts up to this length stay on decode nodes

    @property
    def num_nodes(self) -> int:
        return self.prefill + self.decode

    @property
    def is_disaggregated(self) -> bool:
        return self.prefill > 0 and self.decode > 0

    def __str__(self) -> str:
        if not self.is_disaggregated:
            return f"{self.num_nodes} aggregated, chunks of {self.chunk_size} (mixed {self.mixed_chunk_size})"
        local = f", prompts to {self.local_tokens} on decode nodes" if self.local_tokens else ""
        mixed = f" (mixed {self.mixed_chunk_size})" if self.local_tokens else ""
        return f"{self.prefill}P {self.decode}D, chunks of {self.chunk_size}{mixed}{local}"

    def flags(self) -> list[str]:
        counts = ["--prefill", str(self.prefill), "--decode", str(self.decode)]
        sizes = ["--chunk-size", str(self.chunk_size), "--mixed-chunk-size", str(self.mixed_chunk_size)]
        return [*counts, *sizes, "--local-prefill-tokens", str(self.local_tokens)]
