"""What transfer moves and costs: the paper's arithmetic, activations, PyTorch's FLOP counter and profiler."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from atfamily.measures.accounting import Memory, method_costs, step_memory, transferred_numbers
from atlib import AttentionTransfer, Plan, create_vit, walk
from atlib.attention_transfer import Transferred
from tests.helpers import IN_PLACE, random_images, randomise, set_fused

SIZE = {"img_size": 16, "patch_size": 4, "embed_dim": 12, "depth": 2, "num_heads": 3, "num_classes": 5}
CONFIG = SIZE | {"img_size": 24, "patch_size": 8, "depth": 4, "mlp_ratio": 3}
BATCH, NUMBER = 2, 4  # bytes of a float32


def vit(seed):
    """With attention that is not fused, so that every matrix product is counted once."""
    return randomise(set_fused(create_vit(CONFIG), False), seed)


def pair(how, size=SIZE, layers=None):
    return AttentionTransfer(create_vit(size), create_vit(size), Plan(how=how, layers=layers)).train()


def test_the_papers_count_for_vit_large_and_a_vit_with_rotary_positions():
    with torch.device("meta"):
        vits = (create_vit(name) for name in ("vit_large_patch16_224", "eva02_tiny_patch14_224"))
        numbers, rotary = map(transferred_numbers, vits)
    assert rotary == (12 * 257 * 192, 12 * 257 * 192, 12 * 257 * 192, 12 * 3 * 257**2, 12 * 257 * 192)
    assert numbers.q + numbers.k == 24 * 16 * 197 * 64 * 2 == 9_682_944  # 9.7 M
    assert numbers.map == 24 * 16 * 197**2 == 14_902_656  # 15 M
    assert numbers.features == numbers.q == numbers.v == 24 * 197 * 1024


def test_numbers_are_those_of_the_activations():
    model = create_vit(CONFIG | {"reg_tokens": 3})
    seen = walk(model, random_images(1, 3, 24, 24))
    numbers = transferred_numbers(model)
    for name in ("q", "k", "v", "map"):
        assert getattr(numbers, name) == sum(getattr(layer, name).numel() for layer in seen.layers)
    assert numbers.features == sum(tokens.numel() for tokens in seen.stream)


def counted(module, backward):
    """FLOPs of the matrix products of one batch as PyTorch counts them."""
    images, labels = random_images(BATCH, 3, 24, 24), torch.tensor([0, 4])
    with FlopCounterMode(display=False, custom_mapping=IN_PLACE) as counter, torch.set_grad_enabled(backward):
        output = module(images)
        if backward:
            logits, transfer_loss = output if isinstance(output, tuple) else (output, 0)
            (cross_entropy(logits, labels) + transfer_loss).backward()
    return counter.get_total_flops()


def test_costs_against_the_flop_counter():
    layers = 3
    costs = {cost.method: cost for cost in method_costs(CONFIG, batch=BATCH, layers=layers)}
    again = BATCH * 3 * 2 * 10 * 4 * 10  # one product (10, 4) by (4, 10), of three heads and two images
    plain, step = counted(vit(0).eval(), False), counted(vit(0).train(), True)
    for method in ("scratch", "fine-tune"):
        assert costs[method][1:3] == (step, plain)
    # what atlib does over again in order to store no map, by the module's own account
    copying = AttentionTransfer(vit(0), vit(1), Plan(how="copy", layers=range(layers)))
    # A walked student's attention is fused: its backward pass makes each map once more, and where q and k are
    # copied, PyTorch counts three products for gradients that nobody asks for.
    fused = (4 + 3 * layers) * again
    assert counted(copying.train(), True) == costs["copy"].step_flops + (layers - 1) * again + fused
    assert counted(copying.eval(), False) == costs["copy"].inference_flops + (layers - 1) * again
    distilling = AttentionTransfer(vit(0), vit(1), Plan(how="distill", layers=range(layers)))
    assert counted(distilling.train(), True) == costs["distill"].step_flops + (4 * layers - 1 + 4) * again
    assert costs["distill"].inference_flops == counted(distilling.student.eval(), False) == plain


@pytest.mark.parametrize("method, part", [("frozen probe", None), ("fine-tune attention", ".attn.")])
def test_costs_of_training_a_part_of_the_weights_against_the_flop_counter(method, part):
    costs = {cost.method: cost for cost in method_costs(CONFIG, batch=BATCH)}
    model = vit(0).train()
    for name, weight in model.named_parameters():
        weight.requires_grad_(name.startswith("head.") or (part is not None and part in name))
    assert counted(model, True) == costs[method].step_flops
    assert costs[method].inference_flops == counted(vit(0).eval(), False)


def test_costs_with_a_wider_teacher_against_the_flop_counter():
    """The student is counted with Copy and Distill, the teacher where its own weights are trained."""
    wide = CONFIG | {"embed_dim": 24}
    costs = {cost.method: cost for cost in method_costs(CONFIG, batch=BATCH, teacher=wide)}
    teacher = randomise(set_fused(create_vit(wide), False), 1)
    copying = AttentionTransfer(teacher, vit(0), Plan(how="copy", layers=range(4)))
    again = BATCH * 3 * 2 * 10 * 8 * 10  # maps are made once more from the teacher's q and k
    padded = 4 * again // 2  # fused attention has one width, so values are padded to that of q and k
    assert counted(copying.eval(), False) == costs["copy"].inference_flops + 3 * again + padded
    # and its backward pass counts five products of that width, where one of the values' width is needed
    backward = 4 * (5 * again - again // 2)
    assert counted(copying.train(), True) == costs["copy"].step_flops + 3 * again + padded + backward
    distilling = AttentionTransfer(teacher, vit(0), Plan(how="distill", layers=range(4)))
    own = again // 2  # of the student's q and k: four times a layer, as with a teacher of its width
    assert counted(distilling.train(), True) == costs["distill"].step_flops + 3 * again + 16 * own
    alone = {cost.method: cost for cost in method_costs(wide, batch=BATCH)}
    for method in ("frozen probe", "fine-tune attention", "fine-tune"):
        assert costs[method] == alone[method]
    both = costs["scratch"].parameters_kept + alone["scratch"].parameters_kept
    assert costs["copy"].parameters_kept == both


# --- memory


def test_memory_of_a_small_mlp_by_hand():
    mlp = nn.Sequential(nn.Flatten(), nn.Linear(12, 7), nn.ReLU(), nn.Linear(7, 5))
    weights = NUMBER * (12 * 7 + 7 + 7 * 5 + 5)
    # images; hidden units, once, which serve ReLU and the second layer; log p, labels, number of images
    inputs, rest = NUMBER * 2 * 12, NUMBER * 2 * 7 + NUMBER * 2 * 5 + 8 * 2 + NUMBER
    memory = step_memory(mlp, torch.zeros(2, 3, 2, 2))
    assert memory == Memory(weights, weights, 2 * weights, inputs + rest, 0)
    assert memory.total == 4 * weights + memory.saved
    # No gradient needed there, hence no moments, no input kept for it, and no mask of the ReLU.
    mlp[1].requires_grad_(False)
    trained = NUMBER * (7 * 5 + 5)
    assert step_memory(mlp, torch.zeros(2, 3, 2, 2)) == Memory(weights, trained, 2 * trained, rest, 0)
    assert step_memory(mlp.double(), torch.zeros(2, 3, 2, 2).double()).weights == 2 * weights


@pytest.mark.parametrize(
    "how, layers", [("alone", None), ("copy", None), ("distill", None), ("distill", [0])]
)
def test_what_is_kept_is_what_the_allocator_has_not_got_back(how, layers):
    """Between forward and backward pass, by the profiler's list of allocations: all but the images."""
    model = create_vit(SIZE).train() if how == "alone" else pair(how, layers=layers)
    images, labels = torch.zeros(8, 3, 16, 16), torch.zeros(8, dtype=torch.long)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        output = model(images)
        logits, transfer_loss = output if isinstance(output, Transferred) else (output, 0)
        loss = cross_entropy(logits, labels) + transfer_loss
        del output, logits, transfer_loss
    still_there = sum(event.self_cpu_memory_usage for event in profiled.events())
    assert loss.requires_grad
    known = images.nbytes + labels.nbytes
    # apart from the losses themselves, single numbers
    assert step_memory(model, images).saved - known == pytest.approx(still_there, abs=32)
