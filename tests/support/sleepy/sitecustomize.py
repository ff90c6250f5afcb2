"""HashLM on a device that sleeps: with this folder on PYTHONPATH each step of a node takes SLEEPY_STEP_S and
SLEEPY_TOKEN_S for each of its tokens, on hardly any processor. So two cores show what many nodes would do.

Python imports `sitecustomize` at each start; HashLM is patched when a node loads it.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MODULE = "shared.model.hashlm.model"


def make_sleepy(module: ModuleType) -> None:
    forward, step_s, token_s = module.HashLM.forward, *map(float, map(os.environ.get, NAMES, "00"))

    def sleeping(self: Any, inputs: Any, kv: Any) -> Any:
        time.sleep(step_s + token_s * len(inputs.input_ids))
        return forward(self, inputs, kv)

    module.HashLM.forward = sleeping  # type: ignore[attr-defined]  # a class of a module that is loaded by name


NAMES = ("SLEEPY_STEP_S", "SLEEPY_TOKEN_S")


class Finder(MetaPathFinder):
    """Patches the one module behind its own loader; finds no other."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        load = spec.loader.exec_module

        def load_and_patch(module: ModuleType) -> None:
            load(module)
            make_sleepy(module)

        spec.loader.exec_module = load_and_patch  # type: ignore[method-assign]  # this loader is of this module alone
        return spec


sys.meta_path.insert(0, Finder())
