"""What Baton sets for the shipped model, as benchmarks/first_answers.py measured."""

from __future__ import annotations

from shared.core.errors import ConfigError
from shared.core.sampling_params import SamplingValues

NAME = "smollm2"
SAMPLING = SamplingValues(temperature=0.2, top_p=0.9)
MAX_TOKENS = 1024  # of an answer without a limit: many a "hi" would run to the end of the context
# The system prompt of chats without one. The template's own makes the model talk about itself.
TEMPLATES_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
SYSTEM = "You are a helpful assistant. Answer with correct facts."


def max_tokens(model: str) -> int:
    """Return the limit on an answer whose request has none; 0 for no limit."""
    return MAX_TOKENS if model == NAME else 0


def with_system(template: str) -> str:
    """Return the model's template with Baton's default. Raise ConfigError if the template has another one."""
    if template.count(TEMPLATES_SYSTEM) != 1:
        raise ConfigError(f"--model {NAME}: its chat template is not the expected one; install the package again")
    return template.replace(TEMPLATES_SYSTEM, SYSTEM)
