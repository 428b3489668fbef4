"""Folders of COCO's form, made of scenes."""

import json
from pathlib import Path

import numpy as np
from PIL import Image

from atbook.worlds.scenes import generate_scenes, scene_objects
from atfamily.detection.objects import ObjectImages


def export_coco(images: ObjectImages, folder: Path) -> tuple[Path, Path]:
    """Images as PNG files and objects as annotations: the folder of images, the file of annotations."""
    from pycocotools import mask as run_lengths

    pictures, file = folder / "images", folder / "annotations.json"
    pictures.mkdir(parents=True, exist_ok=True)
    entries, annotations = [], []
    for number, (pixels, objects) in enumerate(zip(images.pixels, images.objects)):
        name, (height, width) = f"{number:012d}.png", pixels.shape[-2:]
        Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(pictures / name)
        entries.append({"id": number, "file_name": name, "height": height, "width": width})
        for i, (left, top, right, bottom) in enumerate(objects.boxes.tolist()):
            annotation = {
                "id": len(annotations) + 1,
                "image_id": number,
                "category_id": int(objects.labels[i]) + 1,
                "bbox": [left, top, right - left, bottom - top],
                "area": (right - left) * (bottom - top),
                "iscrowd": int(objects.crowd[i]),
            }
            if objects.masks is not None:
                packed = run_lengths.encode(np.asfortranarray(objects.masks[i].numpy().astype(np.uint8)))
                annotation["area"] = float(run_lengths.area(packed))
                annotation["segmentation"] = {"size": packed["size"], "counts": packed["counts"].decode()}
            annotations.append(annotation)
    classes = max((int(each.labels.max()) + 1 for each in images.objects if len(each.labels)), default=0)
    names = images.classes or [str(number) for number in range(classes)]
    categories = [{"id": number + 1, "name": name} for number, name in enumerate(names)]
    file.write_text(json.dumps({"images": entries, "annotations": annotations, "categories": categories}))
    return pictures, file


def coco_folder(root: Path, **images: int) -> Path:
    """ROOT with so many images of each split, by its name."""
    (root / "annotations").mkdir(parents=True)
    for seed, (split, count) in enumerate(images.items()):
        pictures, file = export_coco(scene_objects(generate_scenes("train", count, seed)), root / "made")
        pictures.rename(root / split)
        file.rename(root / "annotations" / f"instances_{split}.json")
    return root
