"""Sampling on a team: one share per output, in one call that releases the GIL."""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from numba.np.numpy_support import carray

from shared.kernel.code.jit import NUM_SHARES, compile_exact_task, floats_at, ints_at, longs_at
from shared.kernel.sampling.noise_numba import exact
from shared.kernel.sampling.sample_cpu import draw_output
from shared.kernel.sampling.sample_edits import Outputs, RowParams
from shared.kernel.team.program import Program
from shared.kernel.team.team import Team

ARRAYS = 2  # index of a task's first word that describes an array

_I64, _F32 = np.dtype(np.int64), np.dtype(np.float32)
PARAMS_DTYPES: tuple[np.dtype[Any], ...] = (_F32, _I64, _I64, _I64, _I64, _F32, *[_I64] * 6)
_I32, _U32 = np.dtype(np.int32), np.dtype(np.uint32)
OUTPUTS_DTYPES: tuple[np.dtype[Any], ...] = (_I64, _I64, _I64, _I32, _I64, _I32, _I64, _U32)


@dataclass(frozen=True)
class PlacedParams:
    """A batch's parameters, and where their arrays lie. It keeps these arrays alive."""

    params: RowParams

    @functools.cached_property
    def words(self) -> list[int]:
        return _words_of_all(PARAMS_DTYPES, self.params)


class TeamSampler:
    """Draws on one team, one batch at a time."""

    def __init__(self, team: Team) -> None:
        self._lock = threading.Lock()
        num_words = ARRAYS + 3 * (2 + len(PARAMS_DTYPES) + len(OUTPUTS_DTYPES))
        self._program = Program(team, [make_sampler()], np.zeros((1, num_words), np.int64))

    def draw(
        self, logits: npt.NDArray[np.float32], params: PlacedParams, outputs: Outputs, ids: npt.NDArray[np.int64]
    ) -> None:
        """Draw an id from each row of `logits` (E, V), and write it to `ids` (E,). The logits stay unchanged.

        Raise TypeError for a wrong dtype or a non-contiguous array."""
        with self._lock:
            words = [*_words_of(_F32, logits), *_words_of(_I64, ids), *params.words]
            words += _words_of_all(OUTPUTS_DTYPES, outputs)
            self._program.words[0, ARRAYS:] = words
            self._program.words[0, NUM_SHARES] = len(ids)
            self._program.run()


def _words_of(dtype: np.dtype[Any], array: npt.NDArray[Any]) -> tuple[int, int, int]:
    if array.dtype != dtype or not array.flags.c_contiguous:
        raise TypeError(f"the sampler takes contiguous {dtype}, not {array.dtype} {array.strides}")
    return array.ctypes.data, array.shape[0], array.shape[-1]


def _words_of_all(dtypes: Sequence[np.dtype[Any]], arrays: Sequence[npt.NDArray[Any]]) -> list[int]:
    words: list[int] = []
    for dtype, array in zip(dtypes, arrays, strict=True):
        words += _words_of(dtype, array)
    return words


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
