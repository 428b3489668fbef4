"""Norms, components and gradients beside the maps, against numpy and differences, and their files."""

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from atlib import Instead, look, walk
from atrun.looking.panels import components, gradients, outliers
from atrun.looking.preparation import prepare
from tests.helpers import randomise
from tests.looking.reading import AS_IT_IS, bound, picture


def test_norms_and_components_are_those_of_the_stream(small_vit):
    vit = small_vit(reg_tokens=1)
    ((rows, prepared),) = look({"it": vit}, picture(), preparation=AS_IT_IS, layers=[0, 2]).models.values()
    with torch.no_grad():
        stream = walk(vit, prepared.pixels).stream
    for at, layer in enumerate((0, 2)):
        features = stream[layer][0].double().numpy()
        np.testing.assert_allclose(rows.panels.norms[at], np.linalg.norm(features, axis=1), rtol=1e-5)
        centred = features[2:] - features[2:].mean(0)
        _, vectors = np.linalg.eigh(centred.T @ centred)
        for colour in range(3):  # the largest eigenvalues are last; signs are free
            projected = centred @ vectors[:, -1 - colour]
            both = [x / np.ptp(x) for x in (projected - projected.min(), projected.max() - projected)]
            found = rows.panels.components[at, :, colour].double().numpy() / 255
            assert min(np.abs(found - side).max() for side in both) < 1 / 254


def test_fewer_than_three_components_are_black():
    flat = torch.tensor([[0.0, 1], [0, 2], [0, 4]])
    found = components(flat)
    assert found[:, 0].tolist() == [0, 85, 255] and not found[:, 1:].any()


def test_an_outlier_is_above_twice_the_median():
    assert outliers(torch.tensor([1.0, 1, 2, 2.1, 9])).tolist() == [False] * 3 + [False, True]
    assert outliers(torch.tensor([1.0, 1, 1, 2.1, 9])).tolist() == [False] * 3 + [True, True]


@pytest.mark.parametrize("classes", [0, 5])
def test_gradients_are_those_of_differences(small_vit, classes):
    vit = randomise(small_vit(num_classes=classes, fc_norm=False), 1).double().eval()
    images = prepare(picture(), AS_IT_IS).pixels.double()
    with torch.no_grad():
        walked = walk(vit, images)
    best, held = walked.logits.argmax(), {i: Instead(map=one.map) for i, one in enumerate(walked.layers)}

    def score(map, layer):
        with torch.no_grad():
            answer = walk(vit, images, replace=held | {layer: Instead(map=map)}).logits
        return answer[0, best].item() if classes else answer.square().sum().item() / 2

    found = gradients(vit, images, walked.layers, [1])
    map, step, slopes = walked.layers[1].map, 1e-5, []
    for head in range(map.shape[1]):
        for query in range(map.shape[2]):
            both = [map.clone(), map.clone()]
            both[0][0, head, query, 4] += step
            both[1][0, head, query, 4] -= step
            slopes.append((score(both[0], 1) - score(both[1], 1)) / (2 * step))
    assert found[1][4].item() == pytest.approx(np.clip(slopes, 0, None).mean(), rel=1e-4)
    assert torch.allclose(found[1], gradients(vit, images, walked.layers, [0, 1, 2])[1], rtol=1e-9)
    assert not any(parameter.grad is not None for parameter in vit.parameters())


def test_arrays_and_pictures_are_saved(small_vit, tmp_path):
    vit = small_vit()
    shown = look({"it": vit}, {"one": picture(), "two": picture(seed=6)}, preparation=AS_IT_IS)
    arrays = load_file(shown.save(tmp_path / "maps.safetensors"))
    with torch.no_grad():
        map = walk(vit, prepare(picture(seed=6), AS_IT_IS).pixels).layers[2].map[0, 1].double().numpy()
    found = arrays["two/it/layer 2/head 1"].double().numpy()
    assert arrays["two/it/queries"].tolist() == [*range(17)]
    assert all((np.abs(found[row] - map[row]) <= bound(map[row]) + 1e-6).all() for row in range(17))
    with Image.open(shown.save(tmp_path / "maps.png")) as drawn:
        assert drawn.width > drawn.height > 300
    assert shown.save(tmp_path / "maps.svg").read_text().count("<image") == 14, "seven panels of two pictures"
