"""Draw a training run's curve as SVG and as a table."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

WIDTH, HEIGHT, EDGE = 720, 320, 44
COLOURS = ("#0b6", "#06c", "#c60", "#a0c", "#666")
Line = tuple[str, Sequence[tuple[float, float]]]  # a name, and points (tokens, value)


def read_curve(path: Path) -> list[Mapping[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def loss_lines(curve: Sequence[Mapping[str, Any]]) -> list[Line]:
    """Return each draft's line. A point averages ten updates, because losses are noisy."""
    updates = [one for one in curve if "losses" in one]
    found: dict[int, list[tuple[float, float]]] = {}
    for start in range(0, len(updates), 10):
        block = updates[start : start + 10]
        for draft in range(min(len(one["losses"]) for one in block)):
            mean = sum(one["losses"][draft] for one in block) / len(block)
            found.setdefault(draft, []).append((block[-1]["tokens"], mean))
    return [(f"loss of draft {draft + 1}", points) for draft, points in found.items()]


def acceptance_lines(curve: Sequence[Mapping[str, Any]]) -> list[Line]:
    """Return a line for each chain length: tokens per verify step on held-out answers."""
    checks = [(one["tokens"], one["held_out"]["tokens_per_verify"]) for one in curve if "held_out" in one]
    lengths = range(len(checks[0][1])) if checks else range(0)
    return [(f"{n + 1} drafts", [(tokens, values[n]) for tokens, values in checks]) for n in lengths]


def acceptance_table(curve: Sequence[Mapping[str, Any]]) -> str:
    lines = [f"{'tokens':>10}  tokens per verify with 1, 2, ... drafts"]
    for one in curve:
        if "held_out" in one:
            lines.append(f"{one['tokens']:>10}" + "".join(f"{v:7.2f}" for v in one["held_out"]["tokens_per_verify"]))
    return "\n".join(lines)


def svg(title: str, lines: Sequence[Line]) -> str:
    points = [point for _, part in lines for point in part]
    if not points:
        return f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}"/>\n'
    right = max(x for x, _ in points)
    low, high = min(y for _, y in points), max(y for _, y in points)

    def place(x: float, y: float) -> str:
        across = EDGE + (WIDTH - 2 * EDGE) * x / (right or 1)
        return f"{across:.1f},{HEIGHT - EDGE - (HEIGHT - 2 * EDGE) * (y - low) / ((high - low) or 1):.1f}"

    parts = [text(EDGE, 20, title), text(EDGE, HEIGHT - 12, f"0 to {right:,.0f} answer tokens")]
    parts += [text(4, HEIGHT - EDGE, f"{low:.2f}"), text(4, EDGE, f"{high:.2f}")]
    for n, (name, part) in enumerate(lines):
        colour = COLOURS[n % len(COLOURS)]
        path = " ".join(place(*point) for point in part)
        parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="1.5" points="{path}"/>')
        parts.append(text(WIDTH - EDGE - 90, EDGE + 16 * n, name, colour))
    body = "\n".join(parts)
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">\n{body}\n</svg>\n'


def text(x: float, y: float, words: str, colour: str = "#333") -> str:
    return f'<text x="{x}" y="{y}" fill="{colour}">{words}</text>'
