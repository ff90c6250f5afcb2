"""`baton cache` lists the files of packed weights, and removes them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from deploy import cli
from shared.kernel.product.product import supports
from shared.model.formats.opened import LoadOptions
from shared.model.formats.packed_folder import PackedFolder
from shared.model.loading.load import load_model
from tests.support.models.tiny_llama import write_tiny_llama


@pytest.mark.skipif(not supports(64, torch.float32), reason="nothing is packed on this processor")
def test_the_command_lists_and_removes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    cache = tmp_path / "cache" / "baton" / "packed"
    assert cli.main(["cache"]) == 0 and "no packed weights" in capsys.readouterr().out
    model = write_tiny_llama(tmp_path / "model")
    kept = load_model(str(model), LoadOptions("float32", packed=PackedFolder(cache, 1 << 30)))
    assert cli.main(["cache"]) == 0
    told = capsys.readouterr().out
    assert told.startswith(f"1 file, 1 MiB, in {cache}\n") and f"in use {kept.spec.name} float32 auto" in told
    assert cli.main(["cache", "clear"]) == 0 and "removed from" in capsys.readouterr().out
    assert list(cache.glob("*.packed")) == []
    cache.chmod(0o755)
    assert cli.main(["cache"]) == 2 and "mode 0700" in capsys.readouterr().err
