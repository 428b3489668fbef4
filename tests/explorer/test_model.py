"""The forward pass in JavaScript is torch's: the same weights, images and maps give the same answers."""

from functools import cache

import numpy as np
import pytest
import torch

from atbook.explorer.export import DIGITS, STUDENTS
from atbook.worlds import glyph_images
from atbook.worlds.glyphs import TASKS, World, generate
from atlib import create_vit, walk
from atlib.attention import Instead
from atlib.checkpoint import load_vit
from tests.explorer.conftest import received, sent
from tests.helpers import ROOT

SCENES = 10
CHOICES = ("own", "teacher", "twin", "uniform")
MODELS = [
    (world, name)
    for world in TASKS
    for name in ("teacher", "untrained", *STUDENTS)
    if name in ("teacher", "untrained")
    or (ROOT / "results" / "transfer" / world / f"{name}-seed0.safetensors").exists()
]


def decoded(tensor):
    """The values behind a tensor's text, read by the rule in the export's docstring."""
    known = sorted(DIGITS)
    places = np.searchsorted(known, list(tensor["text"]))
    digits = np.array([DIGITS.index(character) for character in known])[places].reshape(-1, 2)
    level = digits[:, 0] * 64 + digits[:, 1] - 2048
    return torch.from_numpy(level * tensor["scale"]).float().reshape(tensor["shape"])


def written(content, world, name):
    """What the script has of a model."""
    return content["untrained"] if name == "untrained" else content["worlds"][world][name]


@pytest.fixture(scope="module")
def vit_of(content):
    """A function from a world and a name to the model that the script describes, as timm's."""

    @cache
    def build(world, name):
        state = {key: decoded(value) for key, value in written(content, world, name)["tensors"].items()}
        vit = create_vit("glyphs", num_classes=len(state["head.bias"]))
        vit.load_state_dict(state)
        return vit.eval()

    return build


@pytest.fixture(scope="module")
def scenes():
    """Bytes of noisy scenes of both worlds, and of their routing twins: world to (10, 3, 32, 32) twice."""
    twins = (None, "routing")
    return {task: [generate("test", SCENES, 0, World(task), twin).images for twin in twins] for task in TASKS}


def expected(vit_of, learned_with, world, name, choice, images, twins):
    """Logits (SCENES, classes) and maps (SCENES, L, H, N, N) of torch's walk."""
    vit = vit_of(world, name)
    teacher = vit_of(world, "untrained" if learned_with == "untrained" else "teacher")
    with torch.no_grad():
        maps = {
            "own": None,
            "teacher": [layer.map for layer in walk(teacher, images).layers],
            "twin": [layer.map for layer in walk(teacher, twins).layers],
            "uniform": [torch.full((SCENES, 4, 17, 17), 1 / 17)] * 4,
        }[choice]
        replace = None if maps is None else {i: Instead(map=one) for i, one in enumerate(maps)}
        walked = walk(vit, images, replace=replace)
        return walked.logits, torch.stack([layer.map for layer in walked.layers], 1)


FORWARD = """([world, name, choice, scenes, twins]) => {
    const read = name => (models[`${world} ${name}`] ??= Explorer.readModel(ExplorerWeights, world, name));
    const model = read(name), teacher = read(model.maps === "untrained" ? "untrained" : "teacher");
    const seen = text => {
        const bytes = bytesOf(text), size = 3 * 32 * 32;
        return Array.from({ length: bytes.length / size }, (_, i) =>
            Explorer.prepare(bytes.subarray(i * size, (i + 1) * size), ExplorerWeights.pixels));
    };
    const others = seen(twins), logits = [], maps = [], used = {
        own: () => [],
        teacher: (pixels) => Explorer.forward(teacher, pixels).maps,
        twin: (pixels, i) => Explorer.forward(teacher, others[i]).maps,
        uniform: () => Explorer.uniformMaps(4, 4, 17),
    }[choice];
    seen(scenes).forEach((pixels, i) => {
        const result = Explorer.forward(model, pixels, used(pixels, i));
        logits.push(result.logits);
        maps.push(...result.maps);
    });
    return [textOf(logits), textOf(maps)];
}"""


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize(("world", "name"), MODELS)
def test_logits_and_maps_are_those_of_torch(tab, content, vit_of, scenes, world, name, choice):
    images, twins = (glyph_images_of(part) for part in scenes[world])
    learned_with = written(content, world, name)["maps"]
    logits, maps = expected(vit_of, learned_with, world, name, choice, images, twins)
    texts = tab.evaluate(FORWARD, [world, name, choice, *map(sent, scenes[world])])
    found_logits, found_maps = (torch.from_numpy(received(text).copy()) for text in texts)
    apart = (found_logits.reshape(logits.shape) - logits).abs().max().item()
    maps_apart = (found_maps.reshape(maps.shape) - maps).abs().max().item()
    print(f"{world} {name} {choice}: logits {apart:.1e}, maps {maps_apart:.1e}")
    # logits that do not depend on the scene would agree whatever is computed
    assert logits.std(0).max() > 1e-3
    assert apart <= 1e-3 and maps_apart <= 1e-4


def glyph_images_of(pixels):
    """The bytes as a model is given them, float32 (SCENES, 3, 32, 32)."""
    drawn = generate("test", 1)._replace(images=pixels, shape=np.zeros(len(pixels), dtype=np.int64))
    return glyph_images(drawn).take(range(len(pixels)))[0]


def test_the_five_kinds_of_maps_of_the_page(vit_of):
    """What book/play.md shows on one scene holds for most: Copy with its teacher's maps of something else."""
    drawn = generate("test", 500)
    copy, teacher = vit_of("find", "copy"), vit_of("find", "teacher")
    images, targets = glyph_images(drawn).take(range(500))

    def right(twin):
        seen = images if twin is None else glyph_images_of(generate("test", 500, twin=twin).images)
        maps = {i: Instead(map=layer.map) for i, layer in enumerate(walk(teacher, seen).layers)}
        return (walk(copy, images, replace=maps).logits.argmax(1) == targets).float().mean()

    with torch.no_grad():
        uniform = {i: Instead(map=torch.full((500, 4, 17, 17), 1 / 17)) for i in range(4)}
        guessed = (walk(copy, images, replace=uniform).logits.argmax(1) == targets).float().mean()
        assert right(None) > 0.9 and right("distractors") > 0.9
        assert right("routing") < 0.5 and right("message") < 0.4 and guessed < 0.2


def test_painted_rows_replace_those_of_the_models_own_maps(tab, vit_of, scenes):
    """In every layer the class token's row and one more, in all heads; shares need not sum to 1."""
    pixels, vit = scenes["match"][0][:1], vit_of("match", "scratch")
    rows = {0: [0, 3] + [0] * 14 + [1], 5: list(range(17))}
    replace = {}
    with torch.no_grad():
        for layer in range(4):
            before = walk(vit, glyph_images_of(pixels), replace=replace)
            painted = before.layers[layer].map.clone()
            for token, shares in rows.items():
                painted[:, :, token] = torch.tensor(shares) / sum(shares)
            replace[layer] = Instead(map=painted)
        walked = walk(vit, glyph_images_of(pixels), replace=replace)
    forward = """([text, rows]) => {
        const model = Explorer.readModel(ExplorerWeights, "match", "scratch");
        const pixels = Explorer.prepare(bytesOf(text), ExplorerWeights.pixels);
        const painted = Array(4).fill(map => Explorer.withRows(map, rows, 17));
        const result = Explorer.forward(model, pixels, painted);
        return [textOf([result.logits]), textOf(result.maps)];
    }"""
    shares_by_token = {str(token): shares for token, shares in rows.items()}
    logits, maps = map(received, tab.evaluate(forward, [sent(pixels), shares_by_token]))
    assert (walked.logits - before.logits).abs().max() > 1e-3, "what was painted last counts too"
    np.testing.assert_allclose(logits, walked.logits[0], atol=1e-3)
    expected_maps = torch.stack([layer.map[0] for layer in walked.layers])
    np.testing.assert_allclose(maps.reshape(4, 4, 17, 17), expected_maps, atol=1e-4)


def test_rounded_weights_answer_as_the_committed_ones(vit_of):
    """Of 500 scenes, at most one is answered differently."""
    for name in ("scratch", "fine-tune"):
        vit = load_vit(ROOT / "results" / "transfer" / "find" / f"{name}-seed0.safetensors").eval()
        images, _ = glyph_images(generate("test", 500)).take(range(500))
        with torch.no_grad():
            same = vit(images).argmax(1) == vit_of("find", name)(images).argmax(1)
        assert same.sum() >= 499
