"""`baton prove URL` on a server that lies as told: each lie is named, and a truthful server has a clean report."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from typing import Any

import pytest

from deploy import cli
from deploy.metrics_page import parse_page
from deploy.tools.prove import asks, truth_run
from deploy.tools.prove.asks import Ask
from deploy.tools.prove.counters import Moved, engine_of, moved
from deploy.tools.prove.partings import Parting, part
from deploy.tools.prove.recorded import RecordedAnswer, TokenScore, read_answer
from deploy.tools.prove.truths import check_prefixes
from tests.support.clusters.cluster import ROOT
from tests.support.machine.patience import HANG_GUARD_S
from tests.support.web.faulty_openai import AGAIN, CROWD, OTHERWISE, WHOLE, FaultyOpenAI, Lies
from tests.support.web.serving import serving


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asks, "STAGGER_S", 0.0)
    monkeypatch.setattr(truth_run, "METRICS_WAIT_S", 0.0)


def proved(lies: Lies, capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, dict[str, Any]]:
    with serving(FaultyOpenAI(lies)) as server:
        code = cli.main(["prove", server.url, "--max-tokens", "6", "--json", *flags])
    report = json.loads(capsys.readouterr().out)
    report["by_name"] = {check["name"]: check for check in report["checks"]}
    return code, report


def test_a_truthful_server_has_a_clean_report(capsys: pytest.CaptureFixture[str]) -> None:
    code, report = proved(Lies(), capsys)
    assert code == 0 and {check["verdict"] for check in report["checks"]} == {"ok"}, report["checks"]
    assert report["engine"] == "vLLM 0.0.1" and report["api"] == "chat completions"
    assert report["refused"].keys() == {"token ids"} and report["partings"] == []
    assert len(report["rows"]) == 5
    for row in report["rows"]:
        assert row["equal"] == {"greedy": [5, 5], "seeded": [4, 4], "structured": [2, 2]}
    texts = report["by_name"]
    assert "never tried" in texts["hand-offs"]["text"] and "never tried" not in texts["prefixes"]["text"]


LIES = {
    "a token changes in crowds": (Lies(changes=(CROWD,)), "streams", "in a crowd: 'short', token 3"),
    "a token changes after cache hits": (Lies(changes=(AGAIN,)), "streams", "again, from caches: 'short', token 3"),
    "a seed is not heeded": (Lies(changes=(OTHERWISE,), only="seeded"), "streams", "rounding does not explain it"),
    "scores move far": (Lies(moves=0.5), "repeated", "the noise is 0.25"),
    "a token too many": (
        Lies(usage={"completion_tokens": 1, "total_tokens": 1}),
        "usage",
        "7, but 6 tokens were shown",
    ),
    "a wrong sum": (Lies(usage={"total_tokens": 1}), "usage", "total_tokens is"),
    "a longer prompt": (Lies(longer_prompt_at=WHOLE), "usage", "for the same prompt before"),
    "more cached than there is": (Lies(cached=10_000), "usage", "10000 of"),
    "a better token": (Lies(hides_best=True), "logprobs", "but ' other' has"),
    "a sum above 1": (Lies(sums=True), "logprobs", "add up to"),
    "a counter that never moves": (Lies(counter_moves=False), "prefixes", "rose by 0"),
    "prose instead of JSON": (Lies(prose=True), "structured", "not JSON"),
    "too busy in a crowd": (Lies(fails_at=CROWD), "answers", "503 too busy"),
    "a stream breaks off": (Lies(breaks_at=AGAIN), "answers", "it broke off"),
}


@pytest.mark.parametrize("name", LIES)
def test_a_lie_is_named(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    lies, check, words = LIES[name]
    code, report = proved(lies, capsys)
    found = report["by_name"][check]
    assert code == 1 and found["verdict"] == "failed"
    assert words in " ".join([found["text"], *found["details"]])


def test_only_the_check_of_the_lie_fails(capsys: pytest.CaptureFixture[str]) -> None:
    _, report = proved(Lies(changes=(CROWD,), only="greedy"), capsys)
    assert [check["name"] for check in report["checks"] if check["verdict"] != "ok"] == ["streams"]
    (row,) = (row for row in report["rows"] if row["above"])
    assert row["way"] == "in a crowd" and row["equal"]["greedy"] == [0, 5] and row["equal"]["seeded"] == [4, 4]


def test_a_near_tie_is_a_row_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    lies = Lies(changes=(CROWD,), only="greedy", margin=0.2)
    code, report = proved(lies, capsys)
    assert code == 0 and report["by_name"]["streams"]["verdict"] == "ok"
    assert report["by_name"]["noise"]["verdict"] == "doubtful"
    assert "0.2000 apart: below the noise of 0.25" in report["by_name"]["noise"]["details"][0]
    assert [row["below"] for row in report["rows"]] == [0, 0, 5, 0, 0]
    code, report = proved(lies, capsys, "--dtype", "float16")  # whose noise is smaller
    assert code == 1 and report["by_name"]["streams"]["verdict"] == "failed"


def test_fields_that_are_taken_in_silence(capsys: pytest.CaptureFixture[str]) -> None:
    code, report = proved(Lies(ignores=("logprobs", "stream_options")), capsys)
    assert code == 0
    assert report["refused"]["logprobs"] == report["refused"]["usage in streams"]
    assert "the answer does not have it" in report["refused"]["logprobs"]


def test_without_structured_output_and_seeds(capsys: pytest.CaptureFixture[str]) -> None:
    code, report = proved(Lies(refuses=("response_format", "seed")), capsys)
    assert (
        code == 0 and report["by_name"]["structured"]["verdict"] == report["by_name"]["seeds"]["verdict"] == "skipped"
    )
    assert report["rows"][0]["equal"] == {"greedy": [5, 5], "seeded": [0, 0], "structured": [0, 0]}


def test_a_server_with_completions_only(capsys: pytest.CaptureFixture[str]) -> None:
    code, report = proved(Lies(chat=False, changes=(AGAIN,)), capsys)
    assert code == 1 and report["api"] == "completions"
    assert report["by_name"]["structured"]["text"].endswith("completions have no response_format")
    assert report["by_name"]["logprobs"]["verdict"] == "ok"
    assert "'short', token 3" in report["by_name"]["streams"]["details"][0]


def test_metrics_that_show_no_use(capsys: pytest.CaptureFixture[str]) -> None:
    code, report = proved(Lies(hands_over=False), capsys)
    assert code == 0 and "prove nothing" in report["by_name"]["hand-offs"]["text"]
    code, report = proved(Lies(has_metrics=False), capsys)
    assert code == 0 and report["by_name"]["hand-offs"]["verdict"] == "skipped" and "metrics" in report["refused"]
    assert report["by_name"]["prefixes"]["verdict"] == "ok" and "by usage" not in report["refused"]


def test_an_ignored_temperature(capsys: pytest.CaptureFixture[str]) -> None:
    code, report = proved(Lies(ignores=("seed",)), capsys)
    assert code == 0 and report["by_name"]["seeds"]["verdict"] == "doubtful"


def test_the_report_on_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(FaultyOpenAI(Lies(changes=(CROWD,)))) as server:
        assert cli.main(["prove", server.url, "--max-tokens", "6", "--salt", "s1"]) == 1
    printed = capsys.readouterr()
    assert "salt s1" in printed.out and "FAILED" in printed.out and "not offered: token ids" in printed.out
    assert "in a crowd: 17 of 17" in printed.err


GREEDY = Ask("g", "greedy", "p", {"temperature": 0.0})
SEEDED = Ask("s", "seeded", "p", {"temperature": 0.8})


def answer(*scores: TokenScore, finish: str = "length") -> RecordedAnswer:
    return RecordedAnswer("".join(one.token for one in scores), scores=scores, finish=finish)


def parted(ask: Ask, wanted: RecordedAnswer, got: RecordedAnswer) -> Parting:
    found = part("a way", ask, wanted, got, 0.25)
    assert found is not None
    return found


def test_a_token_outside_the_most_likely_ones_is_no_near_tie() -> None:
    first = TokenScore("a", -0.5, {"a": -0.5, "b": -0.6})
    found = parted(GREEDY, answer(first), answer(TokenScore("z", -9.0)))
    assert not found.below and "more than 0.1000 apart" in found.why


def test_an_answer_that_ends_early_is_judged_by_the_best_two() -> None:
    shared = TokenScore("a", -0.5, {"a": -0.5})
    for margin, below in ((0.1, True), (2.0, False)):
        last = TokenScore("b", -0.5, {"b": -0.5, "</s>": -0.5 - margin})
        for pair in (
            (answer(shared, last), answer(shared, finish="stop")),
            (answer(shared, finish="stop"), answer(shared, last)),
        ):
            found = parted(GREEDY, *pair)
            assert (found.position, found.below) == (1, below)
            assert found.margin == pytest.approx(margin)


@pytest.mark.parametrize(
    ("moved", "below"),
    [
        (0.0, False),  # equal distributions never draw differently
        (0.0001, False),  # too rare
        (0.02, True),
        (0.5, False),  # more than the number format's noise
    ],
)
def test_when_rounding_explains_another_draw(moved: float, below: bool) -> None:
    wanted = answer(TokenScore("a", -0.7, {"a": -0.7, "b": -0.8}))
    got = answer(TokenScore("b", -0.8, {"a": -0.7 - moved, "b": -0.8}))
    assert parted(SEEDED, wanted, got).below is below


NEVER = -math.inf


@pytest.mark.parametrize(
    ("wanted", "got"),
    [
        (TokenScore("a", NEVER, {"a": NEVER, "b": NEVER}), TokenScore("b", NEVER)),
        (TokenScore("a", NEVER, {"b": NEVER}), TokenScore("z", NEVER)),
        (TokenScore("a", NEVER, {"c": -1.0}), TokenScore("b", NEVER)),
        (TokenScore("a", NEVER, {"a": NEVER, "b": NEVER}), None),
    ],
)
def test_two_tokens_that_a_mask_forbids_have_no_margin(wanted: TokenScore, got: TokenScore | None) -> None:
    shared = TokenScore("s", -0.5, {"s": -0.5})
    found = parted(GREEDY, answer(shared, wanted), answer(shared, *([got] if got else ()), finish="stop"))
    assert found.margin is None and not found.below and "is unknown" in found.why


def test_a_forbidden_token_is_infinitely_far_from_another() -> None:
    first = TokenScore("a", -0.5, {"a": -0.5, "b": NEVER})
    found = parted(GREEDY, answer(first), answer(TokenScore("b", -0.1)))
    assert found.margin == math.inf and not found.below


def test_a_token_that_stays_forbidden_hides_no_move() -> None:
    forbidden = {f"z{number}": NEVER for number in range(100)}
    wanted = answer(TokenScore("a", -0.7, forbidden | {"a": -0.7, "b": -0.8}))
    got = answer(TokenScore("b", -0.8, forbidden | {"a": -2.7, "b": -0.8}))
    assert not parted(SEEDED, wanted, got).below


def test_a_hidden_last_token_is_not_a_difference() -> None:
    shown, hidden = (
        answer(TokenScore("a", 0.0), TokenScore("", 0.0), finish="stop"),
        answer(TokenScore("a", 0.0), finish="stop"),
    )
    assert part("w", GREEDY, shown, hidden, 0.25) is None
    assert parted(GREEDY, hidden, answer(TokenScore("a", 0.0))).unit == "end"  # for another reason


def test_other_forms_of_answers() -> None:
    thinking = {"choices": [{"message": {"reasoning_content": "hm", "content": "a"}, "finish_reason": "stop"}]}
    assert (read_answer([thinking]).thoughts, read_answer([thinking]).text) == ("hm", "a")
    assert "no finish_reason" in read_answer([{"choices": [{"delta": {"content": "a"}}]}]).error
    assert "in the stream: full" in read_answer([{"error": "full"}]).error
    assert "not OpenAI's form" in read_answer([{"choices": [3]}]).error


def test_engines_are_told_by_their_metrics() -> None:
    page = parse_page('dynamo_x 1\nvllm:y{engine="0"} 2\n')
    assert engine_of(page, "owner") == "vLLM with Dynamo" and engine_of(None, "owner") == "owner"
    assert engine_of(parse_page("baton_x 1\nvllm:y 1\n"), "baton") == "Baton"
    pages = [parse_page(f"llamacpp:prompt_tokens_cached_total {n}\n") for n in (10, 40)]
    assert engine_of(pages[0], "") == "llama.cpp"
    assert moved(*pages, lambda engine: engine.cached) == [Moved("llamacpp:prompt_tokens_cached_total", 30)]


@pytest.mark.parametrize(
    ("told", "risen", "verdict"),
    [
        (None, None, "skipped"),
        (5, None, "ok"),
        (None, 5, "ok"),
        (5, 5, "ok"),
        (5, 0, "failed"),  # usage tells of tokens that the counter has not seen
        (0, 5, "doubtful"),
        (0, 0, "doubtful"),  # no cache was used, so the streams prove nothing of it
        (None, 0, "doubtful"),
    ],
)
def test_caches_by_usage_and_by_counter(told: int | None, risen: int | None, verdict: str) -> None:
    assert check_prefixes(told, [] if risen is None else [Moved("counter", risen)]).verdict == verdict


def test_a_router_s_packages_are_enough() -> None:
    """People with another engine install only these: docs/is-your-cluster-telling-the-truth.md says so."""
    absent = "import sys; sys.modules.update(dict.fromkeys(['numpy', 'rich', 'torch', 'numba', 'xxhash', 'gguf']))"
    with serving(FaultyOpenAI(Lies())) as server:
        program = (
            f"{absent}; from deploy import cli; sys.exit(cli.main(['prove', '{server.url}', '--max-tokens', '2']))"
        )
        done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, timeout=HANG_GUARD_S)
    assert done.returncode == 0 and b"55 of 55 streams are equal" in done.stdout, done.stderr
