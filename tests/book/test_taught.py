"""What notebooks write out by hand (cells tagged `taught`) and do not compare themselves is atlib's."""

import math
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import jupytext
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from atbook.lab.scales import scales
from atbook.lab.studies import PRETRAINING
from atbook.lab.study import Sources
from atbook.records import results_folder
from atbook.worlds import glyph_images, glyphs
from atfamily.measures import predictions as measures
from atlib import Plan, create_vit, walk
from atlib.analysis import StreamingDivergence, attention_distance, attention_entropy, jensen_shannon
from atlib.checkpoint import load_vit
from atlib.recipe import Recipe
from atlib.train import make_optimizer, schedule
from tests import toy
from tests.helpers import ROOT, SMALL_VIT, random_images, random_maps

NOTEBOOKS = ROOT / "notebooks"
MORE = "../book/more-on-signals"


def taught_cells(source: Path) -> list[str]:
    """The code of a notebook's cells tagged `taught`, in order."""
    cells = jupytext.read(source, fmt="md:myst").cells
    return [cell.source for cell in cells if "taught" in cell.metadata.get("tags", [])]


@cache
def taught(name: str) -> SimpleNamespace:
    """All that the taught cells of notebooks/NAME.md define, run by themselves in one namespace."""
    cells = taught_cells(NOTEBOOKS / f"{name}.md")
    assert cells, f"{name}.md has no cell tagged `taught`"
    namespace: dict = {}
    for code in cells:
        exec(compile(code, f"{name}.md", "exec"), namespace)
    return SimpleNamespace(**{key: value for key, value in namespace.items() if not key.startswith("__")})


def small_vit(seed: int, **changes):
    """A small ViT with timm's own first weights, in eval mode."""
    torch.manual_seed(seed)
    return create_vit(SMALL_VIT | {"embed_dim": 48} | changes).eval()


TEACHING = [path.stem for path in sorted(NOTEBOOKS.glob("*.md")) if taught_cells(path)]
# What these write out is compared here, in test_cards.py and in test_when_to_use_it.py.
COMPARED_HERE = {"10-when-it-fails-when-to-use-it", "when-are-features-needed"}


@pytest.mark.parametrize("name", TEACHING)
def test_taught_cells_stand_on_their_own_and_are_compared(name):
    assert any(callable(value) for value in vars(taught(name)).values())
    source = (NOTEBOOKS / f"{name}.md").read_text(encoding="utf-8")
    assert "assert " in source or name in COMPARED_HERE or name.startswith("card-")


@pytest.mark.parametrize("recipe", [Recipe(steps=20, warmup=0.0), Recipe(steps=50, lr=3e-3, min_lr=1e-3)])
def test_lr_factor_is_the_schedule(recipe):
    factors = [taught("training-loop").lr_factor(step, recipe) for step in range(recipe.steps)]
    assert factors == pytest.approx([schedule(step, recipe) for step in range(recipe.steps)])


def test_layer_decay_is_timms():
    model = small_vit(0, depth=5)
    optimizer = make_optimizer(model, Recipe(lr=1.0, layer_decay=0.6))
    expected = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    names = [name for name, _ in model.named_parameters()]
    factors = taught("../book/recipes").learning_rate_factors(names, 5, 0.6)
    for name, parameter in model.named_parameters():
        assert factors[name] == pytest.approx(expected[id(parameter)]), name


def test_divergences_are_atlibs():
    student, teacher = random_maps(3, 4, 6, 6), random_maps(3, 4, 6, 6, seed=1)
    expected, by_heads = jensen_shannon(student, teacher), StreamingDivergence()
    by_heads.update(student, teacher)
    by_hand = taught(MORE)
    assert torch.allclose(by_hand.jensen_shannon(student, teacher), expected, rtol=0, atol=1e-12)
    assert torch.allclose(by_hand.head_divergences(student, teacher), by_heads.matrix(), rtol=0, atol=1e-12)
    assert by_hand.jensen_shannon(*torch.eye(2)).item() == pytest.approx(math.log(2)), "zeros add nothing"
    order = [2, 0, 3, 1]
    table = torch.rand(4, 4) + 1
    table[range(4), order] = torch.rand(4)
    smallest, matching = by_hand.matched(table)
    assert list(matching) == order and smallest == pytest.approx(table[range(4), order].mean().item())


@pytest.mark.parametrize("grid, prefix", [((4, 4), 1), ((2, 3), 0), ((3, 2), 3)])
def test_distance_and_entropy(grid, prefix):
    N = prefix + grid[0] * grid[1]
    maps = random_maps(2, 1, N, N)
    maps[1, 0, prefix] = torch.eye(N, dtype=torch.float64)[0]  # one patch looks at one token alone
    for one in maps:
        distance, entropy = attention_distance(one[None], grid, prefix), attention_entropy(one[None])
        by_hand = taught("which-rows")
        assert by_hand.distance_by_hand(one[0], grid, prefix) == pytest.approx(distance.item(), rel=1e-10)
        assert by_hand.entropy_by_hand(one[0]) == pytest.approx(entropy.item(), rel=1e-10)


def test_within_classes():
    x, labels = random_images(30, 4, seed=5, dtype=torch.float64), torch.arange(30) % 3 * 2
    rest = taught("same-features-same-mistakes").within_classes(x.clone(), labels)
    for label in (0, 2, 4):
        of_class = x[labels == label]
        torch.testing.assert_close(rest[labels == label], of_class - of_class.mean(0))


def answers(right: torch.Tensor, labels: torch.Tensor, classes: int) -> torch.Tensor:
    """Probabilities of a model that answers rightly where it is told to, else with any other class."""
    wrong = (labels + torch.randint(1, classes, labels.shape)) % classes
    return F.one_hot(torch.where(right, labels, wrong), classes).double()


@pytest.mark.parametrize("accuracy_a, accuracy_b", [(0.9, 0.7), (0.3, 0.2)])
def test_position_is_0_for_nested_and_1_for_independent_mistakes(accuracy_a, accuracy_b):
    torch.manual_seed(0)
    labels, luck = torch.randint(8, (50_000,)), torch.rand(2, 50_000)
    a, b = answers(luck[0] < accuracy_a, labels, 8), answers(luck[1] < accuracy_b, labels, 8)
    position = taught("same-features-same-mistakes").position
    assert position(measures.disagreement(a, b), accuracy_a, accuracy_b) == pytest.approx(1, abs=0.03)
    assert position(abs(accuracy_a - accuracy_b), accuracy_a, accuracy_b) == 0


def test_looks_are_entries_of_the_maps():
    vit, drawn = small_vit(0, depth=2), glyphs.generate("train", 5, seed=3)
    images = torch.from_numpy(drawn.images).float() / 255
    found = taught("when-are-features-needed").looks(vit, images, torch.from_numpy(drawn.cell))
    with torch.no_grad():
        rows = torch.stack([seen.map[:, :, 0] for seen in walk(vit, images).layers], 1)
    on_cell = np.stack([rows[image, ..., 1 + cell] for image, cell in enumerate(drawn.cell)])
    assert torch.equal(found[0], torch.from_numpy(on_cell)) and torch.equal(found[1], rows[..., 0])


def test_mixed_is_what_the_study_trains(tmp_path):
    place = toy.place(tmp_path)
    toy.untrained_models(place, PRETRAINING.teachers)
    sources = Sources(place, toy.TOY, 0, schooling=PRETRAINING.teachers[0])
    theirs = PRETRAINING.variant("useless features, useful routing").build(sources)
    ours = taught("when-are-features-needed").mixed(sources.teacher(), sources.central_teacher())
    ours.student.head.load_state_dict(theirs.student.head.state_dict())
    assert ours.plan == theirs.plan == Plan()
    learn = [{n for n, p in pair.named_parameters() if p.requires_grad} for pair in (ours, theirs)]
    assert learn[0] == learn[1] and learn[0]
    images = torch.rand(3, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(ours.eval()(images).logits, theirs.eval()(images).logits)


# --- Sentences about committed weights


def committed(name: str, world: str = "find"):
    return load_vit(results_folder() / "transfer" / world / f"{name}-seed0.safetensors").eval()


@torch.no_grad()
@pytest.mark.parametrize("world", ["find", "match"])
def test_at_twice_the_side_a_teacher_looks_elsewhere_in_more_than_half_of_the_cases(world):
    teacher = committed("teacher", world)
    images, _ = scales()[world].held_out("test").take(range(200))
    small = walk(teacher, images).layers[-1].map[:, :, 0, 1:].argmax(-1)
    teacher.set_input_size(img_size=(64, 64))
    large = walk(teacher, F.interpolate(images, (64, 64), mode="bicubic", antialias=True)).layers[-1]
    # a cell of 4 x 4 is four patches of 8 x 8
    cells = large.map[:, :, 0, 1:].unflatten(-1, (4, 2, 4, 2)).sum((-3, -1)).flatten(-2)
    assert (cells.argmax(-1) != small).float().mean() > 0.5


@torch.no_grad()
def test_on_the_page_of_look_both_look_at_the_mark_and_the_student_is_wrong():
    drawn = glyphs.generate("test", 2)
    images, labels = glyph_images(drawn).take([1])
    marked = int(drawn.cell[1])
    of_teacher, of_student = (walk(committed(name), images) for name in ("teacher", "scratch"))
    rows, student_rows = ([x.map.mean(1)[0, 0, 1:] for x in one.layers] for one in (of_teacher, of_student))
    assert all(row.argmax() == marked and row[marked] > 0.5 for row in rows)
    assert all(student_rows[layer].argmax() == marked for layer in (1, 2))
    shares = [f"{student_rows[layer][marked]:.2f}" for layer in (1, 2)]
    page = (ROOT / "book" / "look.md").read_text(encoding="utf-8")
    assert "shares of {} and {}".format(*shares) in page and of_student.logits.argmax(-1) != labels
