"""Assignment A4, One claim, tested: six questions, one run of an experiment, what its records have to hold,
and the exercises of its first task."""

import itertools
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import mean, pstdev, stdev

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from atbook.exercises.judging import Exercise, checker
from atbook.exercises.own import own_seed, plain_name
from atbook.records import add_record
from atbook.worlds import glyph_images
from atbook.worlds.glyphs import SHAPES, World, generate
from atlib import AttentionTransfer, Plan, create_vit
from atlib._util import require_known, write_atomically
from atlib.checkpoint import load_vit
from atlib.data import Images, pair
from atlib.evaluate import evaluate
from atlib.loading import seed_for
from atlib.recipe import Recipe
from atlib.train import train
from atrun.record import Record, about, parsed, peak_memory_mb

SEEDS = (0, 1, 2)  # the runs that are reported have at least these
TUNING_SEED = 100  # the seed of all trials
REPEATED = 20  # first steps of a run, whose losses are recorded and repeated
IMAGES = {"validation": 1000, "test": 2000}
RECIPE = Recipe(steps=400, lr=4e-3, weight_decay=0.1)  # what a condition does not change


# --- One run ---


def changed(recipe: Mapping) -> Recipe:
    """`RECIPE` with some changes. Raises `ValueError` for what no recipe has."""
    for name in recipe:
        require_known("part of a recipe", name, RECIPE.describe())
    return Recipe.described(RECIPE.describe() | dict(recipe))


@dataclass(frozen=True)
class Settings:
    """All that decides a run except for its seed.

    The teacher is the book's, of seed 0. Raises `ValueError` for values that cannot be meant.
    """

    # Changes to `World`, for training and test images.
    world: Mapping = field(default_factory=dict)
    # {name: further changes to the test images}.
    tests: Mapping = field(default_factory=lambda: {"plain": {}})
    # Changes to `Plan`; None for a student without a teacher.
    plan: Mapping | None = None
    # Changes to the world for the images that the teacher sees in place of the student's.
    teacher_sees: Mapping = field(default_factory=dict)
    # Which twin of the student's image the teacher sees (`atbook.worlds.glyphs.generate`).
    twin: str | None = None
    # Whether the teacher is only initialised.
    untrained: bool = False
    # Whether the student starts from the teacher's weights.
    fine_tune: bool = False
    # How many training images there are.
    labels: int = 1000
    # Changes to `RECIPE`.
    recipe: Mapping = field(default_factory=dict)

    def __post_init__(self):
        for changes in self.tests.values():
            World(**{**self.world, **changes, **self.teacher_sees})
        changed(self.recipe)
        if self.plan is not None:
            Plan(**self.plan)
        elif self.teacher_sees or self.twin or self.untrained:
            raise ValueError(
                "teacher_sees, twin and untrained are about a teacher: without a plan it has none"
            )
        if not self.tests or self.labels < 1:
            raise ValueError("a run needs at least one label and one set of test images")

    def described(self) -> dict:
        """The settings as plain JSON values, for a record; `Settings(**described)` reads them."""
        return json.loads(json.dumps(asdict(self), default=list))

    def images(self, split: str, size: int, seed: int, changes: Mapping = {}) -> Images:
        """Images of a split, beside the teacher's images where the teacher sees different ones."""
        world = World(**{**self.world, **changes})
        seen = glyph_images(generate(split, size, seed, world))
        if not self.teacher_sees and self.twin is None:
            return seen
        of_teacher = generate(split, size, seed, replace(world, **self.teacher_sees), self.twin)
        return pair(seen, glyph_images(of_teacher))

    def model(self, seed: int, folder: str | Path = ".") -> torch.nn.Module:
        """The untrained student, beside its teacher where there is one. folder: where the teachers' files
        are."""
        task = World(**self.world).task
        path = Path(folder) / f"teacher-{task}.safetensors"
        torch.manual_seed(seed_for(seed, "student"))
        student = create_vit("glyphs")
        if self.fine_tune:
            student = load_vit(path)
            torch.manual_seed(seed_for(seed, "head"))
            student.reset_classifier(len(SHAPES))
            student.requires_grad_(True)
        if self.plan is None:
            return student
        torch.manual_seed(seed_for(seed, "untrained"))
        teacher = create_vit("glyphs") if self.untrained else load_vit(path)
        return AttentionTransfer(teacher, student, Plan(**self.plan))


def first_losses(
    settings: Settings, seed: int, folder: str | Path = ".", steps: int = REPEATED
) -> list[float]:
    """The losses of the first steps of a run, which is made again."""
    return _trained(settings, seed, folder, stop_at=steps)[1]


def _trained(settings: Settings, seed: int, folder: str | Path, stop_at: int | None = None):
    """Train a run: its model, the losses of its first steps, and its history."""
    model, losses = settings.model(seed, folder), []

    def log(event: dict) -> None:
        if event["event"] == "step" and len(losses) < REPEATED:
            losses.append(event["loss"])

    history = train(
        model,
        settings.images("train", settings.labels, seed),
        changed(settings.recipe),
        seed=seed_for(seed, "order"),
        progress=None,
        cpu=True,  # so that Colab's GPU repeats what a laptop did
        log=log,
        stop_at=stop_at,
    )
    return model, losses, history


def accuracies(model: torch.nn.Module, settings: Settings, split: str) -> dict[str, float]:
    """{name: accuracy} on each of the settings' test sets."""
    return {
        name: evaluate(model, settings.images(split, IMAGES[split], 0, changes)).accuracy
        for name, changes in settings.tests.items()
    }


# --- The weights of runs, all in one file ---

WEIGHTS = "weights.safetensors"
MOST_BYTES = 50_000_000  # of that file
ROUNDED = 0.004  # how far an accuracy may be from that of the weights, which are kept in half precision


def student_of(model: torch.nn.Module) -> torch.nn.Module:
    """The part of a model that learns."""
    return model.student if isinstance(model, AttentionTransfer) else model


def keep_weights(model: torch.nn.Module, condition: str, seed: int, path: Path) -> None:
    """Add the weights of a run to a file, in place of older ones of the same condition and seed."""
    start = f"{condition}/{seed}/"
    tensors = load(path.read_bytes()) if path.is_file() else {}
    kept = {name: value for name, value in tensors.items() if not name.startswith(start)}
    weights = {start + name: value.detach().half() for name, value in student_of(model).state_dict().items()}
    write_atomically(path, save(kept | weights))


def weights_of(content: bytes, record: Record) -> dict[str, torch.Tensor] | None:
    """The weights of a record's run in the content of such a file; None where it does not hold them, or is no
    such file."""
    start = f"{record.method}/{record.seed}/"
    try:
        tensors = load(content) if len(content) <= MOST_BYTES else {}
    except (SafetensorError, ValueError, KeyError, OverflowError):
        return None
    return {name[len(start) :]: value for name, value in tensors.items() if name.startswith(start)} or None


def not_measured(runs: Sequence[Record], content: bytes, folder: str | Path = ".") -> list[str]:
    """Which of some runs' accuracies on test images are not those of their weights, in the content of a file
    of weights."""
    wrong = []
    for run in runs:
        settings, weights = Settings(**run.config["settings"]), weights_of(content, run)
        if weights is None:
            wrong.append(f"{WEIGHTS} does not hold {run.method!r}, seed {run.seed}")
            continue
        model = settings.model(run.seed, folder)
        student_of(model).load_state_dict({name: value.float() for name, value in weights.items()})
        for test, accuracy in accuracies(model.eval(), settings, "test").items():
            in_record = run.results[test]
            if not abs(in_record - accuracy) <= ROUNDED:
                text = f"{run.method!r}, seed {run.seed}, {test}: {100 * in_record:.1f} % is recorded"
                wrong.append(f"{text}, its weights are right on {100 * accuracy:.1f} %")
    return wrong


def losses_of(settings: dict, seed: int, folder: str) -> list[float]:
    """The losses of the first steps of a run, which is made again from its settings."""
    return first_losses(Settings(**settings), seed, folder)


def run(
    student: str,
    condition: str,
    settings: Settings,
    seed: int,
    trial: int | None = None,
    path: str | Path = "records.jsonl",
    folder: str | Path = ".",
) -> Record:
    """Make a run and add its record to a file, in place of an older one of the same condition, seed and
    trial.

    With a `trial`, its number from 0 on, the run is part of the tuning and is measured on validation images;
    without one it is a run that is reported and is measured on test images. Its results are the accuracy on
    each of the settings' test sets, and "first_losses". The weights of a run that is reported are kept in
    "weights.safetensors", beside the file.
    """
    split, start = "test" if trial is None else "validation", time.perf_counter()
    model, losses, history = _trained(settings, seed, folder)
    results = accuracies(model, settings, split)
    if trial is None:
        keep_weights(model, condition, seed, Path(path).with_name(WEIGHTS))
    record = Record(
        "a4",
        condition,
        seed,
        {"student": student, "split": split, "settings": settings.described()},
        results | {"first_losses": losses},
        history,
        round(time.perf_counter() - start, 2),
        round(peak_memory_mb(), 1),
        about(),
        "run" if trial is None else "trial",
        trial,
    )
    add_record(path, record)
    return record


# --- The questions ---


@dataclass(frozen=True)
class Question:
    """A question to a student, and what its answer needs."""

    asks: str
    # The conditions that the records must hold, beside controls of the student's own.
    conditions: Mapping[str, Settings]
    # (condition, test images, factor): the sum of these accuracies, seed by seed, answers the question.
    contrast: tuple[tuple[str, str, int], ...]
    # The contrast in words.
    says: str


def _four(first: str, second: str, test: str) -> tuple[tuple[str, str, int], ...]:
    """How much more the first of two conditions loses from plain test images to others."""
    return (first, "plain", 1), (first, test, -1), (second, "plain", -1), (second, test, 1)


NOISY, FAINT = {"noise": 0.5}, {"plain": {}, "faint": {"cue": 0.6}}
MATCH, SPARSE = {"task": "match"}, {"task": "match", "clutter": 3}
INVERTED = {"rendering": "inverted"}

QUESTIONS = (
    Question(
        "Student and teacher see the same image, whatever its noise. Suppose noise hides the glyphs from the"
        " student, and the teacher had a better camera: are its maps then worth more?",
        {
            "same eyes": Settings(world=NOISY, plan={}),
            "clear eyes": Settings(world=NOISY, plan={}, teacher_sees={"noise": 0.2}),
        },
        (("clear eyes", "plain", 1), ("same eyes", "plain", -1)),
        "accuracy with clear eyes less that with the same eyes",
    ),
    Question(
        "With 1,000 labels and in five seeds, two copied last layers were ahead of two copied first ones by"
        " 4 points, which cannot be seen with five seeds. Are they ahead where labels are few, and reading a"
        " glyph is the harder part?",
        {
            "first two": Settings(plan={"layers": [0, 1]}, labels=250),
            "last two": Settings(plan={"layers": [2, 3]}, labels=250),
        },
        (("last two", "plain", 1), ("first two", "plain", -1)),
        "accuracy of the last two less that of the first two, with 250 labels",
    ),
    Question(
        "Match takes two looks, and its teacher has two layers in the middle. Which of the two can a student"
        " better do without while it learns?",
        {
            "without layer 1": Settings(world=MATCH, plan={"layers": [0, 2, 3]}),
            "without layer 2": Settings(world=MATCH, plan={"layers": [0, 1, 3]}),
        },
        (("without layer 1", "plain", 1), ("without layer 2", "plain", -1)),
        "accuracy without layer 1 less that without layer 2",
    ),
    Question(
        "Does copying the last layer alone survive a faint mark, or does a student that has to find its own"
        " way in the layers before lose more than one that copies all layers?",
        {
            "last layer": Settings(tests=FAINT, plan={"layers": [3]}),
            "all layers": Settings(tests=FAINT, plan={}),
        },
        _four("last layer", "all layers", "faint"),
        "what the last layer loses from plain to faint (cue 0.6), less what all layers lose",
    ),
    Question(
        "Is it the crowd that makes Match hard? If so, maps should be worth less where there are few glyphs"
        " to choose from.",
        {
            "alone, crowded": Settings(world=MATCH),
            "copy, crowded": Settings(world=MATCH, plan={}),
            "alone, sparse": Settings(world=SPARSE),
            "copy, sparse": Settings(world=SPARSE, plan={}),
        },
        (
            ("copy, crowded", "plain", 1),
            ("alone, crowded", "plain", -1),
            ("copy, sparse", "plain", -1),
            ("alone, sparse", "plain", 1),
        ),
        "what Copy gains in the crowd less what it gains with three distractors",
    ),
    Question(
        "Weights know how glyphs look, maps where they are. If glyphs are drawn in a way that the teacher has"
        " never seen, in training and test, are its maps then worth more than its weights?",
        {"weights": Settings(world=INVERTED, fine_tune=True), "maps": Settings(world=INVERTED, plan={})},
        (("maps", "plain", 1), ("weights", "plain", -1)),
        "accuracy with the maps less that with the weights, on inverted glyphs",
    ),
)


def question_of(student: str) -> Question:
    """The question of a student or of a pair of students: the name alone decides it. Raises `ValueError` for
    a name that is not filled in."""
    return QUESTIONS[own_seed(student, "A4") % len(QUESTIONS)]


# --- What a file of records has to hold ---

# 90 % of Student's t lie within plus or minus these, by the degrees of freedom, n - 1.
T90 = {1: 6.314, 2: 2.920, 3: 2.353, 4: 2.132, 5: 2.015, 6: 1.943, 7: 1.895, 8: 1.860, 9: 1.833}


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The mean of 2 to 10 values, one for each seed, and the ends of its 90 % interval."""
    half = T90[len(values) - 1] * stdev(values) / math.sqrt(len(values))
    return mean(values), mean(values) - half, mean(values) + half


def answers(records: Sequence[Record], question: Question) -> dict[int, float]:
    """{seed: the contrast that answers a question, in points}, of the seeds that have all its runs."""
    accuracies = {(r.method, r.seed): r.results for r in records if r.kind == "run"}
    names = {condition for condition, _, _ in question.contrast}
    seeds = sorted({seed for _, seed in accuracies if all((name, seed) in accuracies for name in names)})
    return {
        seed: 100 * sum(factor * accuracies[name, seed][test] for name, test, factor in question.contrast)
        for seed in seeds
    }


LARGEST = 5_000_000  # bytes of a file that are read


def readable(content: bytes, student: str) -> tuple[list[Record], list[str]]:
    """The records in the content of a file, and what is wrong with its other lines."""
    by_key, wrong = {}, []
    for number, line in enumerate(content[:LARGEST].splitlines(), start=1):
        try:
            record = parsed(line, "it")
            if record.key in by_key:
                raise ValueError("it is of the same run as another line")
            _require_whole(record, student)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            wrong.append(f"line {number}: {error}"[:300])
        else:
            by_key[record.key] = record
    if not by_key:
        wrong.append("there are no records")
    return list(by_key.values()), wrong


def _require_whole(record: Record, student: str) -> None:
    """Raise `ValueError` where a record is not one of this student's A4, or lacks a number."""
    author = plain_name(str(record.config["student"])).lower()
    if record.experiment != "a4" or author != plain_name(student).lower():
        raise ValueError(f"it is of {record.experiment!r} by {record.config['student']!r}")
    settings = Settings(**record.config["settings"])
    for name in settings.tests:
        if not 0 <= record.results[name] <= 1:
            raise ValueError(f"accuracy {name!r} is {record.results[name]}")
    losses = record.results["first_losses"]
    if len(losses) != REPEATED or not all(math.isfinite(loss) for loss in losses):
        raise ValueError(f"first_losses has to be {REPEATED} numbers")
    if record.config["split"] not in IMAGES:
        raise ValueError(f"its split is {record.config['split']!r}")


def but_recipe(record: Record, tests: bool = True) -> Settings:
    """A record's settings without what is tuned; tests: whether to keep its test images."""
    settings = replace(Settings(**record.config["settings"]), recipe={})
    return settings if tests else replace(settings, tests={"plain": {}})


def recipe_of(record: Record) -> Recipe:
    """The whole recipe of a record."""
    return changed(record.config["settings"]["recipe"])


def incomplete(records: Sequence[Record], question: Question) -> list[str]:
    """What is missing: conditions, seeds, a control."""
    runs = [record for record in records if record.kind == "run"]
    names = sorted({record.method for record in runs})
    wrong = [f"no run of the condition {name!r}" for name in question.conditions if name not in names]
    if set(names) <= set(question.conditions):
        wrong.append("there is no control: no condition beside those of the question")
    for name in names:
        of_condition = [record for record in runs if record.method == name]
        if missing := sorted(set(SEEDS) - {record.seed for record in of_condition}):
            wrong.append(f"{name!r} has no run of seed {', '.join(map(str, missing))}")
        if any(record.config["split"] != "test" for record in of_condition):
            wrong.append(f"a run of {name!r} was not measured on test images")
        if any(record.config["settings"] != of_condition[0].config["settings"] for record in of_condition):
            wrong.append(f"the runs of {name!r} have different settings")
        if asked := question.conditions.get(name):
            tests = of_condition[0].config["settings"]["tests"]
            settings = but_recipe(of_condition[0], tests=False)
            if settings != replace(asked, tests={"plain": {}}, recipe={}) or any(
                tests.get(test) != changes for test, changes in asked.tests.items()
            ):
                wrong.append(f"the settings of {name!r} are not those of the question")
    return wrong


def unequal(records: Sequence[Record]) -> list[str]:
    """What is wrong with the tuning: every condition has the same trials, on validation images, and its runs
    have the recipe of the best of them."""
    names, wrong, tried = sorted({record.method for record in records}), [], {}
    for name in names:
        trials = [record for record in records if (record.method, record.kind) == (name, "trial")]
        trials.sort(key=lambda record: record.trial)
        if any(record.config["split"] != "validation" for record in trials):
            wrong.append(f"a trial of {name!r} was measured on test images")
        if any(record.seed != TUNING_SEED for record in trials):
            wrong.append(f"a trial of {name!r} has another seed than {TUNING_SEED}")
        tried[name] = [recipe_of(record) for record in trials]
        if len(set(tried[name])) < 3:
            wrong.append(f"{name!r} has fewer than three trials that differ")
            continue
        first = next(iter(trials[0].config["settings"]["tests"]))
        best = max(record.results[first] for record in trials)
        good = [recipe_of(record) for record in trials if record.results[first] == best]
        for record in (made for made in records if (made.method, made.kind) == (name, "run")):
            if recipe_of(record) not in good:
                wrong.append(f"the run of {name!r}, seed {record.seed}, has not the recipe of the best trial")
            if but_recipe(record) != but_recipe(trials[0]):
                wrong.append(f"{name!r} was tuned with other settings than its runs have")
    if any(recipes != tried[names[0]] for recipes in tried.values()):
        wrong.append("not all conditions have the same trials")
    if len({(recipe.steps, recipe.batch_size) for recipes in tried.values() for recipe in recipes}) > 1:
        wrong.append("not all have the same steps and batch size")
    return wrong


# How far a repeated loss may be off, as a share of it. One run on two machines has two roundings: other
# processors, numbers of threads and versions of torch add numbers up in a different order. Measured: 5e-6
# between one thread and four, and between vector instructions and none; 5e-4 between rates that differ by 2
# %.
TOLERANCE = 5e-5


def not_repeated(record: Record, losses: Sequence[float]) -> list[str]:
    """The first loss of a run that is not as recorded, in words; losses: those of a run that was made
    anew."""
    for step, (then, now) in enumerate(zip(record.results["first_losses"], losses)):
        if not abs(then - now) <= TOLERANCE * abs(now):
            return [f"{record.method!r}, seed {record.seed}: loss {step} is {then:.6f} there, {now:.6f} here"]
    return []


def unmeasured(runs: Sequence[Record], path: Path) -> list[str]:
    """Which runs a file of weights does not hold."""
    content = path.read_bytes() if path.is_file() else b""
    missing = [run for run in runs if weights_of(content, run) is None]
    return [f"{WEIGHTS} does not hold {run.method!r}, seed {run.seed}" for run in missing]


def check_records(path: str | Path, student: str, folder: str | Path = ".") -> None:
    """Print what a file of records still lacks, and whether one run repeats; never raises."""
    try:
        question = question_of(student)
        path = Path(path)
        records, wrong = (
            readable(path.read_bytes(), student) if path.is_file() else ([], [f"there is no {path}"])
        )
        parts = {"readable": wrong, "complete": incomplete(records, question), "tuned": unequal(records)}
        runs = [record for record in records if record.kind == "run"]
        if runs:
            losses = losses_of(runs[-1].config["settings"], runs[-1].seed, str(folder))
            parts["repeated"] = not_repeated(runs[-1], losses)
            parts["measured"] = unmeasured(runs, path.with_name(WEIGHTS))
    except Exception as error:  # a student's settings can be anything
        print(f"not yet: {type(error).__name__}: {error}")
        return
    for name, faults in parts.items():
        print(f"{name}: " + ("yes" if not faults else "not yet"))
        print("".join(f"  - {fault}\n" for fault in faults), end="")


# --- A4.1: what three seeds can say; {seed: accuracy} of two conditions ---

Accuracies = Mapping[int, float]


def differences(a: Accuracies, b: Accuracies) -> list[float]:
    """The accuracies of a minus those of b, seed by seed."""
    return [a[seed] - b[seed] for seed in sorted(a.keys() & b.keys())]


def as_they_stand(a: Accuracies, b: Accuracies) -> list[float]:
    """Wrong: pairs are made of what stands at the same place."""
    return [x - y for x, y in zip(a.values(), b.values())]


def flips(
    pairs: Callable = differences, counts: Callable = lambda sum, seen: abs(sum) >= abs(seen) - 1e-9
) -> Callable:
    """(a, b) to the mean difference and the share of sign flips that are as large."""

    def answer(a: Accuracies, b: Accuracies) -> tuple[float, float]:
        gaps = pairs(a, b)
        signs = list(itertools.product((1, -1), repeat=len(gaps)))
        sums = [sum(s * d for s, d in zip(pattern, gaps)) for pattern in signs]
        return mean(gaps), sum(counts(total, sum(gaps)) for total in sums) / len(sums)

    return answer


def flips_by_tensors(a: Accuracies, b: Accuracies) -> tuple[float, float]:
    """The same, with all sign patterns as the bits of numbers."""
    gaps = torch.tensor(differences(a, b), dtype=torch.float64)
    bits = torch.arange(2 ** len(gaps))[:, None] >> torch.arange(len(gaps)) & 1
    sums = ((1 - 2 * bits) * gaps).sum(1)
    return gaps.mean().item(), (sums.abs() >= gaps.sum().abs() - 1e-9).double().mean().item()


def margins(
    pairs: Callable = differences,
    spread: Callable = lambda d: stdev(d) / len(d) ** 0.5,
    equal: Callable = lambda low, high, margin: -margin < low and high < margin,
) -> Callable:
    """(a, b, margin, t) to an interval, and what it shows."""

    def answer(a: Accuracies, b: Accuracies, margin: float, t: float) -> tuple[float, float, bool, bool]:
        gaps = pairs(a, b)
        low, high = (mean(gaps) + side * t * spread(gaps) for side in (-1, 1))
        return low, high, equal(low, high, margin), low > 0 or high < 0

    return answer


def margins_by_tensors(a: Accuracies, b: Accuracies, margin: float, t: float):
    """The same, with tensors."""
    gaps = torch.tensor(differences(a, b), dtype=torch.float64)
    half = t * gaps.std() / len(gaps) ** 0.5
    ends = gaps.mean() - half, gaps.mean() + half
    low, high = (end.item() for end in ends)
    return low, high, max(-low, high) < margin, low * high > 0


def factors(a: Accuracies, b: Accuracies) -> list[float]:
    """Logarithm of how many mistakes a makes for one of b's, seed by seed."""
    return [math.log((1 - a[seed]) / (1 - b[seed])) for seed in sorted(a.keys() & b.keys())]


def ratios(
    pairs: Callable = factors,
    spread: Callable = lambda d: stdev(d) / len(d) ** 0.5,
    back: Callable = math.exp,
) -> Callable:
    """(a, b, t) to the factor between two conditions' mistakes, and the ends of its interval."""

    def answer(a: Accuracies, b: Accuracies, t: float) -> tuple[float, float, float]:
        logs = pairs(a, b)
        return tuple(back(mean(logs) + side * t * spread(logs)) for side in (0, -1, 1))

    return answer


def ratios_by_tensors(a: Accuracies, b: Accuracies, t: float) -> list[float]:
    """The same with tensors."""
    seeds = [seed for seed in a if seed in b]
    x, y = (torch.tensor([accuracies[seed] for seed in seeds], dtype=torch.float64) for accuracies in (a, b))
    logs = (1 - x).log() - (1 - y).log()
    half = t * logs.std() / len(seeds) ** 0.5
    return [log.exp().item() for log in (logs.mean(), logs.mean() - half, logs.mean() + half)]


def of_accuracies(a: Accuracies, b: Accuracies) -> list[float]:
    """Wrong: the factor between accuracies."""
    return [math.log(a[seed] / b[seed]) for seed in sorted(a.keys() & b.keys())]


def plain_ratios(a: Accuracies, b: Accuracies) -> list[float]:
    """Wrong: no logarithm."""
    return [math.exp(log) for log in factors(a, b)]


def misplaced_ratios(a: Accuracies, b: Accuracies) -> list[float]:
    """Wrong: pairs are made of what stands at the same place."""
    return [math.log((1 - x) / (1 - y)) for x, y in zip(a.values(), b.values())]


def divided_by_n(values: Sequence[float]) -> float:
    """Wrong: the spread of the values that are there, which is too small."""
    return pstdev(values) / len(values) ** 0.5


ONE = {0: 0.912, 1: 0.897, 2: 0.921}
OTHER = {2: 0.874, 0: 0.881, 1: 0.869}  # another order
MORE = {0: 0.71, 1: 0.74, 2: 0.69, 3: 0.73, 5: 0.70}
LESS = {4: 0.70, 0: 0.70, 1: 0.75, 2: 0.66, 3: 0.70}  # another seed is missing


def two_cases(*more: float) -> dict[str, Callable[[], tuple]]:
    """Two cases; `more` are the arguments of an answer after the accuracies."""
    return {
        "three seeds, in another order": lambda: (dict(ONE), dict(OTHER), *more),
        "a seed that is missing": lambda: (dict(MORE), dict(LESS), *more),
    }


SEEDS_OF_BOTH = (
    "Pairs are made of what stands at the same place. Runs of one seed belong together: take the seeds that"
    " both have, whatever their order."
)
BY_N = (
    "The spread is too small: from few seeds it is estimated around their own mean. Divide the squares by"
    " n - 1 (statistics.stdev)."
)
NOT_OF_A_MEAN = "That is the spread of single seeds. The mean of n seeds has it divided by √n."


EXERCISES = (
    Exercise(
        "A4.1a",
        right=flips(),
        also_right=(flips_by_tensors,),
        cases=two_cases(),
        wrong={
            SEEDS_OF_BOTH: flips(pairs=as_they_stand),
            "You counted one side only. A difference of the other sign that is as large counts, too.": flips(
                counts=lambda sum, seen: sum >= seen - 1e-9
            ),
            "Patterns that are exactly as large are left out, and with them the one"
            " that was seen: no share can be 0.": flips(counts=lambda sum, seen: abs(sum) > abs(seen) + 1e-9),
        },
    ),
    Exercise(
        "A4.1b",
        right=margins(),
        also_right=(margins_by_tensors,),
        cases=two_cases(0.06, 2.92) | {"a small margin": lambda: (dict(MORE), dict(LESS), 0.02, 1.5)},
        wrong={
            SEEDS_OF_BOTH: margins(pairs=as_they_stand),
            "You call equal what is not shown to differ. Equal within a margin is shown only where"
            " the whole interval lies inside it.": margins(equal=lambda low, high, margin: low <= 0 <= high),
            "You look at the mean alone. The whole interval has to lie within the margin.": margins(
                equal=lambda low, high, margin: abs(low + high) / 2 < margin
            ),
            BY_N: margins(spread=divided_by_n),
            NOT_OF_A_MEAN: margins(spread=stdev),
        },
    ),
    Exercise(
        "A4.1c",
        right=ratios(),
        also_right=(ratios_by_tensors,),
        cases=two_cases(2.92),
        wrong={
            SEEDS_OF_BOTH: ratios(pairs=misplaced_ratios),
            "That is the factor between accuracies. The task asks for mistakes.": ratios(pairs=of_accuracies),
            "The mean was taken of the factors themselves: twice as many and half as many would not cancel."
            " Take it of their logarithms, and go back at the end.": ratios(pairs=plain_ratios, back=float),
            BY_N: ratios(spread=divided_by_n),
            NOT_OF_A_MEAN: ratios(spread=stdev),
        },
    ),
)

check = checker(EXERCISES)
