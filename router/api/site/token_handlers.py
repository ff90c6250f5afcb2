"""The handlers of paths that count tokens or show them."""

from __future__ import annotations

from functools import partial

import msgspec

from router.api.anthropic.messages import COUNT_TOKENS, FUNCTIONS, counted
from router.api.openai.tokenization import DETOKENIZE, TOKENIZE, detokenized, tokenized, tokenizer_info
from router.api.site.body_reader import BodyReader
from router.api.site.served_model import ServedModel
from router.http.connection import Connection
from router.tools.schemas.declared import skipped_tools


class TokenHandlers:
    def __init__(self, model: ServedModel, bodies: BodyReader) -> None:
        self._model, self._bodies = model, bodies
        self._count_tokens, self._tokenize = bodies.parser(COUNT_TOKENS), bodies.parser(TOKENIZE)
        self._detokenize = bodies.parser(DETOKENIZE)

    async def count_tokens(self, connection: Connection) -> None:
        resolver = self._model.resolver_for(connection.tenant)
        make = partial(counted, resolver=resolver, headers=connection.more_headers)
        await self._bodies.answer(
            connection, self._count_tokens, make, lambda body: skipped_tools(body.tools, FUNCTIONS)
        )

    async def tokenize(self, connection: Connection) -> None:
        resolver, headers = self._model.resolver_for(connection.tenant), connection.more_headers
        make = partial(tokenized, resolver=resolver, max_context=self._model.max_context(), headers=headers)
        await self._bodies.answer(connection, self._tokenize, make)

    async def detokenize(self, connection: Connection) -> None:
        resolver = self._model.resolver_for(connection.tenant)
        await self._bodies.answer(connection, self._detokenize, partial(detokenized, resolver=resolver))

    async def tokenizer_info(self, connection: Connection) -> None:
        await connection.answer(200, msgspec.json.encode(tokenizer_info(self._model.resolver.text)))
