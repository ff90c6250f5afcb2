"""What a page's KV is a function of, as 16 bytes: the keys of its own tokens and of all tokens before them.

    ROOT -> identity of page 0 -> identity of page 1 -> ...         the last one may be of a page that is not full

A cryptographic hash, for the keys are token ids that clients choose: equal identities are taken for equal KV.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

IDENTITY_BYTES = 16
ROOT = bytes(IDENTITY_BYTES)


def child_identity(parent: bytes, key: bytes) -> bytes:
    """Of the page whose keys are `key` (int64 each), behind the page `parent`."""
    return hashlib.blake2b(parent + key, digest_size=IDENTITY_BYTES).digest()


def identities(keys: npt.NDArray[np.int64], page_size: int) -> Iterator[bytes]:
    """Of each page that these keys, from a request's first token on, fill or begin."""
    data = np.ascontiguousarray(keys, dtype=np.int64).tobytes()
    width, parent = page_size * 8, ROOT
    for start in range(0, len(data), width):
        parent = child_identity(parent, data[start : start + width])
        yield parent
