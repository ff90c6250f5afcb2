"""`baton load` as a child process, for measurements: its figures out of its own report; and scripted servers."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.clients.aiperf import Figures, Workload
from shared.core import launcher

MOCK = Path("tests/support/web/mock_openai.py")
TIMEOUT_S = 1200.0


def run_load(url: str, *flags: str) -> dict[str, Any]:
    """The whole report. RuntimeError when a truth check failed or nothing could be measured."""
    with tempfile.TemporaryDirectory(prefix="baton-load-") as name:
        command = launcher.command("deploy.cli", "load", url, "--quiet", "--out", name, *flags)
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
        if done.returncode:
            raise RuntimeError(f"baton load ended with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-1000:]}")
        return json.loads((Path(name) / "report.json").read_text())


def measure(url: str, workload: Workload) -> Figures:
    with tempfile.TemporaryDirectory(prefix="prompts-") as name:
        prompts = Path(name) / "prompts.jsonl"
        prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in workload.prompts))
        number = len(workload.prompts)
        flags = ["--prompts", str(prompts), "--rate", str(workload.rate), "--arrivals", "constant"]
        flags += ["--requests", str(number), "--output-tokens", str(workload.max_tokens), "--golden", "0"]
        report = run_load(url, *flags, "--duration", str(2 * number / workload.rate))
    rows = report["summary"]["latencies"]
    return Figures(
        ttft_p50=1e3 * rows["ttft"]["p50"]["value"],
        ttft_mean=1e3 * rows["ttft"]["mean"]["value"],
        tpot_p50=1e3 * rows["tpot"]["p50"]["value"],
        tpot_mean=1e3 * rows["tpot"]["mean"]["value"],
        e2e_p50=1e3 * rows["e2e"]["p50"]["value"],
        num_requests=report["summary"]["num_ok"],
    )


@contextlib.contextmanager
def scripted_server(ttft_s: float, itl_s: float) -> Iterator[str]:
    """Its address. A process of its own: it must not share this one's interpreter."""
    command = [sys.executable, str(MOCK), "--ttft", str(ttft_s), "--itl", str(itl_s)]
    environment = {**os.environ, "PYTHONPATH": ".:tests/support"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
        finally:
            process.terminate()
