"""Decide whether a library may compute attention on a node's GPU. The model decides whether that suits it."""

from __future__ import annotations

from shared.config.processes import NodeParts
from shared.core import extras
from shared.core.errors import ConfigError
from shared.device.gpu import Gpu
from shared.device.passed_checks import has_passed
from shared.kernel.attention.flash_infer import MODULE, LibraryAttention, full_name, installed_version

NAMED = "--attention flashinfer"
CHECK = "to let nodes take FlashInfer's, which is not checked with this driver, torch and version, type: {line}"


def library_attention(parts: NodeParts, gpu: Gpu | None) -> LibraryAttention | None:
    """Return None if there is nothing to tell. Raise ConfigError if the library was asked for and can't be used."""
    asked, is_asked = parts.sched.attention, parts.sched.attention == MODULE
    if asked == "baton":
        return None
    if gpu is None:
        if is_asked:
            raise ConfigError(f"{NAMED} is for a GPU, and this node computes on the CPU; use auto or baton")
        return None
    refused = why_own(parts)
    if refused and is_asked:
        raise ConfigError(f"{NAMED}: {refused}; use auto or baton")
    if is_asked:
        extras.require("gpu", NAMED)
    version = installed_version()
    return LibraryAttention(version, gpu, is_asked, refused or ("" if is_asked else why_not_taken(version, gpu)))


def why_own(parts: NodeParts) -> str:
    """Return why no model of this node may use the library; "" if one may."""
    return (
        "FlashInfer's splits depend on the batch, which --deterministic excludes" if parts.sched.deterministic else ""
    )


def why_not_taken(version: str, gpu: Gpu) -> str:
    """Return why `auto` does not take the library, and the command that changes this; "" if it does."""
    if not version:
        return extras.missing(MODULE, "FlashInfer's, which may be faster,")
    return "" if has_passed(full_name(version), gpu) else CHECK.format(line="baton doctor --gpu")
