"""A folder of COCO's form, made of scenes."""

from pathlib import Path

from atbook.worlds.scenes import generate_scenes, scene_objects
from atrun.data.coco import export_coco


def coco_folder(root: Path, **images: int) -> Path:
    """ROOT with so many images of each split, by its name."""
    (root / "annotations").mkdir(parents=True)
    for seed, (split, count) in enumerate(images.items()):
        pictures, file = export_coco(scene_objects(generate_scenes("train", count, seed)), root / "made")
        pictures.rename(root / split)
        file.rename(root / "annotations" / f"instances_{split}.json")
    return root
