"""The study of Find with photographs: where to look is known, and what is seen there is a real photograph."""

from functools import partial

from torch import nn

from atbook.lab.controls import changed, jigsaw_of, mean_of, oracle
from atbook.lab.scales import AXES, BLANK, RATE_AND_WEIGHT, TUNING_SEED
from atbook.lab.study import Sources, Variant, by, fine_tune, scratch, study
from atbook.lab.tuning import ABOVE_GUESSING, Ladder
from atbook.worlds import mosaics

# As wide for all; where nothing has left guessing, one of ten classes, it goes on beyond both ends.
_RATES = Ladder("lr", AXES["lr"][2:12], beyond=2, learned=1 / 10 + ABOVE_GUESSING)


def _oracle(sources: Sources) -> nn.Module:
    """Copy, with the places of the frames in the teacher's place, of training and of evaluated images."""
    scale, seed = sources.scale, sources.seed
    split, size = ("validation", 2000) if seed == TUNING_SEED else ("test", 4000)
    drawn = scale.drawn("train", scale.labels, seed), scale.drawn(split, size, 0)
    return oracle(sources, [(mosaics.mosaic_images(one, ()), one.cells) for one in drawn])


MOSAICS = study(
    "mosaics",
    Variant("scratch", scratch, None, trials=_RATES),
    Variant("fine-tune", fine_tune, None, trials=_RATES),
    Variant("copy", by(), None, trials=_RATES),
    Variant("distill", by(how="distill"), None, trials=RATE_AND_WEIGHT),
    Variant("oracle", _oracle, None, trials=_RATES),
    *(Variant(f"copy, {twin} twin", by(), None, trials=_RATES, twin=twin) for twin in mosaics.TWINS),
    Variant("copy, blank image", by(), None, trials=_RATES, twin=BLANK),
    Variant("copy, jigsaw", partial(changed, "copy", jigsaw_of), None, trials=_RATES),
    Variant("distill, jigsaw", partial(changed, "distill", jigsaw_of), None, trials=RATE_AND_WEIGHT),
    Variant("distill, mean map", partial(changed, "distill", mean_of), None, trials=RATE_AND_WEIGHT),
)
