"""Claude Code, the program itself, alone in a network that has only Baton: the scripted model answers it."""

from __future__ import annotations

from tests.clients.agent_programs import CLAUDE_CODE, ONLY_BEARER, SPOKEN, run_claude_code, said, session
from tests.clients.tally import Tally, from_arguments


def main(tally: Tally) -> None:
    with session(tally, CLAUDE_CODE, run_claude_code) as ask:
        with tally.check("a turn"):
            assert said(ask("say:hello there")) == "hello there"
        with tally.check("the session's second turn"):
            assert said(ask("say:hello again", "--continue")) == "hello again"
        with tally.check("a bearer token"):
            assert said(ask("say:hello there", settings=ONLY_BEARER)) == "hello there"
        with tally.check("a call, and its result sent back"):
            assert said(ask(CLAUDE_CODE.call)) == f"The tool said: {SPOKEN}"
        with tally.check("an unknown model is told"):
            done = ask("say:x", model="no-such-model")
            assert done.status == 1 and "selected model (no-such-model)" in done.printed + done.warned, done


if __name__ == "__main__":
    main(from_arguments())
