"""Streams of the CUDA backend are five different ones, whatever torch's pool hands out. No GPU: the pool is fake."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from shared.core.errors import ConfigError
from shared.device.cuda import CudaStream, draw_stream
from shared.device.streams import make_streams

GPU = torch.device("cuda", 0)


def pool_of(monkeypatch: pytest.MonkeyPatch, *handles: int) -> Iterator[int]:
    """What torch.cuda.Stream hands out, in a circle."""
    drawn = iter(handles * 40)

    def stream(**options: object) -> SimpleNamespace:
        return SimpleNamespace(cuda_stream=next(drawn), synchronize=lambda: None)

    monkeypatch.setattr(torch.cuda, "Stream", stream)
    return drawn


@pytest.mark.rule("H7")
def test_a_handle_that_is_in_use_is_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """H7: two streams with one handle are one stream; nothing would overlap, and nobody would see it."""
    pool_of(monkeypatch, 5, 5, 6, 5, 6, 7, 7, 5, 8, 8)
    streams = make_streams("cuda", device=GPU)
    handles = [stream.cuda_stream.cuda_stream for stream in streams.all() if isinstance(stream, CudaStream)]
    assert handles == [5, 6, 7, 8]
    streams.stop()


def test_a_pool_without_another_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pool_of(monkeypatch, 5, 6)
    with pytest.raises(ConfigError, match="in use"):
        draw_stream(GPU, 0, (5, 6))
