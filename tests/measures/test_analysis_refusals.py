"""Bad inputs of `atlib.analysis`: each is refused."""

import math

import pytest
import torch

from atfamily.measures.accounting import method_costs, shape_of, step_memory
from atfamily.measures.bleu import bleu
from atfamily.measures.cka import MinibatchCKA, StreamingCKA, class_token, layer_cka, linear_cka, patch_mean
from atfamily.measures.controls import patch_order, switched
from atfamily.measures.fourier import fourier_profile
from atfamily.measures.predictions import (
    disagreement,
    ensemble_accuracy,
    expected_calibration_error,
    paired_bootstrap,
)
from atfamily.measures.probes import knn_accuracy
from atfamily.measures.retrieval import cosines, mean_average_precision
from atfamily.measures.robustness import effective_robustness, fit_line
from atfamily.measures.subsets import accuracy_on, group_accuracy, long_tail
from atlib import AttentionTransfer, Plan
from atlib.analysis import (
    StreamingDivergence,
    attention_distance,
    attention_entropy,
    check_maps,
    class_attention,
    compare_layers,
    head_divergence,
    jensen_shannon,
    prefix_share,
    rollout,
)  # fmt: skip
from atlib.data import Images
from tests.helpers import SMALL_VIT, random_images, random_maps
from tests.helpers import small_vit as vit

NAN = math.nan


def broken():
    spoilt = vit()
    spoilt.blocks[1].attn.qkv.bias.data[:] = torch.nan
    spoilt.blocks[1].mlp.fc2.bias.data[0] = torch.nan
    return spoilt


def checkpointed():
    model = vit().train()
    model.set_grad_checkpointing()
    return model


def of_classes(labels, classes=(), side=2):
    labels = torch.as_tensor(labels)
    return Images(torch.zeros(len(labels), 3, side, side, dtype=torch.uint8), labels, classes)


def spoilt(x, value=NAN):
    x = x.clone()
    x[0, ..., 0] = value
    return x


def with_row(value, maps=None):
    maps = random_maps(2, 3, 4, 4) if maps is None else maps
    maps[1, 2, 3, 0] = value
    return maps


MAPS = random_maps(2, 3, 10, 10)
X, Y = random_images(40, 6), random_images(40, 4, seed=1)
P = random_maps(6, 4)
LABELS = torch.arange(6) % 4
RIGHT = torch.tensor([True, False, True])
POOL = torch.linspace(0.3, 0.9, 7)
XY, HELD_OUT = (X, LABELS.repeat(7)[:40]), (X[:8], LABELS.repeat(2)[:8])
GLYPHS = of_classes(torch.arange(8), side=32)
BAD = {
    "accounting": [
        *(lambda layers=layers: method_costs(SMALL_VIT, layers=layers) for layers in (0, 5)),
        lambda: method_costs("eva02_tiny_patch14_224"),
        lambda: shape_of(vit(global_pool="map", class_token=False)),
        lambda: step_memory(vit(), torch.zeros(1, 3, 32, 32)),
        lambda: step_memory(checkpointed(), torch.zeros(1, 3, 32, 32)),
    ],
    "maps": [
        lambda: attention_distance(MAPS, (2, 5), 1), lambda: prefix_share(MAPS, 11),
        lambda: class_attention(random_maps(1, 2, 9, 9), (3, 3), 0), lambda: rollout([MAPS], residual=1.5),
        *(lambda call=call: call(spoilt(MAPS, 2.0)) for call in (
            lambda p: rollout([MAPS, p]), lambda p: attention_distance(p, (3, 3), 1), attention_entropy,
            lambda p: prefix_share(p, 1), lambda p: class_attention(p, (3, 3), 1),
        )),
    ],
    "bleu": [lambda: bleu([[1]], [[1], [1]])],
    "controls": [
        lambda: patch_order(1, 1, seed=0),
        lambda: switched(AttentionTransfer(vit(1), vit(2), Plan(how="distill")), GLYPHS, GLYPHS),
    ],
    "cka": [
        *(lambda compare=compare, x=x, y=y: compare(x, y)
          for compare in (linear_cka, StreamingCKA().update)
          for x, y in ((X, spoilt(Y)), (spoilt(X, math.inf), Y), (X.reshape(40, 2, 3), Y))),
        lambda: MinibatchCKA().update(X[:3], Y[:3]),
        lambda: layer_cka(vit(), vit(global_pool="avg", class_token=False), GLYPHS, class_token),
        lambda: layer_cka(vit(), vit(1), GLYPHS, patch_mean(17)),
        lambda: layer_cka(vit(), vit(img_size=64), GLYPHS, class_token),
    ],
    "divergence": [
        *(lambda p=p, q=q: jensen_shannon(torch.tensor(p), torch.tensor(q)) for p, q in (
            ([0.5, 0.2], [0.5, 0.5]), ([0.5, 0.5], [1.5, -0.5]), ([0.5, 0.5], [1.0]),
        )),
        lambda: compare_layers(vit(), vit(depth=2), GLYPHS),
        lambda: compare_layers(vit(), vit(depth=2), GLYPHS, {0: 2}),
        lambda: compare_layers(vit(), vit(reg_tokens=1), GLYPHS),
        lambda: compare_layers(vit(), broken(), GLYPHS, {0: 0, 2: 1}),
        *(lambda value=value: check_maps(with_row(value), 7) for value in (NAN, math.inf, -0.25, 1.5)),
        lambda: StreamingDivergence().update(random_maps(2, 3, 4, 4), with_row(NAN)),
        lambda: check_maps(torch.full((2, 3, 4, 5), 0.2), 0), lambda: check_maps(torch.zeros(0, 3, 4, 4), 0),
        lambda: head_divergence(MAPS, MAPS, "bipartit"), lambda: head_divergence(MAPS, MAPS[:1], "direct"),
    ],
    "fourier": [
        lambda: fourier_profile(torch.ones(2, 7, 3), (2, 3), 1),
        lambda: fourier_profile(torch.ones(2, 7, 3), (3, 3), 1),
    ],
    "predictions": [
        lambda: disagreement(P, spoilt(P)),
        lambda: disagreement(P, P[:1]),
        lambda: ensemble_accuracy(P, 2 * P, LABELS), lambda: ensemble_accuracy(P, P, LABELS + 1),
        lambda: expected_calibration_error(P + 1, LABELS),
        lambda: paired_bootstrap(RIGHT, RIGHT[:2]),
        lambda: paired_bootstrap(RIGHT, torch.tensor([0.3, 1, 0])),
    ],
    "probes": [
        *(lambda train=train, test=test: knn_accuracy(*train, *test, ks=(1,))
          for (x, y), (a, b) in ((XY, HELD_OUT),)
          for train, test in (
              ((x, torch.full_like(y, 3)), (a, torch.full_like(b, 3))), ((x, y), (a, b + 4)),
              ((spoilt(x), y), (a, b)), ((x, y[:-1]), (a, b)),
          )),
    ],
    "neighbours": [lambda: knn_accuracy(*XY, *HELD_OUT, ks=(5, 0))],
    "retrieval": [
        lambda: cosines(X[:1], spoilt(X)),
        lambda: mean_average_precision(torch.tensor([[0.1, NAN]]), torch.tensor([[False, True]])),
    ],
    "robustness": [
        *(lambda a=a: effective_robustness(*a) for a in (
            (71.2, 0.5, POOL, POOL), (0.5, NAN, POOL, POOL), (0.5, 0.5, [*POOL[1:], 71.2], POOL),
        )),
        lambda: effective_robustness(0.5, 0.5, POOL, POOL, level=95), lambda: fit_line(POOL, POOL[1:]),
        lambda: fit_line(POOL, POOL[:1]),
    ],
    "subsets": [
        *(lambda labels=labels, factor=factor: long_tail(of_classes(labels), factor) for labels, factor in (
            ([0, 1] * 9, 0.5), ([0, 1] * 9, 10), ([0, 2] * 9, 2), ([0.5] * 9, 2),
        )),
        lambda: group_accuracy(spoilt(P), LABELS, {"many": [0]}),
        lambda: group_accuracy(P, LABELS[:3], {"many": [0]}),
        lambda: group_accuracy(P, LABELS, {"many": [P.shape[1]]}),
        lambda: accuracy_on(P, LABELS, [0]),
        lambda: accuracy_on(P, LABELS, [-1, 0, 1]),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    "call",
    [pytest.param(call, id=f"{kind}-{row}") for kind, calls in BAD.items() for row, call in enumerate(calls)],
)
def test_values(call):
    with pytest.raises(ValueError):
        call()
