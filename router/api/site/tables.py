"""The generating endpoints, the tables of all bodies, and the names of their fields."""

from __future__ import annotations

from typing import Any

from router.api.anthropic.messages import COUNT_TOKENS, Messages
from router.api.ask.generation_api import GenerationApi
from router.api.fields.fields import FieldTable
from router.api.ollama.ollama import OllamaChat, OllamaGenerate
from router.api.ollama.ollama_models import SHOW
from router.api.openai.chat import Chat
from router.api.openai.completions import Completions
from router.api.openai.responses import Responses
from router.api.openai.tokenization import DETOKENIZE, TOKENIZE

APIS: tuple[GenerationApi[Any], ...] = (Chat(), Completions(), Messages(), Responses(), OllamaChat(), OllamaGenerate())
ALL_TABLES: tuple[FieldTable[Any], ...] = (*(api.table for api in APIS), COUNT_TOKENS, TOKENIZE, DETOKENIZE, SHOW)
# the labels of a metric; clients' own names are not among them, because their number has no bound
KNOWN_FIELDS = frozenset(name for table in ALL_TABLES for name in table.ignored)
