"""The study of controls in the two worlds: perfect routing without a teacher, the teacher's maps over
shuffled patches, and the teacher's answers in place of its maps."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from atbook.lab.scales import BLANK, RATE_UPHILL, TUNING_SEED, UNTIL_LEARNED, GlyphScale
from atbook.lab.study import Sources, Variant, by, study
from atbook.worlds import glyphs
from atfamily.map_cache import keys_of
from atfamily.measures.controls import jigsaw, maps_of, mean_map, patch_order
from atlib.attention_transfer import AttentionTransfer, TeacherMaps
from atlib.baselines import LogitDistillation
from atlib.data import Images, with_unlabelled
from atlib.loading import seed_for
from atlib.plan import Plan

# --- The oracle: the class token reads the named glyph's token, and every patch reads itself ---


def oracle_maps(cells: Tensor, heads: int, tokens: int) -> Tensor:
    """Perfect routing and nothing else: cells (B,), counted row by row, to maps (B, H, N, N)."""
    p = torch.eye(tokens).repeat(len(cells), 1, 1)
    p[:, 0, 0] = 0
    p[torch.arange(len(cells)), 0, cells + 1] = 1
    return p[:, None].expand(-1, heads, -1, -1)


def oracle(sources: Sources, drawn: Iterable[tuple[Images, Tensor]]) -> nn.Module:
    """Copy, with the oracle in the teacher's place: the generator says in which cell, (n,), of an image the
    answer is, of training images as of those that the student is tested on. The teacher is not asked."""
    cells: dict[bytes, int] = {}
    for images, of_images in drawn:
        for (batch, _), of_batch in zip(images.loader(500), of_images.split(500)):
            cells |= zip(keys_of(batch), of_batch.tolist())
    student = sources.student()
    heads, tokens = student.blocks[0].attn.num_heads, student.pos_embed.shape[1]

    def maps(images: Tensor) -> Mapping[int, Tensor]:
        of_images = torch.tensor([cells[key] for key in keys_of(images)])
        return dict.fromkeys(range(len(student.blocks)), oracle_maps(of_images, heads, tokens))

    return AttentionTransfer(sources.scale.student.build(), student, Plan(), maps=maps)


def _oracle(sources: Sources) -> nn.Module:
    scale, seed = sources.scale, sources.seed
    split, size = ("validation", 2000) if seed == TUNING_SEED else ("test", 4000)
    drawn = (
        glyphs.generate("train", scale.labels, seed, scale.world),
        glyphs.generate(split, size, 0, scale.world),
    )
    return oracle(sources, [(glyphs.glyph_images(one), torch.from_numpy(one.cell)) for one in drawn])


# --- The teacher's maps, changed ---


def jigsaw_of(teacher: nn.Module, sources: Sources) -> TeacherMaps:
    """The teacher's maps over patches in a shuffled order."""
    return jigsaw(
        maps_of(teacher), patch_order(teacher.patch_embed.num_patches, 1, seed_for(sources.seed, "twins"))
    )


def mean_of(teacher: nn.Module, sources: Sources) -> TeacherMaps:
    """The teacher's mean map of images without labels."""
    return mean_map(teacher, (images for images, _ in sources.unlabelled().loader(500)))


def changed(how: str, change: Callable[[nn.Module, Sources], TeacherMaps], sources: Sources) -> nn.Module:
    """A student that is given the teacher's maps, changed."""
    teacher = sources.teacher()
    given = change(teacher, sources)
    return AttentionTransfer(teacher, sources.student(), Plan(how=how), maps=given)


# --- The plain baseline: the fine-tuned teacher's answers as labels ---


def predictions(hard: bool, sources: Sources) -> nn.Module:
    """A student of the fine-tuned teacher's predictions."""
    return LogitDistillation(sources.fine_tuned(), sources.student(), hard=hard)


def partly_labelled(scale: GlyphScale, seed: int) -> Images:
    """The labelled images, and eight times as many without their labels: hard labels of a teacher on images
    that it has been fitted to are the labels once more."""
    return with_unlabelled(scale.labelled(seed), scale.unlabelled_images(seed))


def _answered(steps: int) -> Variant:
    """All labels are the teacher's answers, also those of labelled images, of which it knows nearly all."""
    return Variant(
        f"answers, {steps} steps",
        partial(predictions, True),
        None,
        {"steps": steps, "task_weight": 0.0, "transfer_weight": 1.0},
        RATE_UPHILL,
        images=partly_labelled,
        needs=("fine-tuned",),
    )


CONTROLS = study(
    "controls",
    Variant("oracle", _oracle, None, trials=RATE_UPHILL),
    Variant("copy, blank image", by(), None, trials=UNTIL_LEARNED, twin=BLANK),
    Variant("copy, jigsaw", partial(changed, "copy", jigsaw_of), None, trials=UNTIL_LEARNED),
    Variant("distill, jigsaw", partial(changed, "distill", jigsaw_of), "distill", trials=UNTIL_LEARNED),
    Variant("distill, mean map", partial(changed, "distill", mean_of), "distill", trials=UNTIL_LEARNED),
    _answered(500),
    _answered(800),
)
