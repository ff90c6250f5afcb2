"""`baton prove URL` on servers that send odd things, hang, or are right in an unusual way: none is accused falsely."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from deploy import cli
from deploy.metrics_page import parse_page
from deploy.router_http import RouterHttp
from deploy.router_url import parse_url
from deploy.tools.prove import asks, served, truth_run, truths
from deploy.tools.prove.asks import SEEDED_ONE, SEEDED_OTHER, Ask, Way
from deploy.tools.prove.counters import Moved, moved
from deploy.tools.prove.partings import part
from deploy.tools.prove.recorded import RecordedAnswer, TokenScore, ToldUsage, read_answer
from deploy.tools.prove.served import AnyServer
from tests.support.machine.patience import HANG_GUARD_S
from tests.support.web.faulty_openai import CROWD, FaultyHandler, FaultyOpenAI, Lies
from tests.support.web.serving import serving

GREEDY = Ask("g", "greedy", "p", {"temperature": 0.0})


class OddHandler(FaultyHandler):
    """`server.odd` changes what is sent."""

    server: Any

    def _bytes(self, status: int, data: bytes) -> None:
        super()._bytes(status, self.server.odd(self.path, data))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(asks, "STAGGER_S", 0.0)
    monkeypatch.setattr(truth_run, "METRICS_WAIT_S", 0.0)
    faulty: Any = FaultyOpenAI(Lies())
    faulty.RequestHandlerClass, faulty.odd = OddHandler, lambda path, data: data
    with serving(faulty):
        yield faulty


def any_server(server: Any) -> AnyServer:
    return AnyServer(RouterHttp(parse_url(server.url), ""), "faulty", 6)


def greedy_of(server: Any) -> RecordedAnswer:
    (answer,) = any_server(server).perform([GREEDY], Way("alone"), lambda: None)
    return answer


def test_a_page_in_html_is_no_metrics(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    html = b"<html>\nLoading application\nvllm:x 1.2.3\nbaton_x 1 1700000000\n</html>"
    server.odd = lambda path, data: html if path == "/metrics" else data
    server.lies = Lies(penalises=True)  # and its greedy tokens are the most likely ones once it is asked not to
    assert cli.main(["prove", server.url, "--max-tokens", "2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["engine"] == "Baton 0.0.1"
    assert [(one.name, one.value) for one in parse_page(html.decode()).samples] == [("baton_x", 1.0)]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (b"data: {", b"data: " + b"[" * 100_000, "recursion"),
        (b'"index": 0', b'"index": 0, "token_ids": 3', "not OpenAI's form"),
        (b'"logprob": -9.0', b'"logprob": null', "not OpenAI's form"),
        (b'"content": "', b'"content": "\xff', "utf-8"),
        (b'data: {"choices"', b'data: {"error": "\\u001b[31m\\ud800", "choices"', "\\x1b[31m\\ud800"),
    ],
)
def test_odd_bytes_are_an_error_of_one_answer(server: Any, old: bytes, new: bytes, words: str) -> None:
    server.odd = lambda path, data: data.replace(old, new)
    (answer,) = with_scores(server).perform([GREEDY], Way("alone"), lambda: None)
    assert words in answer.error
    answer.error.encode()  # no half of a pair


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ('a_total{x="}"} 5 # {t="z"} 1.0', 5.0),  # an exemplar
        ('a_total{x="y",}\t6  1700000000.5', 6.0),
        ('a_total{x="\\"} 9"} 7', 7.0),
        ("a_total 1.5e+06", 1.5e6),
    ],
)
def test_forms_of_a_sample(line: str, value: float) -> None:
    assert parse_page(line).total("a_total") == value


def with_scores(server: Any) -> AnyServer:
    asked = any_server(server)
    asked.offers = served.Offers(True, served.LOGPROBS[True])
    return asked


def test_an_answer_without_end(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served, "MAX_BYTES", 64)
    assert "larger than 64 bytes" in greedy_of(server).error
    monkeypatch.setattr(served, "TIMEOUT_S", 50.0)
    ticks = iter(range(0, 10_000, 30))
    monkeypatch.setattr(served, "time", SimpleNamespace(monotonic=lambda: next(ticks), sleep=lambda s: None))
    drops = SimpleNamespace(read1=lambda most: b":")
    with pytest.raises(TimeoutError, match="after 50 s"):
        list(served.pieces(drops))  # type: ignore[arg-type]


def test_a_server_that_hangs_is_asked_three_times(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, sent = any_server(server), []

    def hang(*args: object) -> object:
        sent.append(args)
        raise TimeoutError("timed out")

    monkeypatch.setattr(asked._http, "opened", hang)
    answers = asked.perform([GREEDY] * 5, Way("alone"), lambda: None)
    assert len(sent) == 3 and [one.error[:9] for one in answers] == ["no answer"] * 3 + ["not sent:"] * 2
    assert not any(one.is_refused for one in answers)


def test_ctrl_c_does_not_wait_for_answers(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ended, waited, once = threading.Event(), list[bool](), threading.Lock()
    server.lies = Lies(fails_at=CROWD)

    def odd(path: str, data: bytes) -> bytes:
        if b"too busy" in data and len(server.asked) > 1:  # not yet the requests that find the offers
            if once.acquire(blocking=False):
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            waited.append(ended.wait(HANG_GUARD_S))
        return data

    server.odd = odd
    before = {thread for thread in threading.enumerate() if not thread.daemon}
    assert cli.main(["prove", server.url, "--max-tokens", "2"]) == 130
    assert not waited  # all still wait
    assert {thread for thread in threading.enumerate() if not thread.daemon} == before
    ended.set()


def test_only_choice_0_counts() -> None:
    choices = [{"index": i, "text": "ab"[i], "finish_reason": "stop"} for i in (0, 1)]
    assert read_answer([{"choices": choices}]).text == "a"
    assert "OverflowError" in read_answer([{"usage": {"prompt_tokens": float("inf")}}]).error


@pytest.mark.parametrize("value", [1000.0, float("nan"), float("inf")])
def test_no_number_is_a_log_probability_above_0(value: float) -> None:
    for one in (TokenScore("a", -1.0, {"a": -1.0, "b": value}), TokenScore("a", value)):
        assert "not 0 or below" in truths.untrue_score(one, is_greedy=False)
    assert not truths.untrue_score(TokenScore("", -3.0, {"": -1.0, "b": -2.0}), is_greedy=False)  # half a character


def test_thoughts_may_fill_an_answer() -> None:
    thinking = RecordedAnswer("", "hm", finish="length")
    assert not truths.misfit(thinking) and truths.misfit(RecordedAnswer("", "hm", finish="stop"))
    other = RecordedAnswer("", "ah", finish="length")
    seeded = (Ask(SEEDED_ONE, "seeded", ""), Ask(SEEDED_OTHER, "seeded", ""))
    group = truths.AskedGroup(seeded, {"alone": [thinking, other]})
    assert truths.check_seeds(group).verdict == "ok"


def test_tokens_around_thoughts_may_be_hidden() -> None:
    marks, hm = TokenScore("<think>", -0.1), TokenScore("hm", -0.1)
    whole = RecordedAnswer("", "hm", (), (marks, hm), "length", ToldUsage(3, 2, 5))
    stream = RecordedAnswer("", "hm", (), (hm,), "length", ToldUsage(3, 2, 5))
    assert part("w", GREEDY, stream, whole, 0.25) is None
    assert not truths.untrue_usage(GREEDY, stream, whole, 2)
    longer = RecordedAnswer("", "hm", (), (hm,), "length", ToldUsage(3, 0, 3))
    assert "1 tokens were shown" in truths.untrue_usage(GREEDY, longer, whole, 2)
    other = RecordedAnswer("", "ah", (), (TokenScore("ah", -0.1),), "length")
    assert part("w", GREEDY, stream, other, 0.25) is not None


def test_tokens_inside_a_character_may_be_hidden() -> None:
    """llama.cpp's server shows a character with the token that completes it, and the others not at all."""

    def untrue(text: str, finish: str, completion: int) -> str:
        told = ToldUsage(3, completion, 3 + completion)
        one = RecordedAnswer(text, "", (), (TokenScore(text, -0.1),), finish, told)
        return truths.untrue_usage(GREEDY, one, one, completion)

    assert not untrue("\u20ac", "stop", 4)  # three bytes, and the token that ends the answer
    assert "5, but 1 tokens were shown" in untrue("\u20ac", "stop", 5)
    assert not untrue("a", "length", 4)  # cut off inside a character of four bytes
    assert "5, but 1 tokens were shown" in untrue("a", "length", 5)


def test_a_grammar_s_choice_is_less_likely_than_those_shown() -> None:
    """llama.cpp's server shows the scores from before the grammar, and hides what it strips around an object."""
    ask = Ask("j", "structured", "p", {"temperature": 0.0})
    told = ToldUsage(3, 9, 12)
    fenced = RecordedAnswer("{}", "", (), (TokenScore("```", -5.0, {"a": -0.1, "b": -3.0}),), "stop", told)
    for logprob, below in ((-5.1, True), (-8.0, False)):
        plain = RecordedAnswer("{}", "", (), (TokenScore("{", logprob, {"a": -0.1, "b": -3.0}),), "stop", told)
        found = part("w", ask, fenced, plain, 0.25)
        assert found is not None and found.below is below and found.margin == pytest.approx(-5.0 - logprob)
    shown = (*fenced.scores, TokenScore("{}", -0.1))
    assert part("w", ask, fenced, RecordedAnswer("{}", "", (), shown, "length", told), 0.25) is not None
    assert (
        part("w", ask, RecordedAnswer("{}", "", (), shown[1:], "stop", told), replace(fenced, scores=shown), 0.25)
        is None
    )
    assert not truths.untrue_usage(ask, fenced, fenced, 48)
    assert "9, but 1 tokens were shown" in truths.untrue_usage(GREEDY, fenced, fenced, 48)


def test_hidden_tokens_are_no_others() -> None:
    """Around an object nothing is hidden but what the longer stream has more; a server that shows ids hides none."""
    ask = Ask("j", "structured", "p", {"temperature": 0.0})

    def of(ids: tuple[int, ...], *tokens: str) -> RecordedAnswer:
        return RecordedAnswer("{}", "", ids, tuple(TokenScore(one, -0.1) for one in tokens), "stop")

    for one, other in ((of((1, 2)), of((3,))), (of((), "{", "}"), of((), "{}"))):
        assert part("w", ask, one, other, 0.25) is not None and part("w", ask, other, one, 0.25) is not None
    assert part("w", ask, of((), "{}"), of((), "`", "{}", "`"), 0.25) is None
    for kind, finish, completion in (("structured", "stop", 9), ("greedy", "length", 3), ("greedy", "stop", 4)):
        told = ToldUsage(3, completion, 3 + completion)
        shown = RecordedAnswer("\u20ac", "", (1, 2), (), finish, told)
        wrong = truths.untrue_usage(replace(ask, kind=kind), shown, shown, completion)
        assert wrong == f"completion_tokens is {completion}, but 2 tokens were shown"


def test_a_near_tie_is_one_for_both_streams() -> None:
    def one_token(token: str, a: float, b: float) -> RecordedAnswer:
        top = {"a": a, "b": b}
        return RecordedAnswer(token, scores=(TokenScore(token, top[token], top),), finish="length")

    for b, below in ((-0.9, True), (-0.2, False)):  # with b far above a, the second stream had other logits
        found = part("w", GREEDY, one_token("a", -1.0, -1.1), one_token("b", -1.0, b), 0.25)
        assert found is not None and found.below is below


def test_a_page_without_a_counter_tells_nothing() -> None:
    before, after = (parse_page(f"llamacpp:prompt_tokens_total {n}\n") for n in (10, 40))
    assert moved(before, after, lambda engine: engine.cached) == []
    assert truths.check_prefixes(8, [Moved("c", 0.0)]).verdict == "failed"
    assert truths.check_prefixes(8, [Moved("c", -9.0)]).verdict == "doubtful"  # another replica's page


def test_a_limit_on_rates_is_no_failure() -> None:
    group = truths.AskedGroup([GREEDY], {"alone": [RecordedAnswer(error="429", status=429)]})
    assert truths.check_replies([group]).verdict == "doubtful"
    both = {"alone": [RecordedAnswer(error="429", status=429)], "again": [RecordedAnswer(error="x", status=500)]}
    assert truths.check_replies([truths.AskedGroup([GREEDY], both)]).verdict == "failed"
