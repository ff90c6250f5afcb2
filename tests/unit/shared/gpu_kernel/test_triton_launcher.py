"""The launcher of Triton kernels: what it records is what Triton compiles, and what it refuses; shuffled grids."""

from __future__ import annotations

import pytest
import torch

from shared.core.errors import KernelRefused

interpreter = pytest.importorskip("tests.support.kernels.interpreter", exc_type=ImportError)
launcher = interpreter.kernels("launch.launcher")
signatures = interpreter.kernels("launch.signatures")

import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import make_backend  # noqa: E402
from triton.runtime.errors import OutOfResources  # noqa: E402
from triton.runtime.jit import JITFunction, create_function_from_signature  # noqa: E402


@triton.jit(do_not_specialize=["free"])
def turns_kernel(counter, turns, number, free, delta, BLOCK: tl.constexpr):
    """Write when each program had its turn."""
    tl.store(turns + tl.program_id(0) * 2 + tl.program_id(1), tl.atomic_add(counter, 1))


def run(grid=(3, 2), counter=None, turns=None, number=5, free=7, delta=None):
    counter = torch.zeros(1, dtype=torch.int32) if counter is None else counter
    turns = torch.zeros(6, dtype=torch.int32) if turns is None else turns
    launcher.launch(turns_kernel, grid, counter, turns, number, free, delta, BLOCK=32)
    return turns.tolist()


def misaligned(dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(bytearray(65), dtype=dtype, count=2, offset=1)


VALUES = [
    torch.empty(64),
    torch.empty(64)[1:],
    torch.empty(8, 33, dtype=torch.bfloat16, device="meta"),
    torch.empty(8, 33, dtype=torch.bfloat16, device="meta")[1:],
    torch.empty(3, dtype=torch.bool),
    torch.empty(3, dtype=torch.uint8),
    torch.empty(3, dtype=torch.float8_e4m3fn),
    torch.empty(3, dtype=torch.int64),
    *(None, True, False, 1.0, 16.0, 0, 1, 2, 16, 17, -16, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**40, 2**63),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: "tensor" if torch.is_tensor(value) else str(value))
def test_a_signature_is_what_triton_compiles(value: object) -> None:
    """Compared with Triton's own binder, once where it may specialise and once where it may not."""
    compiled = JITFunction(turns_kernel.fn, do_not_specialize=["free"])
    bind = create_function_from_signature(compiled.signature, compiled.params, make_backend(GPUTarget("cuda", 90, 32)))
    args = (torch.empty(4), torch.empty(4), value, value, None)
    want = bind(*args, BLOCK=32)[1]
    for kernel in (compiled, turns_kernel):
        got = signatures.signature_of(kernel, args, {"BLOCK": 32}, 4, 2)
        assert [kind for _, kind in got.types] == [kind for kind, _ in want]
        names = compiled.arg_names
        assert got.aligned == tuple(name for name, (_, extra) in zip(names, want, strict=True) if extra == "D")
        constants = {name: extra for name, (kind, extra) in zip(names, want, strict=True) if kind == "constexpr"}
        assert dict(got.constants) == constants


def test_launches_are_recorded_while_somebody_asks() -> None:
    run()
    with launcher.recorded() as outer:
        run()
        with launcher.recorded() as inner:
            run(number=16)
        run(number=16)
        run(free=16)
    run(number=1)
    assert len(inner) == 1 and len(outer) == 2 and inner < outer
    (signature,) = inner
    assert signature.aligned == ("counter", "turns", "number") and signature.num_warps == 4
    assert signature.find_kernel() is turns_kernel
    assert "number:i32" in signature.describe() and "BLOCK=32" in signature.describe()


def test_a_limit_of_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, object]] = []
    monkeypatch.setattr(launcher, "enqueue", lambda *call: given.append(call[-1]))
    counter, turns = torch.zeros(1, dtype=torch.int32), torch.zeros(6, dtype=torch.int32)
    with launcher.recorded() as seen:
        for limit in (None, 128, 255):
            launcher.launch(turns_kernel, (1,), counter, turns, 5, 7, None, max_registers=limit, BLOCK=32)
    usual = {"num_warps": 4, "num_stages": 2, "BLOCK": 32}
    assert given == [usual, {**usual, "maxnreg": 128}, {**usual, "maxnreg": 255}]
    assert {signature.max_registers for signature in seen} == {None, 128, 255}
    ends = {signature.describe().split("; ")[-1] for signature in seen}
    assert ends == {"4 warps)", "4 warps, at most 128 registers)", "4 warps, at most 255 registers)"}


def test_an_empty_grid_launches_nothing() -> None:
    with launcher.recorded() as seen:
        assert run((0, 2)) == [0] * 6
    assert not seen


@pytest.mark.parametrize("grid", [(2**31,), (1, 65536), (1, 1, 65536), (1, 1, 1, 1), (-1,)])
def test_a_grid_that_cuda_does_not_take(grid: tuple[int, ...]) -> None:
    nowhere = torch.empty(6, dtype=torch.int32, device="meta")
    with pytest.raises(KernelRefused, match=r"turns_kernel.*grid of"):
        launcher.launch(turns_kernel, grid, nowhere, nowhere, 5, 7, None, BLOCK=32)


def test_tensors_of_two_devices() -> None:
    with pytest.raises(KernelRefused, match="turns is on meta, others are on cpu"):
        launcher.launch(turns_kernel, (1,), torch.empty(1), torch.empty(6, device="meta"), 5, 7, None, BLOCK=32)


def test_a_tensor_between_two_elements() -> None:
    with pytest.raises(KernelRefused, match="turns begins between two elements of 4 bytes"):
        run(turns=misaligned(torch.int32))


def test_a_compiled_kernel_runs_only_on_the_current_gpu(monkeypatch) -> None:
    compiled = JITFunction(turns_kernel.fn)
    with pytest.raises(KernelRefused, match="run on a GPU"):
        launcher.launch(compiled, (1,), torch.empty(1), torch.empty(1), 3, 4, None, BLOCK=32)
    monkeypatch.setattr(launcher, "current_device", lambda: 0)
    launcher.check_device(compiled, torch.device("cuda:0"))
    with pytest.raises(KernelRefused, match="tensors are on cuda:1, device 0 is the current one"):
        launcher.check_device(compiled, torch.device("cuda:1"))


def test_a_kernel_that_is_too_large_for_the_chip(monkeypatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OutOfResources(170_000, 101_376, "shared memory")

    monkeypatch.setattr(type(turns_kernel), "__getitem__", lambda kernel, grid: refuse)
    with pytest.raises(KernelRefused, match=r"turns_kernel needs 170000 of shared .* 101376: .*smaller tile"):
        run()


def test_programs_run_in_a_drawn_order_each_once() -> None:
    plain = run()
    with interpreter.shuffled(1):
        first = run()
    with interpreter.shuffled(1):
        again = run()
    with interpreter.shuffled(2):
        other = run()
    assert plain == run() == list(range(6)) == sorted(first) == sorted(other)
    assert first == again != other and first != plain
