"""Sampling on a team: one share per output, in one call that releases the GIL."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from numba.np.numpy_support import carray

from shared.core.latest import Latest
from shared.kernel.jit import NUM_SHARES, compile_exact_task, floats_at, ints_at, longs_at
from shared.kernel.noise_numba import exact
from shared.kernel.program import Program
from shared.kernel.sample_cpu import draw_output
from shared.kernel.sample_edits import Outputs, RowParams
from shared.kernel.team import Team

ARRAYS = 2  # index of a task's first word that describes an array

_I64, _F32 = np.dtype(np.int64), np.dtype(np.float32)
PARAMS_DTYPES: tuple[np.dtype[Any], ...] = (_F32, _I64, _I64, _I64, _I64, _F32, *[_I64] * 6)
_I32, _U32 = np.dtype(np.int32), np.dtype(np.uint32)
OUTPUTS_DTYPES: tuple[np.dtype[Any], ...] = (_I64, _I64, _I64, _I32, _I64, _I32, _I64, _U32)


def sample_outputs(
    logits: npt.NDArray[np.float32], params: RowParams, outputs: Outputs, ids: npt.NDArray[np.int64], team: Team
) -> None:
    """Draw an id from each row of `logits` (E, V), and write it to `ids` (E,). The logits stay unchanged.

    Raise TypeError for a wrong dtype or a non-contiguous array."""
    words = [0] * ARRAYS + _words_of((logits, ids), (_F32, _I64))
    words += _words_of_params(params) + _words_of(outputs, OUTPUTS_DTYPES)
    program = Program(team, [make_sampler()], np.array([words], np.int64))
    program.words[0, NUM_SHARES] = len(ids)
    program.run()


def _words_of(arrays: Sequence[npt.NDArray[Any]], dtypes: Sequence[np.dtype[Any]]) -> list[int]:
    words: list[int] = []
    for array, dtype in zip(arrays, dtypes, strict=True):
        if array.dtype != dtype or not array.flags.c_contiguous:
            raise TypeError(f"the sampler takes contiguous {dtype}, not {array.dtype} {array.strides}")
        words += array.ctypes.data, array.shape[0], array.shape[-1]
    return words


# `Latest` keeps the arrays alive, whose addresses are in the words
_words_of_params: Latest[RowParams, list[int]] = Latest(lambda params: _words_of(params, PARAMS_DTYPES))


@functools.cache
def make_sampler() -> Any:
    def sample(words: Any, share: int, worker: int) -> None:
        first = ARRAYS
        logits, ids = _float_rows(words, first), _longs(words, first + 3)
        params, outputs = _params(words, first + 6), _outputs(words, first + 42)
        ids[share] = draw_output(logits[share], params, outputs, share)

    return compile_exact_task(sample)


@exact
def _params(words: Any, at: int) -> RowParams:
    return RowParams(
        _float_rows(words, at),
        carray(longs_at(words[at + 3]), (words[at + 4], words[at + 5])),
        _longs(words, at + 6),
        _longs(words, at + 9),
        _longs(words, at + 12),
        carray(floats_at(words[at + 15]), (words[at + 16],)),
        _longs(words, at + 18),
        _longs(words, at + 21),
        _longs(words, at + 24),
        _longs(words, at + 27),
        _longs(words, at + 30),
        _longs(words, at + 33),
    )


@exact
def _outputs(words: Any, at: int) -> Outputs:
    return Outputs(
        _longs(words, at),
        _longs(words, at + 3),
        _longs(words, at + 6),
        _int_rows(words, at + 9),
        _longs(words, at + 12),
        _int_rows(words, at + 15),
        _longs(words, at + 18),
        _int_rows(words, at + 21).view(np.uint32),
    )


@exact
def _longs(words: Any, at: int) -> npt.NDArray[np.int64]:
    return carray(longs_at(words[at]), (words[at + 1],))


@exact
def _float_rows(words: Any, at: int) -> npt.NDArray[np.float32]:
    return carray(floats_at(words[at]), (words[at + 1], words[at + 2]))


@exact
def _int_rows(words: Any, at: int) -> npt.NDArray[np.int32]:
    return carray(ints_at(words[at]), (words[at + 1], words[at + 2]))
