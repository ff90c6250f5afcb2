"""Put load on a server and check a latency target: python examples/load_test.py [URL] [FLAGS of baton load]

Exit status 0: the server met the target, and every check of `baton load` passed. Run this in CI after a deployment.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

PROMISE = "ttft<2s,tpot<200ms"  # first token within 2 s, then a token every 200 ms on average
SHARE = 0.95  # share of requests that must keep PROMISE


def main(url: str, flags: list[str]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        # Send 2 requests a second for 20 seconds. No request waits for an earlier answer (an open loop).
        command = ["load", url, "--rate", "2", "--duration", "20", "--prompt-tokens", "128", "--output-tokens", "32"]
        command += ["--slo", PROMISE, "--quiet", "--out", folder, *flags]
        done = subprocess.run([sys.executable, "-m", "baton_serve", *command], check=False)
        if done.returncode == 2:
            return 2  # `baton load` has printed the reason
        report = json.loads((Path(folder) / "report.json").read_text("utf-8"))

    # `baton load` also checks that answers are equal, and finds stalls and leaks. Status 1 means that a check failed.
    share = report["summary"]["slo_share"]["value"]
    kept = share >= SHARE
    print(f"\n{share:.1%} of requests kept {PROMISE}; {SHARE:.0%} are wanted")
    print("verdict:", "PASS" if kept and done.returncode == 0 else "FAIL")
    return 0 if kept and done.returncode == 0 else 1


if __name__ == "__main__":
    url, *flags = sys.argv[1:] or ["http://127.0.0.1:8000"]
    sys.exit(main(url, flags))
