"""Codex, the program itself, alone in a network that has only Baton: the scripted model answers it."""

from __future__ import annotations

from tests.clients.agent_programs import CODEX, SPOKEN, run_codex, run_codex_built_in, said, session
from tests.clients.tally import Tally, from_arguments


def main(tally: Tally) -> None:
    with session(tally, CODEX, run_codex) as ask:
        with tally.check("a turn"):
            assert said(ask("say:hello there")) == "hello there"
        with tally.check("the session's second turn"):
            assert said(ask("resume", "--last", "say:hello again")) == "hello again"
        with tally.check("a call, and its result sent back"):
            told = said(ask(CODEX.call))
            assert told.startswith("The tool said: ") and told.endswith(SPOKEN), told
        with tally.check("an unknown model is told"):
            done = ask("say:x", model="no-such-model")
            assert done.status == 1 and "'no-such-model' does not exist" in done.printed + done.warned, done
    with session(tally, CODEX, run_codex_built_in) as ask, tally.check("its own provider at this address"):
        told = said(ask(CODEX.call))
        assert told.startswith("The tool said: ") and told.endswith(SPOKEN), told


if __name__ == "__main__":
    main(from_arguments())
