"""Kernels are looked up once per signature: what is launched afterwards is what Triton would launch."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shared.core.errors import KernelRefused

interpreter = pytest.importorskip("tests.support.kernels.interpreter", exc_type=ImportError)
launcher, bound_kernels = interpreter.kernels("launch.launcher"), interpreter.kernels("launch.bound")

import triton.language as tl  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from tests.support.kernels.launch_cost import STREAM, FakeDriver, costs, fake_driver  # noqa: E402


def tiny_kernel(x, y, number, free, factor, BLOCK: tl.constexpr):
    tl.store(y + tl.program_id(0), tl.load(x) * number * free * factor * BLOCK)


def optional_kernel(x, y, number, free, factor, BLOCK: tl.constexpr):
    tl.store(y + tl.program_id(0), tl.load(x) * number * free * BLOCK)


compiled = JITFunction(tiny_kernel, do_not_specialize=["free"])
optional = JITFunction(optional_kernel)
FLOATS, INTS = torch.zeros(64), torch.zeros(64, dtype=torch.int32)
USUAL: dict[str, Any] = {"x": FLOATS, "number": 5, "free": 7, "factor": 0.5, "BLOCK": 32, "grid": (3,), "num_warps": 4}


@pytest.fixture
def fake() -> Iterator[FakeDriver]:
    for kernel in (compiled, optional):
        kernel.device_caches.clear()  # what was compiled launches by the driver of that time
    with fake_driver(launcher) as driver:
        yield driver


@pytest.fixture
def looked_up(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each launch by Triton."""
    seen, run = list[int](), JITFunction.run

    def heard(self: JITFunction, *args: object, **more: object) -> object:
        seen.append(1)
        return run(self, *args, **more)

    monkeypatch.setattr(JITFunction, "run", heard)
    return seen


def launch(**changes: Any) -> None:
    given = USUAL | changes
    x, grid, warps = given["x"], given["grid"], given["num_warps"]
    args = (given["number"], given["free"], given["factor"])
    launcher.launch(compiled, grid, x, FLOATS, *args, num_warps=warps, BLOCK=given["BLOCK"])


def told(launched: tuple[object, ...]) -> list[object]:
    """What CUDA gets: grid, stream, function, metadata; and values, with a tensor's address for a tensor."""
    values = [one.data_ptr() if isinstance(one, torch.Tensor) else one for one in launched[9:]]
    return [*launched[:6], *values]


OTHERS: list[dict[str, Any]] = [
    {"x": INTS}, {"x": FLOATS[1:]}, {"x": FLOATS[1:], "number": 16}, {"number": 1}, {"number": 16}, {"number": 2**40},
    {"free": 2**40}, {"factor": 2}, {"factor": True}, {"BLOCK": 64}, {"num_warps": 2},
]  # fmt: skip
ALIKE: list[dict[str, Any]] = [
    {"number": 17}, {"free": 1}, {"free": 16}, {"factor": 1.0}, {"grid": (2, 3, 4)}, {"x": torch.zeros(9)},
]  # fmt: skip


def test_every_other_signature_is_looked_up_once(fake: FakeDriver, looked_up: list[int]) -> None:
    launch()
    for number, changes in enumerate(OTHERS, start=2):
        for _ in range(2):
            launch(**changes)
            assert len(looked_up) == number, changes
        by_triton, bound = fake.launched[-2:]
        assert told(bound) == told(by_triton), changes


def test_equal_signatures_are_found_whatever_their_values(fake: FakeDriver, looked_up: list[int]) -> None:
    for changes in ({}, *ALIKE):
        launch(**changes)
        given = USUAL | changes
        values = [given["x"].data_ptr(), FLOATS.data_ptr(), given["number"], given["free"], given["factor"], 32]
        assert told(fake.launched[-1])[6:] == values
        assert told(fake.launched[-1])[:4] == [*(*given["grid"], 1, 1)[:3], STREAM]
    assert len(looked_up) == 1


def test_what_a_bound_kernel_does_not_take_is_refused_as_before(fake: FakeDriver) -> None:
    launch()
    with pytest.raises(KernelRefused, match="begins between two elements"):
        launch(x=torch.frombuffer(bytearray(65), dtype=torch.float32, count=2, offset=1))
    with pytest.raises(KernelRefused, match="a grid of"):
        launch(grid=(1, 70_000))
    assert len(fake.launched) == 1


def test_a_key_names_each_tensor_s_device() -> None:
    """A kernel that was bound for one device's tensors must not get an address of another's."""
    read = bound_kernels.make_reader((bound_kernels.TENSOR, bound_kernels.TENSOR))

    def on(device: int) -> Any:
        return SimpleNamespace(dtype=torch.float32, data_ptr=lambda: 4096, get_device=lambda: device)

    keys = [read(on(first), on(second))[0] for first, second in ((0, 0), (0, -1), (-1, 0), (1, 1))]
    assert len({*keys}) == 4 and read(on(0), on(0)) == (keys[0], (4096, 4096))


def test_a_tensor_may_stand_where_none_was(fake: FakeDriver, looked_up: list[int]) -> None:
    """Optional tensors: None is compiled in, and an address is not."""
    given = (FLOATS, FLOATS, 5, 7)
    for factor in (None, FLOATS, None, FLOATS, 0.5):
        launcher.launch(optional, (1,), *given, factor, BLOCK=32)
        last = fake.launched[-1][9:]
        assert (last[4].data_ptr() if isinstance(last[4], torch.Tensor) else last[4]) == (
            FLOATS.data_ptr() if factor is FLOATS else factor
        )
    assert len(looked_up) == 3


def test_on_another_current_device_the_launcher_looks_again(fake: FakeDriver) -> None:
    launch()
    launch()
    assert len(fake.checked) == 1
    fake.device = 1
    launch()
    assert len(fake.checked) == 2


def test_bound_launches_are_recorded_too(fake: FakeDriver) -> None:
    launch()
    with launcher.recorded() as seen:
        launch()
    assert len(seen) == 1 and len(fake.launched) == 2


def test_a_bound_launch_calls_half_as_much(fake: FakeDriver) -> None:
    """Counted, not timed; `python -m tests.support.kernels.launch_cost` times real kernels."""
    triton_s, bound = costs(launcher, launch)
    print(triton_s, bound)
    assert 2 * bound.calls <= triton_s.calls, (triton_s, bound)
