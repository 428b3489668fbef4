"""How images are prepared for the model in a file of weights."""

from pathlib import Path

from torch import nn

from atlib.checkpoint import header_normalisation, read_header
from atlib.pair import Normalisation, Pair, image_size_of, student_of
from atrun.config import built_for, is_run, read_config
from atrun.data.transforms import AS_STORED, Augmentation
from atrun.looking.preparation import Preparation, preparation_of


def augmentation_of(path: Path) -> tuple[bool, Augmentation | None]:
    """Whether it is known how images are prepared for a file of weights, and how (None: taken as they are):
    as the file says, else as the run does in whose folder it lies."""
    header, folder = read_header(path), path.parent
    if "augmentation" not in header:
        return (True, read_config(folder, trust_data=True).augmentation) if is_run(folder) else (False, None)
    try:
        return True, None if header["augmentation"] is None else Augmentation(**header["augmentation"])
    except (TypeError, ValueError) as error:
        raise OSError(f"{path} does not say how its images are prepared ({error})") from error


def preparation_in(path: Path, model: nn.Module) -> tuple[Preparation, Normalisation | None]:
    """How images are prepared for the model in a file, and how normalised (None: nothing says it): as its
    augmentation, its header's normalisation or the model itself says, else as timm does by default."""
    (is_known, augmentation), vit = augmentation_of(path), student_of(model)
    if (a := augmentation) is not None:
        size = image_size_of(vit) or (a.image_size, a.image_size)  # a ViT for any size was built for another
        how = {"crop_pct": a.crop_pct, "interpolation": a.interpolation, "source": "as its file says"}
        return Preparation(size, a.mean, a.std, **how), a.normalisation
    of_model = model.normalisation if isinstance(model, Pair) else Normalisation.of(model)
    normalisation = header_normalisation(read_header(path)) or of_model
    changes = {}
    if normalisation is not None:
        changes = {**vars(normalisation), "source": "mean and std as its file says"}
    if is_known:  # pixels in memory, which `Images` takes as they are
        changes = {**vars(AS_STORED), "source": "as for images in memory"} | changes | {"crop_pct": 1.0}
    return preparation_of(vit, size=built_for(vit), **changes), normalisation
