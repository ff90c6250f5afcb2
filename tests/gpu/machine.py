"""The machine that results are of, as one line of JSON."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import shutil
import subprocess
from typing import Any

import torch

from benchmarks.run import cpu_name, num_cores
from shared.device.torch_cuda import TorchCuda

PACKAGES = ("triton", "numpy", "numba", "transformers")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    print(json.dumps(facts(parser.parse_args().device)))


def facts(device: str) -> dict[str, Any]:
    """GPU and driver first. SystemExit where there is none."""
    if device == "cuda" and not TorchCuda().is_available():
        raise SystemExit(f"torch {torch.__version__} sees no GPU here: `baton doctor --gpu` says why")
    found: dict[str, Any] = gpu_facts() if device == "cuda" else {"GPU": device}
    found |= {"CPU": cpu_name(), "cores": num_cores(), "Python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "none"
    return found | {"torch": torch.__version__, "CUDA of torch": torch.version.cuda or "none"}


def gpu_facts() -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(0)
    capability = f"{properties.major}.{properties.minor}"
    memory = round(properties.total_memory / (1 << 30), 1)
    return {"GPU": properties.name, "driver": driver(), "capability": capability, "GiB": memory}


def driver() -> str:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "unknown"
    command = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip().split("\n")[0] or "unknown"


if __name__ == "__main__":
    main()
