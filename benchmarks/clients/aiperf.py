"""NVIDIA's aiperf in an environment of its own (its pins clash with ours), run on a file of prompts.

    python -m tests.clients.environment aiperf     makes it; the measurements make it too when it is not there

It wants a tokenizer even where it uses the server's counts: it gets one of two words.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.clients.environment import ensure
from tests.clients.table import named

TIMEOUT_S = 1200.0


@dataclass(frozen=True, slots=True)
class Workload:
    """Both tools are asked for this: so many prompts, one after another at a constant rate, so many tokens each."""

    prompts: tuple[str, ...]
    rate: float
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Figures:
    """Milliseconds. `tpot`: of a request, (end - first token) / (tokens - 1); aiperf calls it inter token latency."""

    ttft_p50: float
    ttft_mean: float
    tpot_p50: float
    tpot_mean: float
    e2e_p50: float
    num_requests: int


def tool() -> Path:
    """Return the aiperf command. Raise NotInstalled with pip's words when it can't be had."""
    return ensure(named("aiperf")) / "bin" / "aiperf"


def measure(url: str, model: str, workload: Workload) -> Figures:
    with tempfile.TemporaryDirectory(prefix="aiperf-") as name:
        folder = Path(name)
        prompts = folder / "prompts.jsonl"
        prompts.write_text("".join(json.dumps({"text": text}) + "\n" for text in workload.prompts))
        command = [str(tool()), *flags(url, model, workload, prompts, write_tokenizer(folder), folder / "out")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
        try:
            return figures_of(json.loads((folder / "out" / "profile_export_aiperf.json").read_text()))
        except (OSError, KeyError, ValueError):
            raise RuntimeError(f"aiperf ended with {done.returncode}: {(done.stdout + done.stderr)[-1500:]}") from None


def flags(url: str, model: str, workload: Workload, prompts: Path, tokenizer: Path, out: Path) -> list[str]:
    given = {
        "--model": model,
        "--url": url,
        "--tokenizer": str(tokenizer),
        "--endpoint-type": "chat",
        "--input-file": str(prompts),
        "--custom-dataset-type": "single_turn",
        "--request-rate": str(workload.rate),
        "--arrival-pattern": "constant",
        "--request-count": str(len(workload.prompts)),
        "--extra-inputs": json.dumps({"max_tokens": workload.max_tokens, "ignore_eos": True, "temperature": 0}),
        "--ui": "none",
        "--output-artifact-dir": str(out),
    }
    return ["profile", "--streaming", "--use-server-token-count", "--no-auto-plot", *sum(map(list, given.items()), [])]


def write_tokenizer(folder: Path) -> Path:
    words = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None}
    words |= {"pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None}
    words["model"] = {"type": "WordLevel", "vocab": {"[UNK]": 0, "the": 1}, "unk_token": "[UNK]"}
    special = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]", "eos_token": "[UNK]"}
    target = folder / "tokenizer"
    target.mkdir()
    (target / "tokenizer.json").write_text(json.dumps(words))
    (target / "tokenizer_config.json").write_text(json.dumps(special))
    return target


def figures_of(report: dict) -> Figures:
    ttft, tpot = report["time_to_first_token"], report["inter_token_latency"]
    return Figures(
        ttft["p50"], ttft["avg"], tpot["p50"], tpot["avg"], report["request_latency"]["p50"], int(ttft["count"])
    )
