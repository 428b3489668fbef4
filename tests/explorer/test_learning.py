"""Training in the page is torch's: vit.c's losses, gradients and steps, in node, against the book's own."""

import base64
import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from atbook.worlds import glyph_images
from atbook.worlds.glyphs import World, generate
from atlib import AttentionTransfer, Plan, create_vit
from atlib.data import Images, pair
from atlib.recipe import Recipe
from atlib.train import make_optimizer, schedule, student_loss
from tests.explorer.conftest import SCRIPTS
from tests.helpers import randomise, state_of
from tools.wasm import SCRIPT, SOURCE, compiled, module_of

RECIPE = Recipe(steps=50, batch_size=64, lr=4e-3, weight_decay=0.1)


def node():
    """A node: the machine's own, or the one inside playwright."""
    own = shutil.which("node")
    if own is None:
        import playwright

        own = Path(playwright.__file__).parent / "driver" / "node"
        if not own.exists():
            pytest.skip("there is no node here, neither the machine's nor playwright's")
    return own


def asked(question, *scripts):
    files = [*scripts, *(SCRIPTS / name for name in ("model.js", "scenes.js", "vit-wasm.js", "learning.js"))]
    harness = Path(__file__).with_name("learn.mjs")
    command = [node(), harness, *files]
    done = subprocess.run(command, input=json.dumps(question), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def text(array, kind):
    return base64.b64encode(np.ascontiguousarray(array, dtype=kind).tobytes()).decode()


def numbers(text):
    return torch.from_numpy(np.frombuffer(base64.b64decode(text), dtype=np.float32).copy())


def flat(vit, without_head=False):
    tensors = [x for name, x in vit.state_dict().items() if not (without_head and name.startswith("head."))]
    return torch.cat([value.flatten() for value in tensors])


def weights_that_matter(seed):
    return randomise(create_vit("glyphs", num_classes=8), seed)


def scenes(size, twin=None):
    """Match's scenes with their labels; with a twin, each comes with what the teacher sees."""
    images = glyph_images(generate("train", size, 0, World("match")))
    if twin is None:
        return images
    return pair(images, glyph_images(generate("train", size, 0, World("match"), twin)))


def as_data(images: Images):
    pixels = images.pixels.numpy()
    own, seen = (pixels[:, 0], pixels[:, 1]) if pixels.ndim == 5 else (pixels, None)
    return {
        "bytes": text(own, np.uint8),
        "seen": None if seen is None else text(seen, np.uint8),
        "labels": text(images.targets.numpy(), np.int32),
    }


def task_for(images, student, teacher, batches, recipe=RECIPE):
    rules = {"warmup": recipe.warmup, "smoothing": recipe.label_smoothing, "clip": recipe.clip}
    return {
        "recipe": rules | {"steps": recipe.steps, "batch": recipe.batch_size},
        "lr": recipe.lr,
        "decay": recipe.weight_decay,
        "pixels": {"mean": images.mean, "std": images.std},
        "batches": batches,
        "first": text(flat(student), np.float32),
        "teacher": None if teacher is None else text(flat(teacher, without_head=True), np.float32),
        "trained": as_data(images),
        "heldOut": as_data(Images(images.pixels[:100], images.targets[:100], mean=0.5, std=0.25)),
    }


def of_torch(images, student, teacher, batches, kind=torch.float64, recipe=RECIPE):
    """Losses and the first step's gradients by the book's optimiser; changes the student."""
    student = student.to(kind)
    model = student if teacher is None else AttentionTransfer(teacher.to(kind), student, Plan())
    optimizer, losses, first = make_optimizer(model, recipe), [], None
    for step, indices in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = recipe.lr * schedule(step, recipe)
        pixels, labels = images.take(indices)
        loss = student_loss(model.train(), pixels.to(kind), labels, recipe)
        loss.backward()
        first = first or {name: value.grad.clone() for name, value in student.named_parameters()}
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, first


def by_tensor(numbers, vit):
    sizes = [value.numel() for value in vit.state_dict().values()]
    return dict(zip(vit.state_dict(), numbers.split(sizes), strict=True))


@pytest.mark.parametrize("copied", [None, "maps", "routing", "message"])
def test_four_steps_are_those_of_torch(copied):
    """The first one's gradients to 1e-4 of a tensor's largest, in double precision; where the weights went to
    a hundredth of their way. The batches fill no block of rows."""
    student, teacher = weights_that_matter(1), None if copied is None else weights_that_matter(2)
    images = scenes(100, None if copied in (None, "maps") else copied)
    batches, start = [list(range(first, first + 44)) for first in (3, 20, 41, 56)], state_of(student)
    answer = asked({"ask": "learn", "task": task_for(images, student, teacher, batches)})
    losses, gradients = of_torch(images, student, teacher, batches)
    apart = {}
    for name, found in by_tensor(numbers(answer["gradients"]), student).items():
        expected = gradients[name].flatten()
        assert expected.abs().max() > 1e-4 or ".attn.qkv.bias" in name
        apart[name] = ((found - expected).abs().max() / expected.abs().max()).item()
        if copied is not None and ".attn.qkv." in name:  # no gradient reaches the queries and keys
            assert (found[: 2 * len(found) // 3] == 0).all() and (found[2 * len(found) // 3 :] != 0).any()
    worst = max(apart, key=apart.get)
    print(f"{copied}: gradients {apart[worst]:.1e} ({worst})")
    assert answer["losses"] == pytest.approx(losses, abs=1e-4) and apart[worst] <= 1e-4
    for name, found in by_tensor(numbers(answer["weights"]), student).items():
        if ".attn.qkv.bias" not in name:  # Adam steps along what rounding leaves of the keys' gradient
            end, way = student.state_dict()[name].flatten(), student.state_dict()[name] - start[name]
            assert (found - end).norm() <= 0.01 * way.norm(), name


def test_answers_are_those_of_torch():
    student, teacher = weights_that_matter(1), weights_that_matter(2)
    images = scenes(100)
    answer = asked({"ask": "learn", "task": task_for(images, student, teacher, [])})
    with torch.no_grad():
        pixels, labels = images.take(range(100))
        logits = AttentionTransfer(teacher, student, Plan()).eval()(pixels).logits
    torch.testing.assert_close(numbers(answer["logits"]), logits[0], atol=1e-4, rtol=1e-4)
    assert answer["accuracy"] == (logits.argmax(1) == labels).double().mean().item()
    maps = numbers(answer["maps"]).reshape(4, 4, 17, 17)
    torch.testing.assert_close(maps.sum(-1), torch.ones(4, 4, 17))


def test_first_weights_are_drawn_as_timm_draws_them():
    vit = create_vit("glyphs")
    shapes = {name: list(value.shape) for name, value in vit.state_dict().items()}
    first = numbers(asked({"ask": "first", "shapes": shapes, "seed": 3}))
    assert not torch.equal(first, numbers(asked({"ask": "first", "shapes": shapes, "seed": 5})))
    for name, found in by_tensor(first, vit).items():
        expected = vit.state_dict()[name].flatten()
        assert found.mean().item() == pytest.approx(expected.mean().item(), abs=0.012), name
        error = 5 * expected.std().item() / (2 * len(expected)) ** 0.5
        spread = 0.02 if name == "blocks.0.mlp.fc1.weight" else expected.std().item()
        assert found.std().item() == pytest.approx(spread, abs=error), name


def test_a_runs_task_is_what_the_committed_student_has_learned(weights_file):
    """With its teacher's maps it answers, on scenes to learn from and on held-out ones; with those of scenes
    that have the same answer elsewhere it does not. (In place of a run of 500 steps, which took minutes.)"""

    def accuracies(copied):
        choices = {"world": "match", "copied": copied, "labels": 200, "lr": 0.016, "seed": 0}
        return asked({"ask": "known", "choices": choices}, weights_file)

    assert min(accuracies("maps")) > 0.7 and max(accuracies("message")) < 0.4


def test_the_module_is_what_clang_makes_of_the_c_file():
    """Byte for byte with the clang that it was made with; another one's has the same functions."""
    if shutil.which("clang") is None or shutil.which("wasm-ld") is None:
        pytest.skip("there is no clang with lld here: apt-get install clang lld")
    committed = module_of(SCRIPT.read_text(encoding="utf-8"))
    assert len(committed) < 100_000 and SOURCE.read_text(encoding="utf-8").count("\n") <= 500
    made, version = compiled(), subprocess.run(["clang", "--version"], capture_output=True, check=True).stdout
    if b"clang version 14." in version:
        assert made == committed, "vit.c has changed: run `make wasm` and commit vit-wasm.js"
