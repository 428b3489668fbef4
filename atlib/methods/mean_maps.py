"""Copy the teacher's mean map of a group of images: what all of the group share stays, what tells its images
apart is gone."""

from collections.abc import Callable

import torch
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from atlib.transfer import Transferred
from atlib.walking import Instead, Walk, check_walkable, walk

# images (B, 3, height, width) -> the index of each one's group, int64 (B,)
Groups = Callable[[Tensor], Tensor]


class MeanMapCopy(nn.Module):
    """A student whose maps are, for every image, the teacher's mean map over the reference images of the same
    group.

    With groups by the marked cell of the built-in world (`atlib.data.glyphs.marked_cell`) the maps still say
    *where to look*, but no longer anything else about the image: a control that Copy can be compared with.
    With a single group they are one static map a head. `reference`: images (n, 3, height, width), `group_of`:
    see `Groups`, `number` of groups. The means are made once; the teacher is not needed any more. Raises
    `ValueError` for a group without a reference image. Compare: the average over examples of arXiv
    2411.09702, appendix, and ResMLP's static mixing (arXiv 2105.03404).
    """

    def __init__(
        self,
        teacher: VisionTransformer | Eva,
        student: VisionTransformer | Eva,
        reference: Tensor,
        group_of: Groups,
        number: int,
    ):
        super().__init__()
        check_walkable(student)
        self.student = student
        self._group_of = group_of
        for layer, maps in enumerate(mean_maps(teacher, reference, group_of, number)):
            self.register_buffer(f"maps_{layer}", maps)

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
        return walk(self.student, images, replace=replace, checked=True)


@torch.inference_mode()
def mean_maps(
    vit: VisionTransformer | Eva, images: Tensor, group_of: Groups, number: int, batch: int = 500
) -> list[Tensor]:
    """The mean map of every group and layer: a list over layers of (number, H, N, N). Raises `ValueError` for
    an empty group."""
    vit.eval()
    groups = torch.cat([group_of(some) for some in images.split(batch)])
    counts = torch.bincount(groups, minlength=number)
    if len(counts) > number or (counts == 0).any():
        raise ValueError(
            f"every group from 0 to {number - 1} needs an image, and there is none beyond; images per group:"
            f" {counts.tolist()}"
        )
    sums: list[Tensor] = []
    for some, of in zip(images.split(batch), groups.split(batch)):
        maps = [seen.map for seen in walk(vit, some, head=False).layers]
        sums = sums or [torch.zeros(number, *p.shape[1:]) for p in maps]
        for total, p in zip(sums, maps):
            total.index_add_(0, of, p)
    return [(total / counts[:, None, None, None]).clone() for total in sums]
