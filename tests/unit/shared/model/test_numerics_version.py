"""The default model's logits have the same bits on every machine, as long as NUMERICS_VERSION is the same."""

from __future__ import annotations

import hashlib

import pytest
import torch

from shared.kernel.product.product import supports
from shared.model.formats.opened import LoadOptions
from shared.model.loading.load import load_model
from shared.model.math.kernels import Formats
from shared.node.assembly.fingerprint import NUMERICS_VERSION
from tests.support.models.tiny_models import Rows

VOCAB = 49152
VERSION = 7
# from an Intel Xeon with AVX-512, and from the same machine with kernels compiled for AVX2
DIGESTS = {
    ("float32", "auto", "auto"): "076f645cb8e0ad59",
    ("bfloat16", "auto", "auto"): "1b3ea4671aa6c86b",
    ("bfloat16", "int8", "auto"): "945685768ae8b81f",
    ("bfloat16", "file", "auto"): "2389631b63b91815",
    ("bfloat16", "int8", "int8"): "d5fb97a1c622c13e",
    ("bfloat16", "file", "int8"): "76f1d9e0ba566c56",
    ("bfloat16", "codes", "int8"): "aeaa46f993bcff91",
}


def logits_digest(dtype: str, weights: str, kv: str) -> str:
    """Return a digest of the logits of two prompts, and of a step of both rows."""
    rows = Rows(load_model("smollm2", LoadOptions(dtype, formats=Formats(kv, weights))), 2, 16, 512)
    prompt = [number * 7919 % VOCAB for number in range(500)]
    found = [rows.step({0: prompt, 1: prompt[7:40]}), rows.step({0: [5], 1: [6]})]
    return hashlib.sha256(b"".join(logits.numpy().tobytes() for logits in found)).hexdigest()[:16]


@pytest.mark.parametrize(("dtype", "weights", "kv"), DIGESTS)
def test_the_default_model_has_these_bits(dtype: str, weights: str, kv: str) -> None:
    """If its bits change, change NUMERICS_VERSION too. Nodes with other bits must not pair."""
    if not supports(2, torch.float32):
        pytest.skip("this processor can't run the compiled program")
    assert (NUMERICS_VERSION, logits_digest(dtype, weights, kv)) == (VERSION, DIGESTS[dtype, weights, kv])
