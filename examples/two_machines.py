"""Run two machines' processes with keys, all on this machine: python examples/two_machines.py [MODEL]

Machine A runs the router and a prefill node, machine B runs a decode node. Each machine's folder has only its own
secrets. On real machines type the printed commands, with the machines' addresses instead of 127.0.0.1.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

BATON = [sys.executable, "-m", "baton_serve"]


def machine(everything: Path, folder: Path, *secrets: str) -> str:
    """Copy one machine's files: `allowed`, and the machine's own secrets. On real machines use `rsync -a`."""
    folder.mkdir(mode=0o700)
    for name in ("allowed", *(f"{secret}.secret" for secret in secrets)):
        # this also copies the mode, because Baton refuses files that others may read
        shutil.copy2(everything / name, folder / name)
    return str(folder)


def start(*words: str) -> subprocess.Popen[bytes]:
    print("$ baton", *words, flush=True)
    return subprocess.Popen([*BATON, *words])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for_both(url: str, processes: list[subprocess.Popen[bytes]]) -> None:
    """Wait until the router has nodes of both roles, a `pair`. A router with one node already reports itself ready."""
    while all(process.poll() is None for process in processes):
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=60) as answer:
                if json.load(answer)["pair"]:
                    return
        except OSError:
            pass  # the router is not up yet
        time.sleep(0.1)
    raise SystemExit("a process ended; its log above says why")


def num_handoffs(url: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics") as page:
        lines = page.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("baton_handoffs_total{"))


def main(model: str, everything: Path) -> None:
    # Make all keys on one machine that you trust.
    create = ["keys", "create", str(everything / "all"), "--router", "router", "--node", "prefill-0", "decode-0"]
    subprocess.run([*BATON, *create], check=True)
    on_a = machine(everything / "all", everything / "a", "router", "prefill-0")
    on_b = machine(everything / "all", everything / "b", "decode-0")

    port, endpoint = free_port(), f"tcp://127.0.0.1:{free_port()}"
    node = ["--model", model, "--router", endpoint]
    http = ["--port", str(port), "--local-prefill-tokens", "0"]  # with 0, short prompts are handed over, too
    processes = [
        start("router", "--model", model, "--keys", on_a, "--node-endpoint", endpoint, *http),
        start("prefill", "--keys", on_a, "--node-id", "prefill-0", *node),
        start("decode", "--keys", on_b, *node),  # the folder's only secret gives the node its name
    ]
    try:
        url = f"http://127.0.0.1:{port}"
        wait_for_both(url, processes)
        # An answer that ends with its first token has no hand-off. `ignore_eos` prevents such an answer.
        body = {"prompt": "Two machines, one answer. " * 8, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
        with urllib.request.urlopen(f"{url}/v1/completions", data=json.dumps(body).encode()) as answer:
            print("answer:", json.load(answer)["choices"][0]["text"])
        while not (count := num_handoffs(url)):  # nodes report twice a second
            time.sleep(0.1)
        print(f"handed over from A to B: {count:.0f}")
    finally:
        for process in reversed(processes):
            process.terminate()
        for process in processes:
            process.wait()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(sys.argv[1] if len(sys.argv) > 1 else "smollm2", Path(folder))
