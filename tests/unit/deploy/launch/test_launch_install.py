"""Helm installs, upgrades and uninstalls the chart, on an API server that only keeps what it gets."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.house import chart
from tests.support.machine.kube_recorder import KubeRecorder
from tests.support.machine.patience import HANG_GUARD_S
from tests.support.web.serving import serving

pytestmark = pytest.mark.skipif(shutil.which("helm") is None, reason="there is no helm in PATH")
RELEASES = ("v1", "Secret")  # where Helm keeps what it has done


def run_helm(server: KubeRecorder, folder: Path, *words: str) -> None:
    server.write_config(folder / "kubeconfig")
    where = ("--namespace", chart.NAMESPACE, "--kubeconfig", str(folder / "kubeconfig"))
    subprocess.run(["helm", *words, *where], check=True, timeout=HANG_GUARD_S, capture_output=True)


def names(objects: Sequence[dict[str, object]]) -> list[tuple[str, str]]:
    return sorted((str(one["kind"]), one["metadata"]["name"]) for one in objects)  # type: ignore[index]


@pytest.mark.parametrize("name", chart.NAMES)
def test_helm_installs_upgrades_and_uninstalls(name: str, tmp_path: Path) -> None:
    _, rendered = chart.kept(name)
    kinds = {(one["apiVersion"], one["kind"]) for one in rendered}
    values = ("-f", f"{chart.CHART}/ci/{name}-values.yaml", "--disable-openapi-validation")
    with serving(KubeRecorder([*kinds, RELEASES])) as server:
        for command in ("install", "upgrade"):
            run_helm(server, tmp_path, command, chart.RELEASE, str(chart.CHART), *values)
            made = [one for one in server.objects.values() if one["kind"] != "Secret"]
            assert names(made) == names(rendered)
            sent = {(one["kind"], one["metadata"]["name"]): one.get("spec") for one in made}
            assert sent == {(one["kind"], one["metadata"]["name"]): one.get("spec") for one in rendered}
        run_helm(server, tmp_path, "uninstall", chart.RELEASE)
        assert not server.objects


def test_scaling_to_less_than_its_least_is_refused() -> None:
    scaling = "prefill.scaling.enabled=true,prefill.scaling.minReplicas=5"
    command = ["helm", "template", chart.RELEASE, str(chart.CHART), "--set", scaling]
    done = subprocess.run(command, check=False, timeout=HANG_GUARD_S, capture_output=True, text=True)
    assert done.returncode and "prefill.scaling: minReplicas is above maxReplicas" in done.stderr
