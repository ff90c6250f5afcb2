"""What torch's CUDA build promises without a driver: run by `make test-cuda-build` in an environment of its own.

    python -m tests.gpu.cuda_contracts [WORD ...]        # only those whose name has all of these

Tensors are fake: they have a shape, a dtype and the device "cuda", and no memory. torch's own shape functions refuse
what the device would: tensors of two devices in one call, sizes that a product does not take, and every read of a
value on the host. So the engine's closures, on such tensors, show mixed devices and hidden waits with the very
version of torch that a GPU machine has. Values, order and speed are not checked here.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import pkgutil
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from tests.gpu.fake_engine import KINDS, SPOILS, run_spoiled, run_steps

PACKAGES = ("shared", "router", "prefill_node", "decode_node", "deploy")
EXTRAS = ("matplotlib", "ray")
CUDA = torch.device("cuda")


def main() -> int:
    print(f"torch {torch.__version__}, built for CUDA {torch.version.cuda}; a GPU here: {torch.cuda.is_available()}")
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)  # what is refused on purpose
    assert torch.version.cuda, "this is a build of torch without CUDA"
    checks = {**CHECKS, **{f"the engine's steps, {name}": partial(run_steps, name) for name in KINDS}}
    checks |= {f"the engine's steps, spoiled by {name}": partial(run_spoiled, name) for name in SPOILS}
    checks = {name: check for name, check in checks.items() if all(word in name for word in sys.argv[1:])}
    wrong = [name for name, check in checks.items() if not holds(name, check)]
    print(f"{len(checks) - len(wrong)} of {len(checks)} hold" + (f"; not: {'; '.join(wrong)}" if wrong else ""))
    return 1 if wrong else 0


def holds(name: str, check: Callable[[], str]) -> bool:
    try:
        told = check()
    except Exception:
        print(f"FAILED  {name}\n{traceback.format_exc()}")
        return False
    print(f"holds   {name}: {told}", flush=True)
    return True


def imports() -> str:
    """But for modules of extras that are not installed here."""
    names = [module.name for package in PACKAGES for module in walk(package)]
    absent = []
    for name in names:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            assert error.name in EXTRAS, error
            absent.append(name)
    return f"{len(names) - len(absent)} modules; {len(absent)} of extras that are not installed"


def walk(package: str) -> Sequence[pkgutil.ModuleInfo]:
    found = importlib.import_module(package)
    return list(pkgutil.walk_packages(found.__path__, f"{package}."))


def fake(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device=CUDA)


def products() -> str:
    left, right = fake(16, 32, dtype=torch.bfloat16), fake(32, 48, dtype=torch.bfloat16)
    assert torch.mm(left, right).dtype == torch.bfloat16
    wide = torch.mm(left, right, out_dtype=torch.float32)
    assert (wide.dtype, tuple(wide.shape)) == (torch.float32, (16, 48))
    return "mm(out_dtype=float32) of bfloat16"


def byte_products() -> str:
    """Of rows in fp8 with columns in fp8, both sizes of the right one multiples of 16."""
    one = torch.ones((), device=CUDA)
    left = fake(16, 32, dtype=torch.float8_e4m3fn)
    right = fake(48, 32, dtype=torch.float8_e4m3fn).t()
    assert tuple(torch._scaled_mm(left, right, one, one, out_dtype=torch.bfloat16).shape) == (16, 48)
    refused(lambda: torch._scaled_mm(left[:, :24], right[:24], one, one, out_dtype=torch.bfloat16))
    return "_scaled_mm takes multiples of 16 and refuses others"


def attention() -> str:
    from torch.nn.attention.varlen import varlen_attn

    names = list(inspect.signature(varlen_attn).parameters)
    lens = torch.zeros(3, dtype=torch.int32, device=CUDA)
    q, k, v = (fake(20, 4, 64, dtype=torch.bfloat16) for _ in range(3))
    assert tuple(varlen_attn(q, k, v, lens, lens, 10, 10).shape) == tuple(q.shape)
    return f"varlen_attn({', '.join(names)})"


def indexing() -> str:
    x, rows = fake(8, 4), torch.tensor([1, 2]).to(CUDA)
    assert x[rows].shape == (2, 4) and x[rows, rows].shape == (2,)
    x[rows] = fake(2, 4)
    x.index_put_((rows,), fake(2, 4), accumulate=True)
    x.sort(dim=1, descending=True, stable=True)
    x.cumsum(dim=1).gather(1, rows.unsqueeze(1))
    refused(lambda: x + torch.ones(8, 4))
    refused(lambda: x.index_put_((rows,), torch.ones(2, 4)))
    return "index, index_put, sort, cumsum, gather; two devices in one call are refused"


def reads() -> str:
    x = fake(4, dtype=torch.int64)
    for read in (x.sum().item, x.tolist, lambda: x[x > 0], lambda: int(x[0])):
        refused(read, DataDependentOutputException)
    return "item, tolist and masks as indices are refused: their values are the device's"


def refused(work: Callable[[], object], *kinds: type[Exception]) -> None:
    """RuntimeError and `kinds` are refusals."""
    try:
        work()
    except (RuntimeError, *kinds):
        return
    raise AssertionError("it was not refused")


def on_fakes(check: Callable[[], str]) -> Callable[[], str]:
    def run() -> str:
        with FakeTensorMode(allow_non_fake_inputs=True):
            return check()

    return run


CHECKS = {
    "imports": imports,
    "products": on_fakes(products),
    "products of bytes": on_fakes(byte_products),
    "attention of several lengths": on_fakes(attention),
    "indices": on_fakes(indexing),
    "reads on the host": on_fakes(reads),
}


if __name__ == "__main__":
    sys.exit(main())
