"""How long a test waits for what must happen: until it happens. Only a wait that hangs ends before it has."""

from __future__ import annotations

import os

# Many times what a slow and busy machine needs. Mutants hang on purpose, so their runs shorten it by the environment.
HANG_GUARD_S = float(os.environ.get("BATON_TEST_HANG_GUARD_S", "300"))
# After which a cluster under test takes a frozen peer for dead: longer than a busy machine keeps a living one from
# speaking, and each test that freezes somebody waits for it.
SILENCE_S = 4.0
# By cost an idle decode node takes nearly all prompts: a test about hand-offs says how long one has to be.
HANDS_OVER = ("--local-prefill-tokens", "32")
# Requests of tests say themselves how tokens are drawn; what they leave out does not depend on the model.
NEUTRAL_DEFAULTS = ("--sampling-defaults", "neutral")
# Nodes of tests compute on the CPU, on a machine with GPUs too.
ON_CPU = ("--device", "cpu")
# What those who ask wait for a node that is being started again, and a supervisor for processes that end: no test is
# about these bounds.
PATIENT_UP = ("--resume-wait-s", str(HANG_GUARD_S), "--stop-timeout-s", str(HANG_GUARD_S))
