"""The ways to run a request: all must yield the same tokens. The first and plainest is the reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shared.core.errors import ConfigError

ALWAYS_HAND_OVER = ("--prefill", "1", "--decode", "1", "--local-prefill-tokens", "0")
LOCAL = ("--prefill", "0", "--decode", "1")
PLAIN = ("--no-overlap", "--no-prefix-cache")


@dataclass(frozen=True, slots=True)
class Cell:
    name: str
    about: str
    flags: tuple[str, ...]


CELLS = (
    Cell("local-plain", "one node, no overlap, no prefix cache", (*LOCAL, *PLAIN)),
    Cell("local", "one node, overlap, prefix cache", LOCAL),
    Cell("handoff-plain", "handed over, no overlap, no prefix cache", (*ALWAYS_HAND_OVER, *PLAIN)),
    Cell("handoff", "handed over, overlap, prefix cache", ALWAYS_HAND_OVER),
    Cell("pages-64", "handed over, pages of 64 tokens", (*ALWAYS_HAND_OVER, "--page-size", "64")),
    Cell("chunks-24", "handed over, prompts in chunks of 24 tokens", (*ALWAYS_HAND_OVER, "--chunk-size", "24")),
    Cell("zmq", "handed over through sockets", (*ALWAYS_HAND_OVER, "--transport", "zmq")),
)


def chosen_cells(names: str) -> Sequence[Cell]:
    """Return the reference and the named cells, in order. Raise ConfigError for an unknown name."""
    if names == "all":
        return CELLS
    wanted = {name.strip() for name in names.split(",")}
    unknown = wanted - {cell.name for cell in CELLS}
    if unknown:
        known = ", ".join(cell.name for cell in CELLS)
        raise ConfigError(f"--cells: there is no {', '.join(sorted(unknown))}; known are {known}")
    return [cell for cell in CELLS if cell is CELLS[0] or cell.name in wanted]
