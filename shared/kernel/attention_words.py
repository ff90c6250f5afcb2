"""The words of attention's two tasks: what one layer's tasks are given, and what all layers of a step share."""

from __future__ import annotations

# The words of a task's arguments, behind NUM_ROWS and NUM_SHARES; NUM_ROWS counts tokens.
STEP, QKV, Q_NORM, K_NORM, KEYS, VALUES, OUT, COS, SIN, WINDOW = range(2, 12)
KEY_SCALES, VALUE_SCALES = 12, 13  # where pages hold bytes
NUM_WORDS = 14
# The words that all layers of a step share, at the address STEP.
ROWS, POSITIONS, TABLE, TABLE_STRIDE, PAGE_BYTES, PAGE_SIZE = range(6)
QUERIES, SCORE_BYTES, SLOTS, VISIBLE = range(6, 10)
RUNS, NUM_RUNS = 10, 11  # where each run of tokens begins, and behind the last one
RUN_TOKENS = 12  # most of one run
SCRATCH, SCRATCH_BYTES = 13, 14  # of all threads, and of one
SCALE_PAGE_BYTES = 15  # from a page's scales to the next page's
NUM_STEP_WORDS = 16
