"""What the words of `baton ray` print where."""

from __future__ import annotations

import pytest

ray = pytest.importorskip("ray", reason="Ray is not installed")

from deploy.ray.session import connected  # noqa: E402  # needs Ray


def test_whatever_ray_prints_goes_to_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`status --json | jq` must not break because Ray has heard, at any moment, that a machine died."""
    monkeypatch.setattr(ray, "init", lambda **kwargs: print("a raylet died (while connecting)"))
    monkeypatch.setattr(ray, "shutdown", lambda: print("a raylet died (while disconnecting)"))
    with connected("127.0.0.1:6379", "baton"):
        print("a raylet died (meanwhile)")
    print("[]")
    said = capsys.readouterr()
    assert said.out == "[]\n"
    assert said.err.count("a raylet died") == 3
