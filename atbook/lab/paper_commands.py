"""Every figure of the tables of arXiv 2411.09702 with the commands that would repeat it: what
`book/repeat-imagenet.md` shows, and `tests/lab/test_paper_commands.py` configures.

A command begins after `python -m atlib`. Its files are relative: `data/` has data sets that the hub has not,
as their makers pack them, `weights/` published files, `runs/` what earlier commands leave.
"""

import tomllib
from pathlib import Path
from typing import NamedTuple

WEIGHT_1 = " --transfer_weight 1"  # "all other results in this paper use lambda = 1": all but the main one
_LAYERS = {count: f" --plan.layers '[{','.join(map(str, range(count)))}]'" for count in (18, 21)}


class Repeat(NamedTuple):
    """A figure of a table and how to repeat it. row: the first cells of its row; column: of the figure;
    commands: in their order, what a later one needs before it; empty where none can be said; note: what is
    not as printed, or is missing."""

    table: str
    row: tuple[str | float | None, ...]
    column: str
    commands: tuple[str, ...]
    note: str = ""


# What each table is about, in its order on the page.
TITLES = {
    "main_result": "The main comparison",
    "copy_target": "Queries, keys or values alone",
    "q_distill": "Queries distilled",
    "pretraining_data": "Teachers pre-trained on other images",
    "inaturalist": "iNaturalist",
    "ood_robustness": "Under a shift",
    "pretraining_method": "Teachers by other methods",
    "model_size": "Sizes of model",
    "detection_coco": "Detection on COCO",
    "activations_per_example": "Numbers that are transferred for an image",
    "cost": "Memory and time of a step",
    "averaged_maps": "Averaged maps",
    "feature_distillation": "Features distilled",
    "distill_loss_weight": "The weight of the transfer loss",
    "distill_layers": "Layers that are distilled",
    "mix_and_match": "The maps of one model, the first weights of another",
}
ON_IMAGENET = " --data imagenet-1k"
COPY, DISTILL, FINE_TUNE = "copy-vit-large", "distill-vit-large", "mae-fine-tune-vit-large"
MAE, MOCO, FLIP = (
    "vit_large_patch16_224.mae",
    "weights/moco-v3-vit-large.safetensors",
    "weights/flip-vit-large.safetensors",
)
TANH = " --model.act_layer gelu_tanh"  # FLIP's GELU, without which student and teacher are another function
_NO_LARGE_MOCO = "no ViT-L of MoCo-v3 was found published: the file is yours"
_DINO = "the paper marks the row as an exception, and DINO published no ViT-L: ViT-B here"
_FLIP = "FLIP's folder, converted, and its GELU"


def train(recipe: str, out: str, more: str = "", data: str = ON_IMAGENET) -> str:
    """The command of a run."""
    return f"train --recipe {recipe}{data}{more} --out runs/{out}"


SCRATCH_RUN, FINE_TUNED_RUN = train("mae-scratch-vit-large", "scratch"), train(FINE_TUNE, "fine-tune")
COPY_RUN, DISTILL_RUN = train(COPY, "copy"), train(DISTILL, "distill")
RUNS = {"scratch": SCRATCH_RUN, "fine_tune": FINE_TUNED_RUN, "copy": COPY_RUN, "distill": DISTILL_RUN}


def _main_result() -> list[Repeat]:
    from_tuned = train(COPY, "copy-from-fine-tuned", " --teacher runs/fine-tune/student.safetensors")
    ensemble = "evaluate runs/distill/averaged.safetensors runs/fine-tune"
    rows = {
        "scratch": (SCRATCH_RUN,),
        "fine-tune": (FINE_TUNED_RUN,),
        "attn. copy": (COPY_RUN,),
        "attn. copy from fine-tuned": (FINE_TUNED_RUN, from_tuned),
        "attn. distill": (DISTILL_RUN,),
        "ensemble attn. distill + fine-tune": (DISTILL_RUN, FINE_TUNED_RUN, ensemble),
    }
    return [Repeat("main_result", (row,), "top1", commands) for row, commands in rows.items()]


def _variants() -> list[Repeat]:
    parts = [
        Repeat(
            "copy_target",
            (part,),
            "top1",
            (train(COPY, f"copy-{part.lower()}", f" --plan.what {part.lower()}"),),
        )
        for part in "QKV"
    ]
    queries = train(DISTILL, "distill-q", " --plan.what q" + WEIGHT_1)
    return [
        *parts,
        Repeat("q_distill", ("attn. distill",), "top1", (DISTILL_RUN,)),
        Repeat("q_distill", ("Q distill",), "top1", (queries,)),
    ]


def _all_of(folder: str) -> str:
    """All images of a folder, of which the training split is nine tenths."""
    return f" --data data/{folder} --training_split train+validation"


def _pretraining_data() -> list[Repeat]:
    found = [
        Repeat("pretraining_data", ("ImageNet",), column, (RUNS[column],)) for column in ("fine_tune", "copy")
    ]
    for row, folder in (("ImageNet-22K", "imagenet-22k"), ("COCO", "coco/train2017")):
        name = folder.partition("/")[0]
        teacher = f"pretrain mae-pretrain-vit-large{_all_of(folder)} --out runs/mae-{name}"
        by = f" --teacher runs/mae-{name}/teacher.safetensors"
        for column, recipe in (("fine_tune", FINE_TUNE), ("copy", COPY)):
            run = train(recipe, f"{column.replace('_', '-')}-{name}", by)
            found.append(Repeat("pretraining_data", (row,), column, (teacher, run)))
    return found


def _inaturalist() -> list[Repeat]:
    recipes = {"scratch": "mae-scratch-vit-large", "fine_tune": FINE_TUNE, "copy": COPY, "distill": DISTILL}
    return [
        Repeat(
            "inaturalist",
            (f"iNat {year}",),
            column,
            (
                train(
                    recipe,
                    f"{column.replace('_', '-')}-inat{year}",
                    WEIGHT_1 if column == "distill" else "",
                    f" --data inat{year} --data_path data/inat{year}",
                ),
            ),
        )
        for year in (2017, 2018, 2019)
        for column, recipe in recipes.items()
    ]


def _ood_robustness() -> list[Repeat]:
    sets = {"A": "imagenet-a", "R": "imagenet-r", "S": "imagenet-sketch", "V2": "imagenetv2"}
    return [
        Repeat(
            "ood_robustness",
            (f"ImageNet-{letter}",),
            column,
            (
                run,
                f"evaluate runs/{column.replace('_', '-')}{'' if column == 'fine_tune' else ' --averaged'}"
                f" --shifted {name}",
            ),
        )
        for letter, name in sets.items()
        for column, run in RUNS.items()
    ]


def _pretraining_method() -> list[Repeat]:
    table = "pretraining_method"
    found = [Repeat(table, ("MAE",), column, (RUNS[column],)) for column in ("fine_tune", "copy", "distill")]
    base = ("mae-fine-tune-vit-base", "copy-vit-base", "distill-vit-base")
    large = (FINE_TUNE, COPY, DISTILL)
    others = {
        "MoCo-v3": ("moco-v3", MOCO, large, "", _NO_LARGE_MOCO),
        "FLIP": ("flip", FLIP, large, TANH, _FLIP),
        "DINO": ("dino", "vit_base_patch16_224.dino", base, "", _DINO),
    }
    for row, (name, teacher, recipes, more, note) in others.items():
        for column, recipe in zip(("fine_tune", "copy", "distill"), recipes, strict=True):
            options = f" --teacher {teacher}{more}{WEIGHT_1 if recipe == DISTILL else ''}"
            run = train(recipe, f"{column.replace('_', '-')}-{name}", options)
            found.append(Repeat(table, (row,), column, (run,), note))
    untrained = " --teacher untrained"
    return [
        *found,
        Repeat(
            table, ("none",), "fine_tune", (SCRATCH_RUN,), "fine-tuned from nothing: the run from scratch"
        ),
        Repeat(table, ("none",), "copy", (train(COPY, "copy-untrained", untrained),)),
        Repeat(table, ("none",), "distill", (train(DISTILL, "distill-untrained", untrained + WEIGHT_1),)),
    ]


def _model_size() -> list[Repeat]:
    found = [Repeat("model_size", ("ViT-L",), column, (run,)) for column, run in RUNS.items()]
    for row, size in (("ViT-B", "base"), ("ViT-H", "huge")):
        recipes = {
            "scratch": "mae-scratch",
            "fine_tune": "mae-fine-tune",
            "copy": "copy",
            "distill": "distill",
        }
        for column, recipe in recipes.items():
            run = train(f"{recipe}-vit-{size}", f"{column.replace('_', '-')}-vit-{size}")
            found.append(Repeat("model_size", (row,), column, (run,)))
    return found


def _detection() -> list[Repeat]:
    teacher = f"pretrain mae-pretrain-vit-base{_all_of('coco/train2017')} --out runs/mae-coco-vit-base"
    by = " --teacher runs/mae-coco-vit-base/teacher.safetensors"
    coco = " --data coco --data_path data/coco"
    runs = {
        "scratch": (train("vitdet-scratch-vit-base", "detect-scratch", data=coco),),
        "fine_tune": (teacher, train("vitdet-fine-tune-vit-base", "detect-fine-tune", by, coco)),
        "distill": (teacher, train("vitdet-distill-vit-base", "detect-distill", by, coco)),
    }
    return [
        Repeat("detection_coco", (row,), column, commands)
        for row in ("AP_box", "AP_mask")
        for column, commands in runs.items()
    ]


def _counted() -> list[Repeat]:
    plan, of_16 = f"train --recipe {COPY}{ON_IMAGENET} --dry-run", f"{ON_IMAGENET} --batch_size 16 --dry-run"
    steps = {
        "Weight Fine-tuning": f"train --recipe {FINE_TUNE}{of_16}",
        "Knowledge Distillation": f"train --recipe {DISTILL} --method features{of_16}",
        "Attention Copy/Distillation": f"train --recipe {COPY}{of_16}",
    }
    return [
        *(
            Repeat("activations_per_example", (row,), "millions", (plan,), "both, under *model*")
            for row in ("Q and K", "QK^T")
        ),
        *(
            Repeat("cost", (row,), column, (command,), "counted and timed on your machine")
            for row, command in steps.items()
            for column in ("memory_GB", "seconds_per_iteration")
        ),
    ]


def _appendix() -> list[Repeat]:
    averages = {"layers": "layers", "heads": "heads", "query tokens": "queries"}
    examples = train(COPY, "copy-mean-over-examples", " --method mean-maps")
    features = train(DISTILL, "features", " --method features" + WEIGHT_1)
    one = train(DISTILL, "distill-weight-1", WEIGHT_1)
    blank = "the cell is blank in our copy of the paper; another weight is --transfer_weight NUMBER"
    return [
        Repeat(
            "averaged_maps",
            ("examples",),
            "top1",
            (examples,),
            "over which images is not said: 1,000 of the training images here, --reference_images changes it",
        ),
        *(
            Repeat(
                "averaged_maps",
                (row,),
                "top1",
                (train(COPY, f"copy-mean-over-{over}", f" --plan.average {over}"),),
            )
            for row, over in averages.items()
        ),
        Repeat("feature_distillation", ("attn. distill",), "top1", (DISTILL_RUN,)),
        Repeat(
            "feature_distillation",
            ("feature distill",),
            "top1",
            (features,),
            "after every layer; which is not said",
        ),
        Repeat("feature_distillation", ("fine-tune",), "top1", (FINE_TUNED_RUN,)),
        Repeat("distill_loss_weight", (None,), "top1", (), blank),
        Repeat("distill_loss_weight", (1.0,), "top1", (one,)),
        Repeat("distill_loss_weight", (3.0,), "top1", (DISTILL_RUN,)),
        Repeat("distill_layers", (None,), "top1", (one,), "blank in our copy, whose text has 18 of 24"),
        Repeat(
            "distill_layers", (21,), "top1", (train(DISTILL, "distill-21-layers", _LAYERS[21] + WEIGHT_1),)
        ),
        Repeat(
            "distill_layers",
            (24,),
            "top1",
            (train(DISTILL, "distill-all-layers", " --plan.layers null" + WEIGHT_1),),
        ),
    ]


def _mix_and_match() -> list[Repeat]:
    table, start = "mix_and_match", " --student_weights "
    apart = " --plan.mismatched true"  # two kinds of GELU
    untrained = train(COPY, "copy-untrained", " --teacher untrained")
    rows = {
        ("Random", "Random"): (untrained, ""),
        ("MAE", "Random"): (COPY_RUN, ""),
        ("MoCo-v3", "Random"): (train(COPY, "copy-moco-v3", f" --teacher {MOCO}"), _NO_LARGE_MOCO),
        ("FLIP", "Random"): (train(COPY, "copy-flip", f" --teacher {FLIP}{TANH}"), _FLIP),
        ("FLIP", "MAE"): (train(COPY, "flip-into-mae", f" --teacher {FLIP}{start}{MAE}{apart}"), ""),
        ("MAE", "MAE"): (train(COPY, "mae-into-mae", f"{start}{MAE}"), ""),
        ("MoCo-v3", "MAE"): (
            train(COPY, "moco-v3-into-mae", f" --teacher {MOCO}{start}{MAE}"),
            _NO_LARGE_MOCO,
        ),
        ("MAE", "FLIP"): (train(COPY, "mae-into-flip", f"{start}{FLIP}{TANH}{apart}"), _FLIP),
    }
    return [Repeat(table, row, "top1", (command,), note) for row, (command, note) in rows.items()]


def repeats() -> list[Repeat]:
    """Every figure of the paper's tables that an experiment gives, in the order of `TITLES`."""
    parts = (
        _main_result,
        _variants,
        _pretraining_data,
        _inaturalist,
        _ood_robustness,
        _pretraining_method,
        _model_size,
        _detection,
        _counted,
        _appendix,
        _mix_and_match,
    )
    return sorted((one for part in parts for one in part()), key=lambda one: list(TITLES).index(one.table))


# The figures whose points are runs of their own, with an example of a point.
FIGURES = {
    "the number of heads copied in each layer": train(
        COPY, "copy-12-heads", f" --plan.heads '[{','.join(map(str, range(12)))}]'"
    ),
    "copying only the last layers": train(
        "partial-copy-vit-large", "copy-last-15", f" --plan.layers '[{','.join(map(str, range(9, 24)))}]'"
    ),
    "copying only the first layers": train("partial-copy-vit-large", "copy-first-18", _LAYERS[18]),
    "ensembles": "evaluate runs/copy/averaged.safetensors runs/fine-tune",
}


class Elsewhere(NamedTuple):
    """What another founding document reports in one place. paper: its data's file; table: its name there;
    about: in our words; command: that repeats it, or a row of it, empty for none; note: what else is to be
    said, such as "not here"."""

    paper: str
    table: str
    about: str
    command: str
    note: str


def elsewhere() -> dict[str, list[Elsewhere]]:
    """The tables and figures of the other founding documents, by the document's title."""
    papers = tomllib.loads(Path(__file__).with_name("other_papers.toml").read_text(encoding="utf-8"))
    return {
        content["title"]: [Elsewhere(paper, table, *said) for table, said in content["tables"].items()]
        for paper, content in papers.items()
    }
