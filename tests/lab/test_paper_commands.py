"""Every figure of the papers' tables has a command, and each configures a run that fits, in shapes alone."""

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from atbook.lab.paper_commands import FIGURES, TITLES, elsewhere, repeats
from atbook.lab.papers import quoted
from atlib import compatibility
from atlib.baselines import StoredMaps
from atlib.vit import Architecture, without_weights
from atrun import __main__ as command
from atrun import build as building
from atrun import commands, measure
from atrun import configure as configuring
from atrun.config import read_config, write_config
from atrun.data.natural_shifts import SHIFTED
from atrun.teachers.build import Teacher
from tests.helpers import ROOT

PAPERS = ROOT / "book" / "papers"
# of a table: what is measured; the other columns, and gains, say of what or follow
MEASURED = "top1 scratch fine_tune copy distill millions memory_GB seconds_per_iteration".split()
LARGE = "vit_large_patch16_224"
OF_FLIP = {"act_layer": "gelu_tanh", "global_pool": "avg", "fc_norm": False, "pool_include_prefix": True}
FILES = {
    "moco-v3-vit-large.safetensors": Architecture(LARGE, {"num_classes": 0}),
    "flip-vit-large.safetensors": Architecture(LARGE, {"num_classes": 0, **OF_FLIP}),
}
KNOWN = {}  # what was built of shapes, by all tests


class Images:
    """A thousand, of which nothing is looked at."""

    classes = tuple(map(str, range(1000)))

    def __len__(self):
        return 1000


def structure(model):
    """All that sizes of layers hang on: two models that differ in other things, as in the head, are walked
    once."""
    shapes = [tuple(of.shape) for name, of in model.named_parameters() if not name.startswith("head.")]
    heads = [getattr(part, "num_heads", 0) for part in model.modules()]
    return re.sub(r"DropPath\(.*?\)|(?<=\(head\): ).*", "Identity()", repr(model)), str(shapes), str(heads)


@pytest.fixture
def configured(tmp_path, monkeypatch):
    """Calls a command up to where it would read data or weights; a run leaves its config and empty files."""
    monkeypatch.chdir(tmp_path)
    for folder in ("inat2017", "inat2018", "inat2019", "imagenet-21k", "imagenet-22k", "coco/train2017"):
        (tmp_path / "data" / folder).mkdir(parents=True)
    (tmp_path / "weights").mkdir()
    for name in FILES:
        save_file({"nothing": torch.zeros(1)}, tmp_path / "weights" / name)
    done, built = [], set()

    def once(place, name, key):  # nothing here changes a student or a teacher, which are of shapes alone
        seen, plain = KNOWN.setdefault(name, {}), getattr(place, name)

        def call(one, *more):
            if (known := key(one)) not in seen:
                with without_weights():
                    seen[known] = plain(one, *more)
            return seen[known]

        monkeypatch.setattr(place, name, call)

    def of_shapes(name, image_size=None, **told):
        sized = {} if image_size is None else {"img_size": image_size}
        path = Path(name)
        if path.parent.parent.name == "runs":
            config = read_config(path.parent)
            architecture = Architecture(config.model.name, {**config.model.overrides, "num_classes": 0})
        else:
            architecture = FILES.get(path.name, Architecture(str(name), {"num_classes": 0}))
        vit = Architecture(architecture.name, {**architecture.overrides, **sized}).build()
        return Teacher(vit, str(name), architecture, "shapes", used=0, unused=())

    def start(config, folder, images):
        config = config.on(len(images))
        # all that shapes depend on but for the head's: runs that differ in other things are built once
        others = "recipe_name data recipe augmentation seed".split()
        shapes = [value for name, value in vars(config).items() if name not in others]
        if (key := str(shapes)) not in built:
            with without_weights():
                building.build(config, 80 if config.data == "coco" else 1000)
            built.add(key)
        write_config(folder, config)
        results = ["student", "averaged"][: 1 + bool(config.recipe.ema)]
        results = ["teacher"] if config.method == "mae" else results
        for name in results:
            save_file({"nothing": torch.zeros(1)}, folder / f"{name}.safetensors")
        done.append(config)

    def test_of(path, config, arguments, reading):
        assert path.exists(), path
        done.append((path, arguments.shifted))

    once(Architecture, "build", str)
    once(configuring, "create_vit", str)
    # without classes it may become the teacher beside itself
    once(Architecture, "build_classifier", lambda x: str(x) if x.overrides.get("num_classes") else object())
    once(compatibility, "find_projections", structure)
    monkeypatch.setattr(building, "load_teacher", of_shapes)
    monkeypatch.setattr(
        building,
        "MeanMapCopy",
        lambda teacher, student, images, normalisation: StoredMaps(
            student, [torch.zeros(1, 16, 197, 197)] * len(student.blocks)
        ),
    )
    monkeypatch.setattr(commands, "training_images", lambda config: Images())
    monkeypatch.setattr(commands, "start", start)
    monkeypatch.setattr(commands, "help_text", lambda *settings: "")  # which nobody asks for here
    monkeypatch.setattr(commands, "summary", lambda folder, record: "")
    monkeypatch.setattr(commands, "dry_run", lambda config, processes: done.append(config) or 0)
    monkeypatch.setattr(measure, "_test_of", test_of)
    monkeypatch.setattr(measure, "measured_lines", lambda tests: [])

    def call(words):
        done.clear()
        code = command.main(shlex.split(words))
        return code, done[:]

    return call


def test_every_figure_of_the_papers_tables_has_its_command():
    expected, found = set(), [(one.table, one.row, one.column) for one in repeats()]
    assert len(found) == len(set(found))
    for name, table in json.loads((PAPERS / "attention-transfer.json").read_text())["tables"].items():
        number = 2 if name == "mix_and_match" else 1
        columns = [column for column in table["columns"][number:] if column in MEASURED]
        assert columns, name
        expected |= {(name, tuple(row[:number]), column) for row in table["rows"] for column in columns}
    assert set(found) == expected and list(TITLES) == list(dict.fromkeys(one.table for one in repeats()))
    for one in repeats():
        assert isinstance(quoted(one.table).value(one.row, one.column), (int, float))
        assert one.commands or one.note
    assert [one.row for one in repeats() if not one.commands] == [(None,)], "the blank weight alone"


def test_every_command_configures_what_it_says(configured, capsys):
    runs = {}
    every = [one for repeat in repeats() for one in repeat.commands]
    for words in dict.fromkeys([*every, *FIGURES.values()]):
        code, done = configured(words)
        assert code == 0, (words, capsys.readouterr().err)
        asked = shlex.split(words)
        if asked[0] == "evaluate":
            of = [path.partition("/averaged")[0] for path in asked[1:] if path.startswith("runs/")]
            assert [str(path.parent) for path, _ in done] == of
            assert all(name is None or name in SHIFTED for _, name in done)
            assert ("--shifted" in asked) == (done[0][1] is not None)
            assert ("--averaged" in asked) <= (done[0][0].name == "averaged.safetensors")
            continue
        (config,) = done
        runs[words] = config
        # λ is 3 for the main result alone
        if config.method.has_transfer_loss:
            main = "--out runs/distill" in words and words.endswith("runs/distill")
            expected = 3.0 if main or "--dry-run" in words else 1.0
            if not config.detects:  # its recipe says what was not found
                assert config.recipe.transfer_weight == expected, words
    folders = [words.rpartition("--out ")[2] for words in runs if "--dry-run" not in words]
    assert len(set(folders)) == len(folders), "two runs in one folder"
    methods = {"scratch", "fine-tune", "copy", "distill", "features", "mean-maps", "mae"}
    assert {config.method.value for config in runs.values()} == methods


def test_the_other_papers_are_listed_whole_and_their_commands_configure(configured, capsys):
    """Those that start from what no command here makes are given a file in its place."""
    makes = {path: one for one in listed() for path in re.findall(r"--out (runs/\S+)", one.command)}
    assert len(makes) == sum("--out" in one.command for one in listed()), "two runs in one folder"
    folders = {path for one in listed() for path in re.findall(r"--teacher (runs/[^/ ]+)", one.command)}
    assert folders <= set(makes)
    commands = [one for one in listed() if one.command]
    for one in sorted(commands, key=lambda one: " --teacher runs" in one.command):
        code, _ = configured(one.command)
        assert code == 0, (one, capsys.readouterr().err)
    assert all(one.command or one.note for one in listed())


def listed():
    return [one for tables in elsewhere().values() for one in tables]
