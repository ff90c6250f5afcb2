"""Turn the bytes of one answer into a record, without socket or clock."""

from __future__ import annotations

import math

import httptools

from deploy.tools.traffic.figures.record import NOT_YET, RequestRecord
from deploy.tools.traffic.sse import DONE, Chunk, Splitter, decode_chunk, error_text

MAX_ERROR_BYTES = 4096
MAX_ERROR_CHARS = 200
AGAIN = (429, 502, 503, 504)  # attempts to resume that get such a status are repeated
CLIENTS_FAULT = "invalid_request_error"


class Exchange:
    """`is_over`: nothing more is expected. `may_reuse`: the connection can serve another request.

    `was_cut_off`: the connection closed before the answer's first byte. `was_lost`: the answer broke off, but may be
    resumed.
    """

    def __init__(self, record: RequestRecord, hang_up_after: int | None = None) -> None:
        self.record = record
        self.is_over = False
        self.may_reuse = False
        self.was_cut_off = False
        self.was_lost = False
        self._has_begun = False
        self._hang_up_after = hang_up_after
        self._parser = httptools.HttpResponseParser(self)
        self._splitter = Splitter()
        self._refusal = b""
        self._at = self._late = 0.0

    def was_sent(self, at: float) -> None:
        if self._hang_up_after == 0:
            self.leave(at)

    def feed(self, data: bytes, at: float, late: float) -> None:
        """Take bytes. `at`: their arrival time. `late`: the seconds since `at`; NaN if unknown."""
        self._has_begun = True
        self._at, self._late = at, late
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.fail(f"not HTTP: {error.__context__ or error}", at)

    def end_of_stream(self, at: float) -> None:
        if self._is_answered:
            self._answered(at)
        elif not self.is_over:
            self.was_cut_off = not self._has_begun
            self.was_lost = True
            self.fail("the connection closed before the end of the answer", at)

    def fail(self, error: str, at: float) -> None:
        if not self.is_over:
            self.record.error = error[:MAX_ERROR_CHARS]
            self._finish(at)

    def leave(self, at: float) -> None:
        if not self.is_over:
            self.record.hung_up = True
            self._finish(at)

    def reopen(self) -> None:
        self.was_cut_off = self.was_lost = False
        self.record.error, self.record.end, self.is_over = "", NOT_YET, False

    @property
    def can_go_on(self) -> bool:
        """Whether the answer can resume without repetition: the server sent event ids, or no token came."""
        return self.was_lost and bool(self._splitter.last_event_id or not self.record.at)

    def resume(self) -> str:
        """Prepare for a new connection. Return the Last-Event-ID to send; "" for none."""
        self.reopen()
        self._has_begun = False
        self._refusal = b""
        self._parser = httptools.HttpResponseParser(self)
        self._splitter.restart()
        self.record.num_resumed += 1
        return self._splitter.last_event_id

    @property
    def _is_answered(self) -> bool:
        return bool(self.record.finish_reason) and self.record.status == 200

    # the parser calls these methods

    def on_headers_complete(self) -> None:
        self.record.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self.is_over:
            return
        if self.record.status != 200:
            self._refusal = (self._refusal + body)[:MAX_ERROR_BYTES]
            return
        for data in self._splitter.feed_bytes(body):
            if data == DONE:
                self.record.end = self._at
            elif not self.is_over:
                self._take_chunk(decode_chunk(data))

    def on_message_complete(self) -> None:
        if self.record.status < 200:
            return  # an interim answer, such as 100 Continue
        was_over = self.is_over
        if self.record.status != 200:
            self.was_lost = bool(self.record.num_resumed) and self.record.status in AGAIN
            self.fail(f"{self.record.status} {refusal_text(self._refusal)}", self._at)
        elif not self._is_answered:
            self.was_lost = self.was_lost or not self.is_over
            self.fail("the stream ended without a finish reason", self._at)
        self._answered(self._at)
        self.may_reuse = self._parser.should_keep_alive() and not self.record.error and not was_over

    def _answered(self, at: float) -> None:
        """Finish the answer. It fails without tokens, or with fewer ids than the usage says."""
        num_ids, reported = len(self.record.ids), self.record.reported_tokens
        if not self.record.at:
            self.fail("an answer without a token", at)
        elif 0 < num_ids < reported:
            self.fail(f"{num_ids} token ids came, the usage says {reported}", at)
        self._finish(at)

    def _take_chunk(self, chunk: Chunk) -> None:
        if chunk.error is not None:
            self.was_lost = not (isinstance(chunk.error, dict) and chunk.error.get("type") == CLIENTS_FAULT)
            self.fail(error_text(chunk.error), self._at)
            return
        if chunk.usage is not None:
            self._note_usage(chunk)
        count = 0
        for choice in chunk.choices:
            ids, piece = choice.token_ids or [], choice.piece
            count += len(ids) or int(choice.has_text)
            self.record.ids.extend(ids)
            self.record.arguments += "".join(call.function.arguments or "" for call in choice.calls if not call.index)
            if piece:
                self.record.pieces.append(piece)
            self.record.finish_reason = choice.finish_reason or self.record.finish_reason
        if count:
            self.record.token(self._at, self._late, count)
            if len(self.record.at) == self._hang_up_after:
                self.leave(self._at)

    def _note_usage(self, chunk: Chunk) -> None:
        assert chunk.usage is not None
        self.record.prompt_tokens = chunk.usage.prompt_tokens
        self.record.reported_tokens = chunk.usage.completion_tokens
        if chunk.usage.prompt_tokens_details is not None:
            self.record.cached_tokens = chunk.usage.prompt_tokens_details.cached_tokens

    def _finish(self, at: float) -> None:
        if not self.is_over:
            self.is_over = True
            if math.isnan(self.record.end):  # [DONE] may have set it already
                self.record.end = at


def refusal_text(body: bytes) -> str:
    try:
        error = decode_chunk(body).error
    except ValueError:
        error = None
    return error_text(error) if error is not None else " ".join(body.decode("utf-8", "replace").split())
