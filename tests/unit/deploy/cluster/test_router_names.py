"""What a router is called: as it was told, as its key says, or by chance; never like the next one by default."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from router.app import own_name
from shared.config.processes import ClusterConfig, RouterProcessConfig
from shared.config.settings.router_settings import RouterConfig
from shared.core.errors import ConfigError
from shared.wire.keys.keyring import ring_of_router
from tests.support.clusters.key_folders import make_keys


def test_routers_that_nobody_named_have_different_names() -> None:
    """All of them were called router, and two on the same nodes took each other for a former life."""
    names = {own_name(RouterProcessConfig(), None) for _ in range(50)}
    assert len(names) > 40 and all(re.fullmatch("router-[0-9a-f]{4}", name) for name in names)


def test_a_name_that_is_given_stays() -> None:
    assert own_name(RouterProcessConfig(router=RouterConfig(router_id="paris")), None) == "paris"


def test_a_key_s_name_is_the_router_s(tmp_path: Path) -> None:
    folder = make_keys(tmp_path / "keys", routers=("paris",))
    assert own_name(RouterProcessConfig(), ring_of_router(str(folder), "")) == "paris"


def test_of_several_keys_one_must_be_chosen(tmp_path: Path) -> None:
    folder = str(make_keys(tmp_path / "keys", routers=("paris", "rome")))
    with pytest.raises(ConfigError, match="2 routers' secrets .paris, rome.: choose with --router-id"):
        ring_of_router(folder, "")
    assert own_name(RouterProcessConfig(), ring_of_router(folder, "rome")) == "rome"


def test_the_router_of_a_cluster_on_one_machine_keeps_its_name() -> None:
    """Its series on /metrics would change with every start."""
    assert ClusterConfig().router_names == ("router",)
    given = ClusterConfig(router=RouterConfig(router_id="paris"))
    assert given.router_names == ("paris",)
    two = replace(given, local=replace(given.local, routers=2))
    assert two.router_names == ("paris-0", "paris-1")
