"""The patience of a link follows from the one setting, for every value that it may have."""

from __future__ import annotations

import pytest

from shared.config.settings.settings import NodeConfig, TimeoutsConfig
from shared.config.settings.silence import link_silence

LONGEST_FREEZE_S, LONGEST_PAUSE_S = 1.0, 2.0
FOR_AN_ANSWER_S = 0.4  # what a busy machine may take to wake somebody who was frozen for a second
FOR_GOING_ON_S = 0.3  # what is left for another node to go on with a stream


def test_by_default_a_second_is_forgiven_and_two_are_not_needed() -> None:
    silence = link_silence(TimeoutsConfig().node_silence_s)
    assert silence.shortest_s > LONGEST_FREEZE_S + FOR_AN_ANSWER_S
    assert silence.longest_s < LONGEST_PAUSE_S - FOR_GOING_ON_S


def test_both_ends_of_a_link_have_the_same_patience() -> None:
    assert NodeConfig().silence_s == TimeoutsConfig().node_silence_s


@pytest.mark.parametrize("setting_s", [0.5, 1.0, 5.0, 30.0, 600.0])
def test_a_link_s_patience_is_a_share_of_the_setting(setting_s: float) -> None:
    silence = link_silence(setting_s)
    assert silence.longest_s == pytest.approx(setting_s / 3, rel=0.01)
    assert silence.ping_ms / 1000 == pytest.approx(min(setting_s / 20, 0.25), rel=0.01)
