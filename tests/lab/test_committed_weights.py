"""The weights that come with the book are those of the runs that are recorded."""

from functools import cache
from pathlib import Path

import pytest
import torch

from atbook.lab.studies import CENTRAL
from atbook.lab.study import Place, Run, Sources, load_weights, scale_of
from atbook.records import results_folder, unpack_bits
from atlib.evaluate import predict
from atlib.pair import student_of

FILES = sorted(
    path
    for world in ("find", "match")
    for path in (results_folder() / "transfer" / world).glob("*-seed0.safetensors")
    if not path.name.startswith("teacher")
)
IMAGES = 500


@cache
def first_images(place):
    return scale_of(place).held_out("test").select(torch.arange(IMAGES))


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}, {path.stem}")
def test_committed_weights_answer_as_their_record_says(path: Path):
    place = Place(path.parent.name, None, results_folder(), path.parent)
    run = Run(CENTRAL, place, path.stem.removesuffix("-seed0"), 0)
    model = CENTRAL.variant(run.method).build(Sources(place, scale_of(place), 0)).eval()
    load_weights(path, student_of(model))
    images = first_images(place)
    right = predict(model, images).argmax(1) == images.targets
    recorded = torch.from_numpy(unpack_bits(run.record().results["test_right"])[:IMAGES])
    # another processor rounds otherwise, and an answer may be a tie
    assert (right != recorded).sum() <= 1
