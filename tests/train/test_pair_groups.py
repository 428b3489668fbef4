"""A pair is trained as its student is: rates, decays, mixup, checkpointing, an average; by any method."""

import pytest
import torch
from timm.models.cait import Cait

from atfamily.attndistill import AttnDistill
from atfamily.cait import CaitTransfer
from atfamily.contrast import Dino, MoCo
from atfamily.detection.detector import fcos
from atfamily.detection.segment import Segmenter
from atfamily.distillation_token import DistillationToken
from atfamily.distilled_mae import DistilledMae
from atfamily.grafit import Grafit
from atfamily.patch_conv import PatchConvNet, PoolTransfer
from atfamily.resmlp import StaticMapDistill, mean_patch_maps, resmlp
from atfamily.simmim import SimMim
from atfamily.token_distillation import TokenDistillation
from atlib import AttentionTransfer, Plan, create_vit
from atlib.baselines import FeatureDistillation, LogitDistillation, MeanMapCopy
from atlib.data import Images
from atlib.mae import MaskedAutoencoder
from atlib.pair import Pair, student_of
from atlib.recipe import Recipe
from atlib.train import make_optimizer, train
from tests.helpers import SMALL_VIT, random_images, same, state_of

CLASSES = SMALL_VIT["num_classes"]
IMAGES = random_images(4, 3, 32, 32)


def vit(seed, **changes):
    torch.manual_seed(seed)
    return create_vit(SMALL_VIT | changes)


def static_maps():
    teacher = vit(1)
    student = resmlp(32, 8, 24, 3, CLASSES)
    return StaticMapDistill(student, mean_patch_maps(teacher, IMAGES))


def beside_a_token():
    student = vit(2, distilled=True)
    maps = AttentionTransfer(vit(1, distilled=True), student, Plan(how="distill"))
    return DistillationToken(vit(3), student, maps=maps)


KINDS = {
    "copy": lambda: AttentionTransfer(vit(1), vit(2), Plan()),
    "distill": lambda: AttentionTransfer(vit(1), vit(2), Plan(how="distill")),
    "learned heads": lambda: AttentionTransfer(
        vit(1, num_heads=6), vit(2), Plan(how="distill", unequal_heads="learn")
    ),
    "features": lambda: FeatureDistillation(vit(1), vit(2)),
    "tokens": lambda: TokenDistillation(vit(1), vit(2)),
    "predictions": lambda: LogitDistillation(vit(1), vit(2)),
    "token": beside_a_token,
    "attndistill": lambda: AttnDistill(vit(1), vit(2)),
    "mean maps": lambda: MeanMapCopy(vit(1), vit(2), IMAGES),
    "static maps": static_maps,
    "class attention": lambda: CaitTransfer(vit(1), Cait(**SMALL_VIT, depth_token_only=1), patches="copy"),
    "pool": lambda: PoolTransfer(vit(1), PatchConvNet(CLASSES, width=24, depth=2, patch_size=8)),
    "distilled mae": lambda: DistilledMae(vit(1), MaskedAutoencoder(vit(2))),
}
DATA = Images(
    torch.randint(256, (24, 3, 32, 32), generator=torch.Generator().manual_seed(0), dtype=torch.uint8),
    torch.arange(24) % CLASSES,
)


def groups_of(model, names, **recipe):
    """{the parameter's name: (rate, weight decay)} as the optimiser has it."""
    groups = make_optimizer(model, Recipe(lr=1.0, weight_decay=0.3, **recipe)).param_groups
    return {names[id(p)]: (group["lr"], group["weight_decay"]) for group in groups for p in group["params"]}


@pytest.mark.parametrize("kind", KINDS)
def test_rates_and_decays_of_a_pair_are_those_of_its_student(kind):
    pair = KINDS[kind]()
    names = {id(p): name for name, p in pair.student.named_parameters()}
    alone = groups_of(pair.student, names, layer_decay=0.5)
    beside = {id(p): name for name, p in pair.named_parameters() if id(p) not in names}
    both = groups_of(pair, names | beside, layer_decay=0.5)
    assert {name: both[name] for name in alone} == alone
    assert set(both) - set(alone) == set(beside.values())
    assert all(both[name] == (1.0, 0.3) for name in beside.values())


@pytest.mark.parametrize("name", ["adamw", "lamb", "sgd"])
def test_rates_by_layer_and_no_decay_on_biases_norms_positions_and_tokens(name):
    model = vit(1, reg_tokens=2, init_values=0.1)
    weights = dict(model.named_parameters())
    groups = groups_of(model, {id(p): n for n, p in weights.items()}, optimizer=name, layer_decay=0.5)
    below = {"head": 0, "norm": 1, "blocks.2": 1, "blocks.1": 2, "blocks.0": 3}
    free = ("cls_token", "reg_token", "pos_embed")
    for n, p in weights.items():
        layers = next((number for part, number in below.items() if n.startswith(f"{part}.")), 4)
        assert groups[n] == (0.5**layers, 0.0 if p.ndim == 1 or n in free else 0.3), n


@pytest.mark.parametrize("wrapped", [torch.nn.DataParallel, torch.compile])
def test_a_wrapped_model_which_hides_names_and_normalisation_is_refused(wrapped):
    """Else position and class token decay, and layers have one rate."""
    for model in (wrapped(vit(1)), wrapped(KINDS["copy"]()), LogitDistillation(vit(1), wrapped(vit(2)))):
        with pytest.raises(ValueError, match="give model."):
            make_optimizer(model, Recipe())
    with pytest.raises(ValueError, match="give teacher.module"):
        LogitDistillation(torch.nn.DataParallel(vit(1)), vit(2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_in_half_precision_are_not_trained(dtype):
    """Under autocast it would run: 0.999 · 1 + 0.001 · 1.1 is 1 in bfloat16, for ever."""
    with pytest.raises(ValueError, match=r"model.float\(\)"):
        train(vit(1).to(dtype), DATA, Recipe(steps=1, mixed_precision="bf16"), cpu=True, progress=None)
    pair = LogitDistillation(vit(1).to(dtype), vit(2))  # a teacher may be in it
    if dtype == torch.bfloat16:  # autocast mixes no two halves
        train(pair, DATA, Recipe(steps=1, mixed_precision="bf16"), cpu=True, progress=None)


ALONE = {
    "mae": lambda: MaskedAutoencoder(vit(1)),
    "distilled mae": lambda: DistilledMae(vit(1), MaskedAutoencoder(vit(2))),
    "simmim": lambda: SimMim(vit(1)),
    "moco": lambda: MoCo(vit(1), projection=8, hidden=16),
    "dino": lambda: Dino(vit(1), outputs=10, hidden=16, bottleneck=6),
    "grafit": lambda: Grafit(vit(1), torch.Tensor.contiguous, 24),
    "grafit on a pair": lambda: Grafit(KINDS["copy"](), torch.Tensor.contiguous, 24),
    "a detector": lambda: fcos(vit(1), 3),
    "a segmenter on a pair": lambda: Segmenter(KINDS["copy"](), 3),
}
FREE = ("pos_embed", "cls_token", "mask_token", "decoder_positions")


@pytest.mark.parametrize("kind", ALONE)
def test_matrices_are_decayed_and_neither_positions_nor_tokens(kind):
    model = ALONE[kind]()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    groups = groups_of(model, {id(p): name for name, p in model.named_parameters()})
    decayed = {name for name, (_, decay) in groups.items() if decay} & trained.keys()
    assert decayed == {name for name, p in trained.items() if p.ndim >= 2 and not name.endswith(FREE)}
    assert trained.keys() <= groups.keys() and any(name.endswith("pos_embed") for name in trained)


@pytest.mark.parametrize("kind", KINDS)
def test_the_student_is_found_and_no_teacher_is_a_part(kind):
    pair = KINDS[kind]()
    assert isinstance(pair, Pair) and student_of(pair) is pair.student
    assert student_of(pair.student) is pair.student
    own = {id(p) for p in pair.parameters()}
    for teacher in pair.teachers:
        assert own.isdisjoint(id(p) for p in teacher.parameters())
    pair.double()
    assert {p.dtype for model in (pair, *pair.teachers) for p in model.parameters()} == {torch.float64}


def test_a_pair_without_a_transfer_loss_is_trained_as_its_student():
    everything = dict(mixup=0.8, cutmix=1.0, checkpoint_activations=True, ema=0.9, layer_decay=0.75)
    recipe = Recipe(steps=4, batch_size=8, transfer_weight=0.0, **everything)
    pair, alone = AttentionTransfer(vit(1), vit(2), Plan(how="distill")), vit(2)
    for model in (pair, alone):
        train(model, DATA, recipe, progress=None)
    assert same(state_of(alone), state_of(pair.student))
