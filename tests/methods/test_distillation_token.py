"""The distillation token: its losses against the published code and formulas written out, what each head
learns, maps beside it, and what is left after training."""

import copy
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from timm.models.deit import VisionTransformerDistilled
from torch import nn
from torch.nn.functional import cosine_similarity, cross_entropy

from atfamily.distillation_token import DistillationToken, both_heads, small_convnet, token_report
from atlib import AttentionTransfer, Plan, create_vit, walk
from atlib.attention import Unwalkable
from atlib.data import UNLABELLED, Images, with_unlabelled
from atlib.losses import hard_distillation, noted, soft_distillation
from atlib.pair import Pair
from atlib.train import make_optimizer, student_loss, train
from atlib.train.objectives import mixed, task_loss, two_class_tokens_loss
from atlib.train.recipe import Recipe
from tests.helpers import SMALL_VIT, Bomb, random_images, randomise, same, since_timm_31, state_of

GOLDEN = load_file(Path(__file__).parents[1] / "golden" / "distillation_token.safetensors")
LABELS = torch.tensor([0, 3, 1])


def images_of(dtype=torch.float64, count=3):
    return random_images(count, 3, 32, 32, dtype=dtype)


def distilled(seed=2, **changes):
    return randomise(create_vit(SMALL_VIT | changes, distilled=True), seed).eval()


def convnet(seed=1):
    return randomise(small_convnet(5, (4, 6, 8)), seed)


def pair_of(student=None, teacher=None, **options):
    student = distilled() if student is None else student
    pair = DistillationToken(convnet() if teacher is None else teacher, student, **options)
    return pair.double().train()


def two_heads(student, images):
    """Both predictions as timm itself gives them in its own mode of training."""
    twin = copy.deepcopy(student).train()
    twin.set_distilled_training(True)
    return twin(images)


# --- the losses


@pytest.mark.parametrize("kind, alpha", [("hard", 0.5), ("soft", 0.1)])
def test_the_losses_are_those_of_the_published_code(kind, alpha):
    """Its soft loss divides by batch and classes, the equation by the batch: a tenth here, with ten
    classes."""
    of_class, of_token = (GOLDEN[name].clone().requires_grad_() for name in ("of_class", "of_token"))
    task = task_loss(of_class, GOLDEN["labels"], Recipe(label_smoothing=0.1))
    if kind == "hard":
        loss = (1 - alpha) * task + alpha * hard_distillation(of_token, GOLDEN["teacher"])
    else:
        loss = (1 - alpha) * task + alpha / 10 * soft_distillation(of_token, GOLDEN["teacher"], 3.0)
    loss.backward()
    assert loss.item() == pytest.approx(GOLDEN[f"{kind}.loss"].item(), abs=1e-12)
    for name, x in (("class", of_class), ("token", of_token)):
        assert (x.grad - GOLDEN[f"{kind}.{name}_gradient"]).abs().max() <= 1e-12


@pytest.mark.parametrize("hard", [True, False])
def test_each_head_learns_its_own(hard):
    """1/2 CE + 1/2 CE with the teacher's choice, and (1 - 0.1) CE + 0.1 · 9 KL, from timm's own two
    predictions; and all gradients."""
    pair, images = pair_of(hard=hard), images_of()
    alpha = 0.5 if hard else 0.1
    recipe = Recipe(task_weight=1 - alpha, transfer_weight=alpha)
    student_loss(pair, images, LABELS, recipe).backward()
    twin = copy.deepcopy(pair.student).train()
    twin.zero_grad()
    twin.set_distilled_training(True)
    of_class, of_token = twin(images)
    with torch.no_grad():
        theirs = pair.teacher(images)
    if hard:
        other = cross_entropy(of_token, theirs.argmax(1))
    else:
        p_t, log_p_s = (theirs / 3).softmax(1), (of_token / 3).log_softmax(1)
        other = 9 * (p_t * (p_t.log() - log_p_s)).sum(1).mean()
    ((1 - alpha) * cross_entropy(of_class, LABELS, label_smoothing=0.1) + alpha * other).backward()
    for (name, p), (_, expected) in zip(pair.student.named_parameters(), twin.named_parameters()):
        assert (p.grad - expected.grad).abs().max() <= 1e-10, name
        assert expected.grad.abs().max() > 0, name


def test_the_tokens_loss_sends_nothing_to_the_class_head():
    pair = pair_of()
    pair(images_of()).transfer_loss.backward()
    assert pair.student.head.weight.grad is None and pair.student.head_dist.weight.grad.abs().max() > 0
    pair.zero_grad()
    cross_entropy(pair(images_of()).logits, LABELS).backward()
    assert pair.student.head_dist.weight.grad is None and pair.student.head.weight.grad.abs().max() > 0


@since_timm_31
def test_dropout_before_the_heads_is_timms():
    student = distilled(drop_rate=0.5).double().train()
    torch.manual_seed(3)
    found = both_heads(student, student.forward_features(images_of()))
    torch.manual_seed(3)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, two_heads(student, images_of())))


# --- what is run, what is trained, what is left


def test_evaluated_it_is_timms_own_forward():
    pair, images = pair_of().eval(), images_of()
    pair._teacher = (Bomb("the teacher"),)
    output = pair(images)
    assert torch.equal(output.logits, pair.student(images)) and output.transfer_loss.item() == 0
    heads = two_heads(pair.student, images)
    assert torch.equal(output.logits, sum(heads) / 2) and not pair.needs_teacher
    assert isinstance(pair, Pair)


def test_only_the_student_is_trained():
    pair = pair_of()
    held = {id(p) for group in make_optimizer(pair, Recipe()).param_groups for p in group["params"]}
    assert held == {id(p) for p in pair.student.parameters()}
    assert list(pair.state_dict()) == [f"student.{name}" for name in pair.student.state_dict()]
    student_loss(pair, images_of(), LABELS, Recipe()).backward()
    assert all(p.grad is None for p in pair.teacher.parameters())
    assert all(p.grad is not None for p in pair.student.parameters())


def test_the_teacher_is_asked_in_eval_mode():
    """A convnet's batch norm would otherwise predict otherwise, and change with every batch."""
    pair, images = pair_of(), images_of()
    before, expected = state_of(pair.teacher), pair(images).transfer_loss
    pair.teacher.train()
    assert torch.equal(pair(images).transfer_loss, expected) and pair.teacher.training
    assert same(state_of(pair.teacher), before)


@pytest.mark.parametrize("hard", [True, False])
def test_it_trains_in_the_usual_loop_also_without_labels(glyphs64, hard):
    """With no label at all the class head is never told anything, and the other one is."""
    torch.manual_seed(0)
    student = create_vit("glyphs", depth=2, embed_dim=16, num_heads=2, distilled=True)
    teacher = small_convnet(8, (4, 8))
    before, kept = state_of(student), state_of(teacher)
    images = with_unlabelled(glyphs64.select([]), glyphs64)
    recipe = Recipe(steps=3, batch_size=16, weight_decay=0.0)
    history = train(DistillationToken(teacher, student, hard=hard), images, recipe, progress=None)
    after = state_of(student)
    assert math.isfinite(history[0]["loss"]) and same(state_of(teacher), kept)
    assert torch.equal(after["head.weight"], before["head.weight"])
    for name in ("head_dist.weight", "dist_token", "blocks.0.attn.qkv.weight"):
        assert not torch.equal(after[name], before[name]), name


# --- images without labels


def test_images_without_labels(glyphs64):
    some, more = glyphs64.select(range(10)), glyphs64.select(range(10, 64))
    images = with_unlabelled(some, more)
    assert len(images) == 64 and torch.equal(images.pixels, glyphs64.pixels)
    assert torch.equal(images.targets[:10], glyphs64.targets[:10]) and images.classes == glyphs64.classes
    assert set(images.targets[10:].tolist()) == {UNLABELLED}
    assert torch.equal(more.targets, glyphs64.targets[10:]), "those given stay as they are"
    with pytest.raises(ValueError, match=r"\(3, 32, 32\).*\(3, 16, 16\)"):
        with_unlabelled(some, more.with_pixels(more.pixels[:, :, :16, :16]))
    with pytest.raises(ValueError, match="0.25.*0.5"):
        with_unlabelled(some, Images(more.pixels, more.targets, std=0.5))
    with pytest.raises(ValueError, match="float32"):
        with_unlabelled(Images(some.pixels, some.targets.float()), more)


@pytest.mark.parametrize("binary", [False, True])
def test_the_task_is_the_mean_over_the_labelled(binary):
    logits, recipe = GOLDEN["of_class"].clone().requires_grad_(), Recipe(binary=binary)
    labels = GOLDEN["labels"].clone()
    whole = task_loss(logits, labels, recipe)
    labels[[0, 2, 5]] = UNLABELLED
    found = task_loss(logits, labels, recipe)
    assert torch.equal(found, task_loss(logits[[1, 3, 4]], labels[[1, 3, 4]], recipe)) and found != whole
    (gradient,) = torch.autograd.grad(found, logits)
    assert (gradient[[0, 2, 5]] == 0).all() and (gradient[[1, 3, 4]] != 0).any()
    nothing = task_loss(logits, torch.full_like(labels, UNLABELLED), recipe)
    (gradient,) = torch.autograd.grad(nothing, logits)
    assert nothing.item() == 0 and (gradient == 0).all(), "not NaN"


def test_what_has_no_label_is_not_mixed():
    targets = torch.tensor([1, UNLABELLED, 0, 2])
    with pytest.raises(ValueError, match="1 of 4"):
        mixed(random_images(4, 3, 8, 8), targets, Recipe(mixup=0.8), 3, (0, 0))


# --- maps beside the token


def beside(small_vit, how, **plan):
    student = distilled()
    plan = Plan(how=how, mismatched=True, **({"unequal_prefix": "own"} | plan))
    return student, AttentionTransfer(small_vit(seed=3), student, plan)


@pytest.mark.parametrize("how", ["copy", "distill"])
def test_maps_and_token_add_up(small_vit, how):
    student, maps = beside(small_vit, how)
    pair, images = pair_of(student, maps=maps, maps_weight=2.0), images_of()
    seen, map_loss = maps.walk_with_loss(images)
    heads = both_heads(student, student.norm(seen.tokens))
    with torch.no_grad():
        theirs = pair.teacher(images)
    found = pair(images)
    assert torch.equal(found.logits, heads.of_class)
    expected = cross_entropy(heads.of_token, theirs.argmax(1)) + 2 * map_loss
    assert found.transfer_loss.item() == pytest.approx(expected.item(), abs=1e-12)
    assert (map_loss > 0) == (how == "distill")
    alone = both_heads(student, student.forward_features(images)).of_class
    assert ((found.logits - alone).abs().max() > 1e-3) == (how == "copy")


@pytest.mark.parametrize("how", ["copy", "distill"])
def test_a_copied_map_leaves_the_token_to_the_student(small_vit, how):
    """On timm's student with a distillation token: (1 - s) · the teacher's row, s to the token; its row is
    the student's."""
    student, maps = beside(small_vit, how)
    pair, images = pair_of(student, maps=maps), images_of()
    (target, *_) = [seen.map for seen in walk(maps.teacher, images).layers]
    own = walk(student.eval(), images).layers[0].map
    found = maps.walk(images).layers[0].map
    if how == "distill":
        assert torch.equal(found, own)
        return
    others = [0, *range(2, 18)]
    expected = own.clone()
    for i, query in enumerate(others):
        s = own[:, :, query, 1:2]
        expected[:, :, query, others] = (1 - s) * target[:, :, i]
    assert (found - expected).abs().max() <= 1e-12 and (found.sum(-1) - 1).abs().max() <= 1e-12
    assert (found - own).abs().max() > 1e-2 and pair.needs_teacher


@pytest.mark.parametrize("how", ["copy", "distill"])
def test_evaluated_with_maps(small_vit, how):
    """Distilled, the student is alone; copied, it averages both heads under the teacher's maps."""
    student, maps = beside(small_vit, how)
    pair, images = pair_of(student, maps=maps).eval(), images_of()
    pair._teacher = (Bomb("the teacher of predictions"),)
    assert not maps.training and pair.needs_teacher == (how == "copy")
    output = pair(images)
    expected = student(images) if how == "distill" else maps.walk(images).logits
    assert torch.equal(output.logits, expected) and output.transfer_loss.item() == 0
    assert pair.train().maps.training


def test_all_teachers_follow_and_none_is_a_part(small_vit):
    student, maps = beside(small_vit, "distill")
    pair = pair_of(student, maps=maps)
    assert list(pair.state_dict()) == [f"student.{name}" for name in student.state_dict()]
    assert {p.dtype for model in (pair.teacher, maps.teacher) for p in model.parameters()} == {torch.float64}
    assert {id(p) for p in pair.parameters()} == {id(p) for p in student.parameters()}
    pair.float()
    assert pair(images_of(torch.float32)).logits.dtype == torch.float32
    twin = copy.deepcopy(pair)
    assert twin.maps.student is twin.student and twin.student is not student


def test_what_maps_learn_of_heads_is_trained_too(small_vit):
    student = distilled()
    plan = Plan(how="distill", mismatched=True, unequal_prefix="drop", unequal_heads="learn")
    maps = AttentionTransfer(small_vit(seed=3, num_heads=4), student, plan)
    pair = pair_of(student, maps=maps)
    assert [name for name in pair.state_dict() if not name.startswith("student.")] == [
        f"head_mapping.{layer}" for layer in range(3)
    ]
    pair(images_of()).transfer_loss.backward()
    assert all(M.grad.abs().max() > 0 for M in pair.head_mapping)


# --- two class tokens, and what becomes of two tokens


def test_two_class_tokens_learn_the_same():
    student, images = distilled().double().train(), images_of()
    student.set_distilled_training(True)
    recipe = Recipe(task_weight=0.7)
    with noted() as parts:
        found = two_class_tokens_loss(student, images, LABELS, recipe)
    assert found == 0.7 * parts["task_loss"]
    both = [cross_entropy(logits, LABELS, label_smoothing=0.1).item() for logits in student(images)]
    assert found.item() == pytest.approx(0.7 * sum(both) / 2, abs=1e-12)
    assert student.eval()(images).shape == (3, 5), "evaluated, it averages as always"


def test_a_report_by_hand():
    student, teacher, images = distilled().double(), convnet().double(), images_of(count=7)
    found = token_report(student.train(), teacher.train(), images, batch=3)
    assert student.training and teacher.training, "both are left as they were"
    student.eval(), teacher.eval()
    with torch.no_grad():
        tokens = student._pos_embed(student.patch_embed(images))
        expected = []
        for block in student.blocks:
            tokens = block(tokens)
            expected.append(cosine_similarity(tokens[:, 0], tokens[:, 1], dim=1).mean())
        tokens = student.norm(tokens)
        expected.append(cosine_similarity(tokens[:, 0], tokens[:, 1], dim=1).mean())
        of_class, of_token = (logits.argmax(1).tolist() for logits in two_heads(student, images))
        theirs, together = teacher(images).argmax(1).tolist(), student(images).argmax(1).tolist()
    assert (found.cosine - torch.stack(expected)).abs().max() <= 1e-12 and found.cosine.shape == (4,)

    def share(left, right):
        return pytest.approx(sum(a == b for a, b in zip(left, right)) / 7)

    assert found.heads == share(of_class, of_token) and found.together == share(together, theirs)
    assert found.of_class == share(of_class, theirs) and found.of_token == share(of_token, theirs)


def test_the_convnet_is_small_and_sees_where_things_are_not():
    """The maximum over places: what moves by whole pixels of the last layer is the same to it."""
    net = small_convnet(8).eval()
    assert 130_000 < sum(p.numel() for p in net.parameters()) < 150_000
    assert net(random_images(2, 3, 32, 32)).shape == (2, 8)
    image = torch.zeros(1, 3, 64, 64)
    image[:, :, 24:32, 24:32] = 1
    with torch.no_grad():
        assert torch.allclose(net(image), net(image.roll((8, 8), (2, 3))), atol=1e-6)


# --- what is refused


def test_a_student_without_the_token_is_named(small_vit):
    with pytest.raises(ValueError, match="VisionTransformer .*distilled=True"):
        DistillationToken(convnet(), small_vit())
    assert isinstance(create_vit("glyphs", distilled=True), VisionTransformerDistilled)
    assert not isinstance(create_vit("glyphs", distilled=False), VisionTransformerDistilled)


def test_wrong_numbers_and_other_students(small_vit):
    for temperature in (0, -1.0, math.nan):
        with pytest.raises(ValueError, match=f"temperature .* {temperature}"):
            DistillationToken(convnet(), distilled(), temperature=temperature)
    for weight in (-1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match=f"maps_weight={weight}"):
            DistillationToken(convnet(), distilled(), maps_weight=weight)
    _, maps = beside(small_vit, "distill")
    with pytest.raises(ValueError, match="another student"):
        DistillationToken(convnet(), distilled(), maps=maps)
    student = distilled()
    with pytest.raises(ValueError, match="same object"):
        DistillationToken(student, student)
    with pytest.raises(ValueError, match=r"\(3, 5\).*\(3, 7\)"):
        pair_of(teacher=nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 7)))(images_of())


def test_the_pair_is_walked_by_its_student():
    with pytest.raises(Unwalkable, match="DistillationToken.*student"):
        walk(pair_of(), images_of())
