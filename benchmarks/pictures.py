"""The pictures of README.md, as SVG: `make pictures`.

failover.svg   a real run: a stream, its decode node killed, the stream goes on. Fails if a token differs
parts.svg      the parts of a cluster, and what travels between them
servers.svg    tokens per second, from the figures in `SERVERS`
"""

from __future__ import annotations

import argparse
import html
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from deploy.router_http import RouterHttp
from deploy.router_url import parse_url
from deploy.tools.ask import pieces
from tests.support.clusters.cluster import Cluster, baton_up

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "docs" / "pictures"
PROMPT = "Tell me a story about a lighthouse keeper who finds a letter in a bottle."
CHARACTER = 7.9  # width of one
TOKENS, KILLED_AT = 220, 60  # of the answer, and how many have come when its node is killed
FLAGS = ("--decode", "2", "--policy", "round_robin", "--local-prefill-tokens", "1")
# tokens/s of `make bench PEERS=1` on 2026-11-27, commit 721d1aa9; docs/figures.md has the whole table
MACHINE = "two cores of an AMD EPYC (Zen 4), SmolLM2-135M, 27 November 2026"
SERVERS = {1: (165, 130, "llama-server"), 8: (434, 196, "vLLM"), 16: (532, 266, "vLLM"), 32: (579, 324, "vLLM")}

MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, monospace"
SANS = "system-ui, -apple-system, Segoe UI, Roboto, sans-serif"
PAGE, LINE, TEXT, DIM, ACCENT, BAD, GOOD = "#14161a", "#2c3038", "#e6e7ea", "#8e939d", "#ff8a5c", "#ff8095", "#5fd08f"


@dataclass
class Recording:
    """Seconds are after the question was sent."""

    pieces: list[tuple[float, str]] = field(default_factory=list)
    killed: tuple[float, str] = (0.0, "")  # when, and which node
    news: list[tuple[float, str]] = field(default_factory=list)  # of the cluster's log

    @property
    def text(self) -> str:
        return "".join(piece for _, piece in self.pieces)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT, help="(default: %(default)s)")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for name, picture in {"parts": parts(), "servers": servers(), "failover": failover(record())}.items():
        (args.out / f"{name}.svg").write_text(picture, encoding="utf-8")
        print(args.out / f"{name}.svg")
    return 0


# The recording


def record() -> Recording:
    """Ask once in peace, and once with a kill. RuntimeError where the answers differ."""
    with tempfile.TemporaryDirectory() as folder, baton_up(Path(folder) / "up.log", *FLAGS) as cluster:
        calm = ask(cluster, kills=False)
        hurt = ask(cluster, kills=True)
    if hurt.text != calm.text:
        raise RuntimeError(f"the answer has changed:\n{calm.text}\n--\n{hurt.text}")
    print(f"killed {hurt.killed[1]} after {hurt.killed[0]:.2f} s; longest pause {longest_pause(hurt):.2f} s; same text")
    return hurt


def ask(cluster: Cluster, *, kills: bool) -> Recording:
    http, made = RouterHttp(parse_url(cluster.url), ""), Recording()
    body = {
        "model": "smollm2", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": TOKENS,
        "temperature": 0.0, "repetition_penalty": 1.1, "stream": True,
    }  # fmt: skip
    lines_before = len(cluster.log_path.read_text().splitlines())
    began = time.perf_counter()
    with http.opened("POST", "/v1/chat/completions", body, 60.0) as answer:
        for piece in pieces(answer):
            made.pieces.append((time.perf_counter() - began, piece))
            if kills and len(made.pieces) == KILLED_AT:
                node = busy_node(cluster)
                os.kill(cluster.node_pid(f"--node-id={node}"), signal.SIGKILL)
                made.killed = (time.perf_counter() - began, node)
    if kills:
        made.news = news(cluster.log_path.read_text().splitlines()[lines_before:], made)
    return made


def busy_node(cluster: Cluster) -> str:
    """The decode node that has a running request."""
    for (name, labels), value in cluster.metrics().items():
        if name == "baton_request_rows" and 'state="running"' in labels and 'role="decode"' in labels and value:
            return labels.partition('node="')[2].partition('"')[0]
    raise RuntimeError("no decode node has a running request")


def news(lines: Sequence[str], made: Recording) -> list[tuple[float, str]]:
    """What the log said of the loss, in its own words. Its clock is the wall's: the kill is the common moment."""
    told = [
        line for line in lines if "node is lost" in line or "go on elsewhere" in line or "killed by SIGKILL" in line
    ]
    first = seconds_of(told[0]) if told else 0.0
    return [(made.killed[0] + seconds_of(line) - first + 0.01, " ".join(line.split()[2:])) for line in told]


def seconds_of(line: str) -> float:
    hours, minutes, seconds = line.split("T")[1].split("Z")[0].split(":")
    return int(hours) * 3600 + int(minutes) * 60 + float(seconds)


def longest_pause(made: Recording) -> float:
    times = [at for at, _ in made.pieces]
    return max(after - before for before, after in zip(times, times[1:], strict=False))


# Drawing


def svg(width: int, height: int, label: str, body: Sequence[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{html.escape(label)}">'
    )
    page = f'<rect width="{width}" height="{height}" rx="10" fill="{PAGE}"/>'
    return "\n".join([head, f"<title>{html.escape(label)}</title>", page, *body, "</svg>", ""])


def text(x: float, y: float, words: str, color: str = TEXT, size: int = 14, more: str = "", inner: str = "") -> str:
    font = MONO if "mono" in more else SANS
    attributes = more.replace("mono", "").strip()
    return (
        f'<text x="{x:g}" y="{y:g}" fill="{color}" font-family="{font}" font-size="{size}" xml:space="preserve" '
        f"{attributes}>{html.escape(words)}{inner}</text>"
    )


def failover(made: Recording) -> str:
    """In real time, again and again. Each piece appears when it came."""
    width, columns, line_height, left = 860, 92, 20, 22
    end = made.pieces[-1][0] + 4.0
    body = [f'<rect width="0" height="0"><animate id="run" attributeName="x" from="0" to="0" dur="{end:.2f}s" '
            'begin="0s;run.end" /></rect>']  # fmt: skip
    body.append(text(left, 34, f'$ baton ask "{PROMPT}"', ACCENT, 13, "mono"))
    x, y = 0, 64
    for at, piece in made.pieces:
        color = TEXT if at <= made.killed[0] else GOOD
        for number, part in enumerate(piece.split("\n")):
            if number:
                x, y = 0, y + line_height
            if x + len(part) > columns:
                x, y, part = 0, y + line_height, part.lstrip()
            if part:
                wide = f"textLength='{len(part) * CHARACTER:.1f}' lengthAdjust='spacingAndGlyphs'"  # in any font
                more = f"mono visibility='hidden' {wide}"
                body.append(text(left + x * CHARACTER, y, part, color, 13, more, appears(at, end)))
                x += len(part)
    y += 30
    body.append(f'<line x1="{left}" x2="{width - left}" y1="{y}" y2="{y}" stroke="{LINE}"/>')
    y += 26
    told = [(made.killed[0], f"$ kill -9 {made.killed[1]}", BAD)] + [(at, words, DIM) for at, words in made.news]
    told.append(
        (made.pieces[-1][0], f"longest pause {longest_pause(made):.2f} s; the same tokens as without the kill", GOOD)
    )
    for at, words, color in told:
        body.append(text(left, y, words[:100], color, 13, "mono visibility='hidden'", appears(at, end)))
        y += line_height
    return svg(width, int(y + 6), "A decode node is killed while it answers; the answer goes on", body)


def appears(at: float, end: float) -> str:
    return (
        f'<set attributeName="visibility" to="visible" begin="run.begin+{at:.2f}s" end="run.begin+{end - 0.05:.2f}s"/>'
    )


def parts() -> str:
    body = [
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        f'orient="auto-start-reverse"><path d="M0 0 8 4 0 8z" fill="{DIM}"/></marker></defs>',
        *box(20, 90, 130, 60, "clients", "HTTP, streams"),
        *box(250, 70, 190, 100, "router", "tokenizer, journal,", "placement, chat page"),
        *box(560, 20, 200, 80, "prefill nodes", "compute prompts"),
        *box(560, 160, 200, 80, "decode nodes", "generate, step by step"),
        *arrow(150, 112, 250, 112, "requests", 200, 104),
        *arrow(250, 138, 150, 138, "tokens", 200, 154),
        *arrow(440, 96, 560, 56, "token ids", 492, 66),
        *arrow(440, 140, 560, 190, "", 0, 0),
        *arrow(560, 212, 440, 158, "tokens", 488, 212),
        *arrow(640, 100, 640, 160, "offer, first token", 632, 134, "end"),
        *arrow(690, 160, 690, 100, "KV pages, pulled", 702, 134, "start"),
    ]
    return svg(860, 260, "Router, prefill nodes and decode nodes, and what travels between them", body)


def box(x: int, y: int, width: int, height: int, name: str, *lines: str) -> list[str]:
    middle = x + width / 2
    shape = f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="8" fill="none" stroke="{ACCENT}"/>'
    top = y + height / 2 - 9 * len(lines) + 4
    told = [text(middle, top, name, TEXT, 16, 'text-anchor="middle" font-weight="600"')]
    return [shape, *told, *(text(middle, top + 20 + 18 * nth, line, DIM, 13, 'text-anchor="middle"')
                            for nth, line in enumerate(lines))]  # fmt: skip


def arrow(x1: int, y1: int, x2: int, y2: int, words: str, x: int, y: int, anchor: str = "middle") -> list[str]:
    line = f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{DIM}" marker-end="url(#tip)"/>'
    return [line, text(x, y, words, DIM, 12, f'text-anchor="{anchor}"')]


def servers() -> str:
    """Two bars for each number of streams: Baton, and the best peer."""
    base, top, height = 250, 60, 170
    most = max(value for baton, peer, _ in SERVERS.values() for value in (baton, peer))
    body = [text(30, 32, "tokens per second through HTTP, by simultaneous streams", TEXT, 15),
            text(30, 52, MACHINE, DIM, 12)]  # fmt: skip
    for nth, (streams, (baton, peer, name)) in enumerate(SERVERS.items()):
        left = 70 + nth * 195
        for place, (value, color, label) in enumerate(((baton, ACCENT, "Baton"), (peer, DIM, name))):
            tall, x = height * value / most, left + place * 70
            body.append(
                f'<rect x="{x}" y="{base - tall + 10:.1f}" width="56" height="{tall - 10:.1f}" rx="3" fill="{color}"/>'
            )
            body.append(text(x + 28, base - tall + 4, str(value), TEXT, 13, 'text-anchor="middle"'))
            body.append(text(x + 28, base + 18, label, DIM, 12, 'text-anchor="middle"'))
        body.append(
            text(left + 63, base + 38, f"{streams} stream{'s' * (streams > 1)}", TEXT, 13, 'text-anchor="middle"')
        )
    body.append(f'<line x1="50" x2="830" y1="{base}" y2="{base}" stroke="{LINE}"/>')
    return svg(860, base + top - 4, "Tokens per second on two CPU cores: Baton and the best peer", body)


if __name__ == "__main__":
    sys.exit(main())
