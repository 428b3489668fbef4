"""Copy the teacher's mean map of a group of images: what all of the group share stays, what tells its images
apart is gone. With one group of all images this is the average over examples of arXiv 2411.09702."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from atlib._util import in_eval_mode
from atlib.attention import Instead, Walk, walk
from atlib.attention_transfer import Transferred
from atlib.checkpoint import count, read_tensors, write_tensors
from atlib.pair import Normalisation, Pair, View, stated
from atlib.vit import Architecture, check_timm

# images (B, 3, height, width) -> the index of each one's group, int64 (B,)
Groups = Callable[[Tensor], Tensor]


def one_group(images: Tensor) -> Tensor:
    """All images in one group: `Groups` for a map that is the same for all images."""
    return torch.zeros(len(images), dtype=torch.long, device=images.device)


class StoredMaps(Pair):
    """A student whose maps are, for every image, those that are stored for its group: it needs no teacher any
    more.

    maps: a list over layers of (groups, H, N, N), which become buffers. group_of: see `Groups`.
    normalisation: of the images that it is given (`atlib.pair.Pair`). Raises `Unwalkable` for a student that
    `walk` refuses, and `ValueError` for another number of maps than it has layers.
    """

    not_walkable = "it is a student with stored maps: walk its .student"

    def __init__(
        self,
        student: VisionTransformer | Eva,
        maps: Iterable[Tensor],
        group_of: Groups = one_group,
        *,
        normalisation: Normalisation | None = None,
    ):
        check_timm(student)
        super().__init__(student, normalisation=normalisation)
        self._group_of = group_of
        for layer, of_layer in enumerate(maps := list(maps)):
            # a copy of what inference mode made, so that a checkpoint can be read into it
            self.register_buffer(f"maps_{layer}", of_layer.clone())
        tokens = student.num_prefix_tokens + student.patch_embed.num_patches
        own = [(block.attn.num_heads, tokens, tokens) for block in student.blocks]
        if (stored := [tuple(of_layer.shape[1:]) for of_layer in maps]) != own:
            raise ValueError(
                f"the maps are {stored[0]} in {len(stored)} layers (heads, tokens, tokens), the student's are"
                f" {own[0]} in {len(own)}: stored maps stand in place of its own one to one"
            )

    @property
    def needs_teacher(self) -> bool:
        """True: the student works only with the maps that came from the teacher."""
        return True

    def forward(self, images: Tensor) -> Transferred:
        """Student logits (B, classes) for images (B, 3, height, width); no transfer loss."""
        logits = self.walk(images).logits
        return Transferred(logits, logits.new_zeros(()))

    def walk(self, images: Tensor) -> Walk:
        """What happens inside the student for images (B, 3, height, width): the walk that `forward` takes its
        logits from."""
        groups, layers = self._group_of(images), range(len(self.student.blocks))
        replace = {layer: Instead(map=getattr(self, f"maps_{layer}")[groups]) for layer in layers}
        return walk(self.student, images, replace=replace)


class MeanMapCopy(StoredMaps):
    """A student whose maps are, for every image, the teacher's mean map over the reference images of the same
    group.

    By default all images are one group: every image gets the same map in each head, the average over examples
    of arXiv 2411.09702 (appendix: 79.7 % with ViT-L). With groups of images that ask for the same place the
    maps still say *where to look*, but no longer anything else about the image: a control that Copy can be
    compared with. Compare ResMLP's static mixing (arXiv 2105.03404).

    The means are made once, from the images that are named, and the teacher is not needed any more. So what
    the student computes for an image depends neither on the rest of its batch nor on the number of processes.
    (The paper's published code does not contain its average.)

    `reference`: images (n, 3, height, width), or batches of them, such as training images without
    augmentation. `group_of`: see `Groups`. `number`: of groups. normalisation: of all these images
    (`atlib.pair.Pair`). Raises `ValueError` for a group without a reference image.
    """

    def __init__(
        self,
        teacher: VisionTransformer | Eva,
        student: VisionTransformer | Eva,
        reference: Tensor | Iterable[Tensor],
        group_of: Groups = one_group,
        number: int = 1,
        *,
        normalisation: Normalisation | None = None,
    ):
        # the teacher is run here alone, and is no part of the pair
        told = stated(normalisation, [teacher])
        maps = mean_maps(teacher, reference, group_of, number, normalisation=told)
        super().__init__(student, maps, group_of, normalisation=told)


def save_stored_maps(path: str | Path, model: StoredMaps, student: Architecture, more: Mapping = {}) -> Path:
    """Write a student with the maps that it needs, all images in one group; more: as in
    `atlib.checkpoint.save_vit`. Returns the path. Raises `ValueError` for maps of several groups: what says
    an image's group is a function, and a file has none."""
    if (groups := len(model.maps_0)) != 1:
        raise ValueError(f"maps of {groups} groups: save model.state_dict(), a file cannot hold group_of=")
    seen = None if model.normalisation is None else model.normalisation.describe()
    header = {
        **more,
        "needs_teacher": True,
        "stored_maps": True,
        "student": student._asdict(),
        "pair_normalisation": seen,
    }
    return write_tensors(Path(path), dict(model.state_dict()), header)


def load_stored_maps(path: str | Path) -> StoredMaps:
    """What `save_stored_maps` wrote, in eval mode. Raises `OSError` naming a file that cannot be read or is
    another."""
    tensors, header = read_tensors(Path(path))
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
        raise OSError(
            f"{path} holds no student with its maps ({type(error).__name__}: {error}); it was left as it is"
        ) from error
    return model.eval()


@torch.inference_mode()
def mean_maps(
    vit: VisionTransformer | Eva,
    images: Tensor | Iterable[Tensor],
    group_of: Groups = one_group,
    number: int = 1,
    batch: int = 500,
    normalisation: Normalisation | None = None,
) -> list[Tensor]:
    """The mean map of every group and layer: a list over layers of (number, H, N, N).

    `images`: (n, 3, height, width), of which `batch` are walked at a time, or batches of them, where there
    are more than memory holds. normalisation: of these images; None: they are as the ViT shall see them.
    The ViT runs in eval mode and is left in the mode it was in. Raises `ValueError` for a group without an
    image or beyond `number`.
    """
    view = View.of(vit)
    counts = torch.zeros(number, dtype=torch.long)
    sums: list[Tensor] = []
    for some in images.split(batch) if isinstance(images, Tensor) else images:
        groups = group_of(some)
        counts = counts + _counted(groups, number)
        with in_eval_mode(vit):
            maps = [seen.map for seen in walk(vit, view.show(some, normalisation), head=False).layers]
        sums = sums or [p.new_zeros(number, *p.shape[1:]) for p in maps]
        for total, p in zip(sums, maps):
            total.index_add_(0, groups.to(p.device), p)
    if (counts == 0).any():
        raise ValueError(_every_group(number, counts))
    return [(total / counts.to(total.device)[:, None, None, None]).clone() for total in sums]


def _counted(groups: Tensor, number: int) -> Tensor:
    """How many images of a batch are in each group. Raises `ValueError` for a group beyond `number`."""
    counts = torch.bincount(groups.cpu(), minlength=number)
    if len(counts) > number:
        raise ValueError(_every_group(number, counts))
    return counts


def _every_group(number: int, counts: Tensor) -> str:
    return (
        f"every group from 0 to {number - 1} needs an image, and there is none beyond; images per group:"
        f" {counts.tolist()}"
    )
