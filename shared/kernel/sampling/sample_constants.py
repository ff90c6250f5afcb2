"""Constants of all samplers."""

from __future__ import annotations

import numpy as np

GREEDY_BELOW = 1e-5  # below this temperature, the largest logit wins
BARRED = np.float32(-1e30)  # logit of a bad word or an early stop id
