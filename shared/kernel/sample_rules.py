"""Constants that the samplers of all devices share."""

from __future__ import annotations

import numpy as np

GREEDY_BELOW = 1e-5  # with a lower temperature, the largest logit is drawn
BARRED = np.float32(-1e30)  # logit of a bad word or an early stop id
