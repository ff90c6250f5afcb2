"""FlashInfer's attention beside our reference on the same device: what `baton doctor --gpu` compares, and 8B's."""

from __future__ import annotations

import torch

from shared.core import extras
from shared.kernel.attention.attention import AttentionShape
from shared.kernel.attention.flash_check import MOST_DIFFERENCE, compare_attention, differences
from shared.kernel.attention.flash_infer import MODULE, installed_version
from tests.gpu.place import Place
from tests.gpu.plan import NotHere

REAL = AttentionShape(32, 8, 128, 1e-5)  # Llama-3.1-8B


def attention(place: Place) -> dict[str, object]:
    """On the virtual GPU, of a fake with the library's signatures."""
    if place.tiny:
        from tests.support.gpus.fake_flashinfer import library_on

        with library_on(place.gpu):  # type: ignore[arg-type]
            return {"largest difference of FlashInfer's attention": near(compare_attention(place.gpu, device(place)))}
    if not installed_version():
        raise NotHere(extras.missing(MODULE, "this check"))
    stream = place.gpu.new_stream(device(place))
    with torch.inference_mode(), place.gpu.use_stream(stream):
        real = max(differences(place.gpu, device(place), REAL, torch.bfloat16))
    return {
        "largest difference of FlashInfer's attention": near(compare_attention(place.gpu, device(place))),
        "largest difference of FlashInfer's attention, 8B": near(real),
    }


def device(place: Place) -> torch.device:
    found: torch.device = place.gpu.device
    return found


def near(difference: float) -> float:
    assert difference <= MOST_DIFFERENCE, f"FlashInfer's attention is {difference} from the reference"
    return difference
