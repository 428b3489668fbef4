"""A student with the maps that it needs (`atlib.baselines.StoredMaps`) in one file."""

from collections.abc import Mapping
from pathlib import Path

from atlib._util import as_plain
from atlib.baselines import StoredMaps
from atlib.checkpoint import count, read_tensors, write_tensors
from atlib.pair import Normalisation
from atlib.vit import Architecture


def save_stored_maps(path: str | Path, model: StoredMaps, student: Architecture, more: Mapping = {}) -> Path:
    """Write a student with the maps that it needs, all images in one group; more: as in
    `atlib.checkpoint.save_vit`. Returns the path."""
    if (groups := len(model.maps_0)) != 1:
        raise ValueError(f"maps of {groups} groups: save model.state_dict(), a file cannot hold group_of=")
    header = {
        **more,
        "needs_teacher": True,
        "stored_maps": True,
        "student": student._asdict(),
        "pair_normalisation": as_plain(model.normalisation),
    }
    return write_tensors(path, model.state_dict(), header)


def load_stored_maps(path: str | Path) -> StoredMaps:
    """What `save_stored_maps` wrote, in eval mode. Raises `OSError` naming a file that cannot be read or is
    another."""
    tensors, header = read_tensors(path)
    if not header.get("stored_maps"):
        raise OSError(f"{path} holds no stored maps: it was not written by save_stored_maps")
    try:
        architecture = Architecture.read(header["student"])
        architecture.require_numbers(count(tensors))
        student = architecture.build()
        names = [f"maps_{layer}" for layer in range(len(student.blocks))]
        told = Normalisation.read(header.get("pair_normalisation"))
        model = StoredMaps(student, [tensors[name] for name in names], normalisation=told)
        model.load_state_dict(tensors)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise OSError(f"{path} holds no student with its maps ({type(error).__name__}: {error})") from error
    return model.eval()
