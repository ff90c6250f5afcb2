"""Which layers of a library model share a page, and in which page group it is."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from shared.kv.layer_groups import MOST_GROUPS, group_layers
from shared.kv.layout import page_windows
from shared.model.library.attend.layer_places import LayerShape, places_of

ONE = LayerShape(2, 8, 8, torch.bfloat16)


def layers_of(pattern: str, window: int = 16) -> list[LayerShape]:
    """`.`: a layer that reads all tokens; `w`: one with the window; `n`: one with a narrower window."""
    return [replace(ONE, window={".": 0, "w": window, "n": window // 2}[mark]) for mark in pattern]


@pytest.mark.parametrize(
    ("pattern", "windows", "per_page"),
    [
        ("wwww", (16,), 4),
        ("w.w.", (0, 16), 2),
        ("wwwww." * 5 + "wwww", (0, *[16] * 6), 5),  # Gemma 3 4B's: 5 and 29
        ("wwwww." * 10 + "ww", (0, *[16] * 6), 10),  # 27B's: 10 and 52, eight slots are empty
        ("wn" * 4, (8, 16), 4),
        ("w" * 40 + ".", (0, *[16] * 7), 6),  # one page in seven holds a single layer: no more groups than MOST_GROUPS
    ],
)
def test_layers_of_unlike_windows_are_in_groups_of_equal_pages(
    pattern: str, windows: tuple[int, ...], per_page: int
) -> None:
    layers = layers_of(pattern)
    places = places_of(layers)
    planes = places.specs(page_size=4)
    assert page_windows(planes) == windows and len(windows) <= MOST_GROUPS
    assert [plane.shape[0] for plane in planes] == [per_page]
    assert len({(place.group, place.slot) for place in places.layers}) == len(layers), "no two share a place"
    for layer, place in zip(layers, places.layers, strict=True):
        assert layer.window == windows[place.group] and place.slot < per_page


def test_a_slot_counts_as_written_when_all_groups_have_it() -> None:
    places = places_of(layers_of("ww.ww."))
    assert [place.num_whole for place in places.layers] == [0, 0, 1, 1, 1, 2]
    for index in range(len(places.layers)):
        done = places.layers[: index + 1]
        later = [place.slot for place in places.layers[index + 1 :]]
        assert done[-1].num_whole == min(later, default=2)
    assert [group_layers((4, 4, 0, 4, 4, 0)).last_layer(num) for num in (1, 2)] == [2, 5]


def test_layers_of_unlike_sizes_share_one_page_list() -> None:
    wide = replace(ONE, key_size=16, window=16)
    places = places_of([wide, ONE, wide])
    assert places.plane_of == (0, 1, 0)
    assert [(place.group, place.slot) for place in places.layers] == [(0, 0), (0, 0), (0, 1)]
    assert page_windows(places.specs(4)) == (0,)
    assert [place.num_whole for place in places.layers] == [1, 1, 2], "only the first plane's layers count"
