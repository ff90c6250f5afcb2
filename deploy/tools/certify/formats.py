"""Read number formats from a certificate, and say what to do about another fingerprint than this engine's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from deploy.tools.certify.settings import ReplayConfig
from router.certify.record import CertifiedNumerics
from shared.model.formats.choice import LIBRARY_NAME
from shared.model.formats.opened import AUTO, DTYPES, FIXED_END, HASH_ENDS, PLAIN_END
from shared.wire.fitting import BY_LIBRARY

KV_TYPES = {"torch.int8": "int8", "torch.float8_e4m3fn": "fp8"}  # in the name of a plane


def with_certified_formats(config: ReplayConfig, node: CertifiedNumerics) -> ReplayConfig:
    """Return the settings with the certificate's formats in the place of each `auto`, whose choice depends on the
    machine: one with AMX takes other formats than one without."""
    if node.dtype not in DTYPES:  # a model without formats
        return config
    found: dict[str, Any] = {
        "dtype": node.dtype,
        "weight_dtype": weight_format(node.weights),
        "kv_dtype": next((form for word, form in KV_TYPES.items() if word in node.pages), AUTO),
        "model_library": LIBRARY_NAME if BY_LIBRARY in node.weights else AUTO,
    }
    asked = {name: value for name, value in found.items() if getattr(config.model, name) == AUTO}
    is_fixed = config.sched.deterministic or FIXED_END in node.weights
    return replace(config, model=replace(config.model, **asked), sched=replace(config.sched, deterministic=is_fixed))


def weight_format(weights: str) -> str:
    """Return --weight-dtype by the end of the weights' digest."""
    _, space, end = weights.partition(",")[0].removesuffix(FIXED_END).partition(" ")
    return next((form for form, known in HASH_ENDS.items() if known == space + end), AUTO)


def advice(name: str, there: CertifiedNumerics, here: CertifiedNumerics) -> str:
    """Return what to do where the field `name` differs."""
    if name == "numerics":
        return "replay with a version of Baton that has the certificate's"
    if name == "dtype":
        return f"give --dtype {there.dtype}"
    if name == "pages":
        return "give the --kv-dtype of the certificate's nodes"
    (files, _, end), (ours, _, _) = (one.weights.partition(",")[0].partition(" ") for one in (there, here))
    if name != "weights" or files != ours:
        return "name the certified model's files with --model"
    if BY_LIBRARY in there.weights:
        return f"the files are the same: run them {end}"
    if PLAIN_END in here.weights:
        return "plain torch computes here, in another order of sums: use an x86-64 processor with FMA"
    return (
        "the files are the same, their formats are not: give the --weight-dtype and --device of the certificate's nodes"
    )
