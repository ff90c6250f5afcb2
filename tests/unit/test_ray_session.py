"""What the words of `baton ray` print where. Ray is imported in another process: it puts its own copies of other
packages on sys.path, where the test of pins would find them.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from tests.support.patience import HANG_GUARD_S

SCRIPT = """
import ray
from deploy.ray.session import connected

ray.init = lambda **kwargs: print("a raylet died (while connecting)")
ray.shutdown = lambda: print("a raylet died (while disconnecting)")
with connected("127.0.0.1:6379", "baton"):
    print("a raylet died (meanwhile)")
print("[]")
"""


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
def test_whatever_ray_prints_goes_to_stderr() -> None:
    """`status --json | jq` must not break because Ray has heard, at any moment, that a machine died."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=HANG_GUARD_S)
    assert done.stdout == "[]\n", done.stdout + done.stderr
    assert done.stderr.count("a raylet died") == 3
