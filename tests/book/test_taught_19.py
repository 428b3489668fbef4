"""What notebook 19 counts by hand, numbers handed over and operations of a forward pass, against atlib and
against PyTorch's counter."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from atlib import create_vit, walk
from atlib.analysis import accounting, transferred_numbers
from tests.book.test_taught import taught

NAME = "19-model-size"
SIZE = {"img_size": 24, "patch_size": 8, "embed_dim": 40, "depth": 3, "num_heads": 5, "num_classes": 7}
ODD = SIZE | {"mlp_ratio": 3.0}


@pytest.mark.parametrize("changes", [{}, {"embed_dim": 60}, {"num_heads": 2, "depth": 1}, {"reg_tokens": 3}])
def test_numbers_handed_over_are_what_a_walk_holds(changes):
    vit = create_vit(ODD, **changes).eval()
    with torch.no_grad():
        walked = walk(vit, torch.randn(1, 3, 24, 24))
    N, first = walked.tokens.shape[1], walked.layers[0]
    found = taught(NAME).numbers_handed_over(len(vit.blocks), first.q.shape[1], N, first.q.shape[-1])
    theirs = transferred_numbers(vit)
    assert found == {
        "queries": theirs.q,
        "queries and keys": theirs.q + theirs.k,
        "maps": theirs.map,
        "features": theirs.features,
    }


@pytest.mark.parametrize("N, d", [(17, 16), (17, 8), (128, 64), (129, 64), (197, 64), (16, 8)])
def test_maps_are_larger_where_the_counts_say_so(N, d):
    counts = taught(NAME).numbers_handed_over(2, 3, N, d)
    assert taught(NAME).maps_are_larger(N, d) == (counts["maps"] > counts["queries and keys"])


@pytest.mark.parametrize(
    "config, changes",
    [("glyphs", {}), ("glyphs", {"embed_dim": 96}), (ODD, {}), (ODD, {"depth": 2, "patch_size": 4})],
)
def test_forward_flops_are_what_runs_and_what_atlib_counts(config, changes):
    vit = create_vit(config, **changes).eval()
    shape = accounting.shape_of(vit)
    by_hand = taught(NAME).forward_flops(*shape)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        vit(torch.randn(1, 3, *vit.patch_embed.img_size))
    assert by_hand == counter.get_total_flops() == accounting.plain(shape)
