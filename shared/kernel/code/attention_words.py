"""Word indices for attention's two tasks."""

from __future__ import annotations

# Words of a task, after NUM_ROWS (the number of tokens) and NUM_SHARES.
STEP, QKV, Q_NORM, K_NORM, KEYS, VALUES, OUT, COS, SIN, WINDOW = range(2, 12)
KEY_SCALES, VALUE_SCALES = 12, 13  # used only if pages hold bytes
NUM_WORDS = 14
# Words of attention over pages that hold one token after another (attend_tokens.py), which has no rope and no norms.
# SCALE: the factor of scores, divided by the softcap if there is one. SCALE, SOFTCAP: float32 bits. NUM_UNREAD: how
# many of a row's first keys no other token reads.
NEW_KEYS, NEW_VALUES, NUM_KV_HEADS, SCALE, SOFTCAP, SINKS, NUM_UNREAD = range(14, 21)
NUM_TOKEN_WORDS = 21
# Words that a step's layers share, at the address in STEP.
ROWS, POSITIONS, TABLE, TABLE_STRIDE, PAGE_BYTES, PAGE_SIZE = range(6)
QUERIES, SCORE_BYTES, SLOTS, VISIBLE = range(6, 10)
RUNS, NUM_RUNS = 10, 11  # RUNS: address of AttentionStep._find_runs' result
RUN_TOKENS = 12  # the most tokens of a run
SCRATCH, SCRATCH_BYTES = 13, 14  # address of thread 0's scratch; bytes per thread
SCALE_PAGE_BYTES = 15  # bytes from a page's scales to the next page's scales
SLOT_BYTES, SCALE_SLOT_BYTES = 16, 17  # bytes from a token to the next one, in pages that hold one after another
NUM_STEP_WORDS = 18
