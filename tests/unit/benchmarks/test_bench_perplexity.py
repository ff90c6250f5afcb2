"""Perplexity beside llama.cpp: the same text, the same ids, the same rule, and what is near enough."""

from __future__ import annotations

import importlib.metadata
import io
import json
import math
from pathlib import Path

import pytest
import torch
from rich.console import Console

from benchmarks.engine import perplexity as bench
from benchmarks.engine.perplexity import FIRST_SCORED, WINDOW, Found, check_ids, negative_log_likelihood

ABOUT = {"text": "t", "windows": 2, "code": "c"}


def test_the_text_is_the_one_that_is_stated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Of a package made here: what is installed may be another version of the one that the bench reads."""
    (tmp_path / "told").mkdir()
    (tmp_path / "told" / "__init__.py").write_text('"""First.\n\n    Dented."""\ndef f():\n    """Second."""\n')
    (tmp_path / "told" / "tests").mkdir()
    (tmp_path / "told" / "tests" / "a.py").write_text('"""Not read."""')
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(bench, "PACKAGE", "told")
    monkeypatch.setattr(importlib.metadata, "version", lambda package: f"{package} 1.0")
    text = "First.\n\nDented.\n\nSecond."
    monkeypatch.setattr(bench, "TEXT_DIGEST", bench.digest_of(text))
    assert bench.stated_text() == text
    monkeypatch.setattr(bench, "CHARACTERS", len(text) - 1)
    with pytest.raises(SystemExit, match=r"the text has changed .* told 1\.0 is installed"):
        bench.stated_text()
    monkeypatch.setattr(bench, "PACKAGE", "nowhere")
    with pytest.raises(SystemExit, match="not installed"):
        bench.stated_text()


def test_only_the_second_half_of_a_window_is_scored():
    ids = torch.randint(0, 7, (WINDOW,))
    logits = torch.randn(WINDOW, 7)
    expected = sum(-float(logits[i - 1].log_softmax(-1)[ids[i]]) for i in range(FIRST_SCORED, WINDOW))
    assert negative_log_likelihood(logits, ids) == pytest.approx(expected, rel=1e-5)
    logits[: FIRST_SCORED - 1] = math.nan
    assert WINDOW - FIRST_SCORED == 255 and not math.isnan(negative_log_likelihood(logits, ids))


def test_other_ids_are_refused():
    check_ids([1, 2], [1, 2])
    with pytest.raises(SystemExit, match="from 1 on"):
        check_ids([1, 2, 3], [1, 4, 3])
    with pytest.raises(SystemExit, match="the shorter one's end"):
        check_ids([1, 2, 3], [1, 2])


def test_near_enough_is_0_3_percent_above_the_peer_s(tmp_path: Path):
    found = Found(tmp_path / "p.json", ABOUT)
    found.add("llama.cpp Q4_1", 10.0)
    for name, value in (("file", 10.029), ("int8", 10.031), ("bfloat16", 9.0)):
        found.add(name, value)
    assert json.loads(found.path.read_text())["near_enough"] == ["bfloat16", "file"]
    text = io.StringIO()
    bench.show(found, Console(file=text, width=100))
    assert "+0.290 %" in text.getvalue() and "+0.310 %" in text.getvalue()
    assert Found(found.path, ABOUT).values == found.values
    assert not Found(found.path, ABOUT | {"code": "another"}).values
