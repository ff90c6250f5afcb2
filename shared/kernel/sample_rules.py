"""What the samplers of all devices hold to."""

from __future__ import annotations

import numpy as np

GREEDY_BELOW = 1e-5  # a temperature below it means argmax
BARRED = np.float32(-1e30)  # logit of a bad word or a stop id that comes too early: drawn where nothing else is left
