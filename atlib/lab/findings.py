"""What the book asks of its records: at most thirty sentences, and a few of the family, each judged by the
rule of `atlib.lab.verdicts`."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import mean

from atlib._util import require_known
from atlib.lab.verdicts import NOT_RECORDED, Claim, Judged, Metric, Side, judge, on_test
from atlib.record import Record, markdown_table

# Where a claim is asked, and the head of its column.
SCALES = {"find": "Find", "match": "Match", "cifar10-cpu": "CIFAR-10", "pacs": "PACS", "scenes": "Scenes"}
FIND, WORLDS, PHOTOGRAPHS = ("find",), ("find", "match"), ("cifar10-cpu", "pacs")
SCENES = ("scenes",)
EVERYWHERE = (*WORLDS, *PHOTOGRAPHS)
ONE_POINT = 0.01  # the margin of "as good as"


# --- What is measured of a record where it is not the accuracy on plain test images ---


def shifted_accuracy(record: Record) -> float:
    """Mean accuracy over all shifted sets, those named like "noise@3"."""
    return mean(value for name, value in record.results.items() if "@" in name)


def cka_to_fine_tuned(record: Record) -> float:
    """CKA with the same layer of the fine-tuned model, mean over layers."""
    table = record.results["cka to fine-tune"]
    return mean(table[layer][layer] for layer in range(len(table)))


def with_fine_tuned(record: Record) -> float:
    """Accuracy of the mean of this model's and the fine-tuned model's probabilities."""
    return record.results["ensemble"]["fine-tune"]


def plain_accuracy(record: Record) -> float:
    """Accuracy on the test images."""
    return record.results["test_accuracy"]


# --- The two sides ---


def of(study: str, *methods: str, metric: Metric | None = None) -> Side:
    """The mean of some methods of a study."""
    return Side(study, methods, metric)


_central = partial(of, "transfer")
SCRATCH = ("scratch", "scratch-2", "scratch-3")  # first weights matter, so that a seed has three
_SCRATCH = _central(*SCRATCH)
_COPY, _DISTILL, _FINE_TUNE = _central("copy"), _central("distill"), _central("fine-tune")
_CAIT, _ONE_ROW = partial(of, "class-attention"), partial(of, "one-softmax")
_DEEP, _ACROSS = partial(of, "depth"), partial(of, "locality")
_PAINTED, _STATIC = partial(of, "distilled-mae"), partial(of, "static-routing")
_TARGETS = ("logits", "logits without row means", "maps")
_IN_LAST_LAYER, _IN_ALL_LAYERS = (
    tuple(f"{t}, {where}" for t in _TARGETS) for where in ("last layer", "all layers")
)
_TAUGHT = partial(of, "token")
_BY_HEAD = "maps, all layers, head by head"


def _answered(method: str) -> Side:
    """A method with 31,000 more labels than the central experiment has."""
    return of("labels", f"{method}, 32000 labels")


_BOXES, _PIXELS = (partial(of, "detection", metric=on_test(figure)) for figure in ("ap", "mask_ap"))
_UNDER_SHIFTS, _COMPARED = partial(of, "shifts", metric=shifted_accuracy), partial(of, "comparison")

CLAIMS: tuple[Claim, ...] = (
    Claim(
        "04",
        "A student with copied maps beats one from scratch",
        _COPY,
        _SCRATCH,
        EVERYWHERE,
        "85.1 against 83.0",
    ),
    Claim(
        "04",
        "Copied maps cover more than half of the way from scratch to fine-tuning",
        _COPY,
        _central("scratch", "fine-tune"),
        EVERYWHERE,
        "85.1, between 83.0 and 85.7",
    ),
    Claim(
        "04",
        "Maps of an untrained teacher are worse than none",
        _SCRATCH,
        _central("copy-untrained"),
        EVERYWHERE,
        "72.7 against 83.0",
    ),
    Claim(
        "04",
        "Maps of the fine-tuned teacher are worth more than those of the pre-trained one",
        _central("copy-fine-tuned"),
        _COPY,
        EVERYWHERE,
        "85.6 against 85.1",
    ),
    Claim(
        "06",
        "A student of distilled maps beats one from scratch",
        _DISTILL,
        _SCRATCH,
        EVERYWHERE,
        "85.7 against 83.0",
    ),
    Claim(
        "06",
        "Distilled maps are as good as fine-tuning",
        _DISTILL,
        _FINE_TUNE,
        EVERYWHERE,
        "85.7 and 85.7",
        ONE_POINT,
    ),
    Claim(
        "06", "Distilling maps is better than copying them", _DISTILL, _COPY, EVERYWHERE, "85.7 against 85.1"
    ),
    Claim(
        "06",
        "Distilling for twice as many steps is better than copying",
        _central("distill-long"),
        _COPY,
        WORLDS,
        "85.7 (200 epochs) against 85.1 (100)",
    ),
    Claim(
        "06",
        "It is enough to distill the first three quarters of the layers",
        of("layers", "distill first 3"),
        _DISTILL,
        FIND,
        "its recipe: 18 of 24",
        ONE_POINT,
    ),
    Claim(
        "07",
        "Copied queries alone beat scratch",
        _central("copy-q"),
        _SCRATCH,
        EVERYWHERE,
        "85.6 against 83.0",
    ),
    Claim(
        "07",
        "Copied queries alone are better than copied maps",
        _central("copy-q"),
        _COPY,
        EVERYWHERE,
        "85.6 against 85.1",
    ),
    Claim(
        "07",
        "Copied queries are worth more than copied keys",
        _central("copy-q"),
        _central("copy-k"),
        WORLDS,
        "85.6 against 84.4",
    ),
    Claim(
        "14",
        "Maps of the last two layers are worth more than those of the first two",
        of("layers", "copy last 2"),
        of("layers", "copy first 2"),
        FIND,
    ),
    Claim(
        "05",
        "Routing alone beats scratch: the teacher sees other shapes at the same places",
        _central("copy-routing-twin"),
        _SCRATCH,
        WORLDS,
    ),
    Claim(
        "05",
        "Routing alone is as good as the maps of the image itself",
        _central("copy-routing-twin"),
        _COPY,
        WORLDS,
        margin=ONE_POINT,
    ),
    Claim(
        "05",
        "The message alone beats scratch: the teacher sees the label at another place",
        _central("copy-message-twin"),
        _SCRATCH,
        WORLDS,
    ),
    Claim(
        "05",
        "The message alone beats maps of an unrelated image",
        _central("copy-message-twin"),
        _central("copy-unrelated-twin"),
        WORLDS,
    ),
    Claim(
        "05",
        "Maps of another photograph of the same class are as good as those of the image itself",
        _central("copy-same-class-twin"),
        _COPY,
        PHOTOGRAPHS,
        margin=ONE_POINT,
    ),
    Claim(
        "05",
        "Maps of the image itself are better than those of a photograph of another class",
        _COPY,
        _central("copy-other-class-twin"),
        PHOTOGRAPHS,
    ),
    Claim(
        "14",
        "Averaged over examples, copied maps are worse than none",
        _SCRATCH,
        of("averages", "copy mean of examples"),
        FIND,
        "79.7 against 83.0",
    ),
    Claim(
        "08",
        "Distilled features are worse than nothing",
        _SCRATCH,
        of("family", "features"),
        WORLDS,
        "81.3 against 83.0",
    ),
    Claim(
        "08",
        "Distilled maps are worth more than distilled features",
        _DISTILL,
        of("family", "features"),
        WORLDS,
        "85.7 against 81.3",
    ),
    Claim(
        "14",
        "A student with half of the teacher's heads gains from its maps",
        of("pairs", "two heads, distill aggregate"),
        of("pairs", "two heads, scratch"),
        FIND,
    ),
    Claim(
        "09",
        "Where a teacher's features are of no use, its maps beat its weights",
        of("pretraining", "colour, copy"),
        of("pretraining", "colour, fine-tune"),
        FIND,
    ),
    Claim(
        "09",
        "Useless features with useful routing are better than useful features with useless routing",
        of("pretraining", "useless features, useful routing"),
        of("pretraining", "useful features, useless routing"),
        FIND,
    ),
    Claim(
        "10",
        "A second fine-tuning has features nearer to the first than Distill has",
        _COMPARED("fine-tune again", metric=cka_to_fine_tuned),
        _COMPARED("distill", metric=cka_to_fine_tuned),
        FIND,
        factor=1,
    ),
    Claim(
        "10",
        "Together, a student of distilled maps and a fine-tuned model beat the latter",
        _COMPARED("distill", metric=with_fine_tuned),
        _COMPARED("fine-tune", metric=plain_accuracy),
        FIND,
        "86.3 against 85.7",
    ),
    Claim(
        "12",
        "Under shifts, fine-tuning is better than copied and distilled maps",
        _UNDER_SHIFTS("fine-tune"),
        _UNDER_SHIFTS("copy", "distill"),
        FIND,
        "ImageNet-A: 56.5 against 48.9 and 54.3",
    ),
    Claim(
        "12",
        "Under shifts, copied and distilled maps are better than scratch",
        _UNDER_SHIFTS("copy", "distill"),
        _UNDER_SHIFTS("scratch"),
        FIND,
        "ImageNet-A: 48.9 and 54.3 against 32.0",
    ),
    Claim(
        "13",
        "Maps of a teacher with registers push a standard student below scratch",
        _SCRATCH,
        of("components", "registers, copy to standard"),
        FIND,
        "arXiv 2605.07191: four of 11 families, up to 5.1 points",
    ),
    # of the family
    Claim(
        "17",
        "To paint beside a teacher, before there are labels, beats labels alone",
        _PAINTED(*_IN_LAST_LAYER, *_IN_ALL_LAYERS, _BY_HEAD),
        _SCRATCH,
        FIND,
        "arXiv 2205.14443: 78.4 against 75.8",
    ),
    Claim(
        "17",
        "A student that paints gains from a teacher's attention logits",
        _PAINTED("logits, last layer"),
        _PAINTED("MAE"),
        FIND,
        "arXiv 2205.14443: 78.4 against 78.0",
    ),
    Claim(
        "17",
        "The last layer alone is better than all",
        _PAINTED(*_IN_LAST_LAYER),
        _PAINTED(*_IN_ALL_LAYERS),
        FIND,
        "arXiv 2205.14443: so in its figure 7",
    ),
    Claim(
        "17",
        "Attention before and with labels beats Distill of as many steps",
        _PAINTED(f"{_BY_HEAD}, then distill"),
        _central("distill-long"),
        FIND,
    ),
    Claim(
        "17",
        "With few labels, the two high blocks of four are worth keeping",
        of("layer-reserve", "first 4, 250 labels"),
        of("layer-reserve", "first 2, 250 labels"),
        FIND,
        "arXiv 2205.14443: so for MAE-Tiny",
    ),
    # labels stand for the predictions of a teacher that is always right
    Claim("18", "Copied maps bring more than 31,000 right answers", _COPY, _answered("scratch"), WORLDS),
    Claim("18", "Beside copied maps, right answers still help", _answered("copy"), _COPY, WORLDS),
    Claim(
        "18", "Beside right answers, copied maps still help", _answered("copy"), _answered("scratch"), WORLDS
    ),
    Claim(
        "18",
        "A fine-tuned ViT's answers on unlabelled images help, by a token of their own",
        _TAUGHT("token, ViT"),
        _TAUGHT("scratch"),
        FIND,
        "DeiT-B: 83.4 against 81.8",
    ),
    Claim(
        "18",
        "Beside distilled maps, those answers help",
        _TAUGHT("maps and token, ViT"),
        _TAUGHT("maps"),
        FIND,
    ),
    Claim(
        "19",
        "LayerScale helps 24 layers from scratch",
        _DEEP("24 layers, layer scale"),
        _DEEP("24 layers"),
        FIND,
        "arXiv 2103.17239: 82.4 against 78.9",
    ),
    Claim(
        "19",
        "Copied maps bring 24 layers more than LayerScale does",
        _DEEP("24 layers, copy"),
        _DEEP("24 layers, layer scale"),
        FIND,
    ),
    Claim(
        "19",
        "Copied class rows are worth more than copied patch maps",
        _CAIT("cait, copy class rows"),
        _CAIT("cait, copy patches"),
        FIND,
    ),
    Claim(
        "19",
        "Distilled patch maps are worth more than distilled class rows",
        _CAIT("cait, distill patches"),
        _CAIT("cait, distill class rows"),
        FIND,
    ),
    Claim(
        "20",
        "Where objects lie across patches, maps bring more than SPT and LSA",
        _ACROSS("standard, copy, 1000 labels"),
        _ACROSS("local, scratch, 1000 labels"),
        FIND,
    ),
    Claim(
        "20",
        "SPT and LSA still help beside copied maps",
        _ACROSS("local, copy, 1000 labels"),
        _ACROSS("standard, copy, 1000 labels"),
        FIND,
    ),
    Claim(
        "20",
        "A ResMLP that learns to mix patches beats one without any mixing",
        _STATIC("resmlp"),
        _STATIC("resmlp, no mixing"),
        FIND,
        "arXiv 2105.03404: 76.6 against 56.5",
    ),
    Claim(
        "20",
        "A ResMLP gains from its teacher's mean map",
        _STATIC("resmlp, mean map copied"),
        _STATIC("resmlp"),
        FIND,
    ),
    Claim(
        "20",
        "A convolutional network with its teacher's row beats one with its own",
        _ONE_ROW("row copied"),
        _ONE_ROW("attention"),
        ("match",),
    ),
    Claim(
        "20",
        "A convolutional network's own row can be taught",
        _ONE_ROW("row distilled"),
        _ONE_ROW("attention"),
        ("match",),
    ),
    Claim(
        "21",
        "Distilled maps help a detector",
        _BOXES("fcos, distill"),
        _BOXES("fcos, scratch"),
        SCENES,
        "box AP on COCO: 43.6 against 39.1",
    ),
    Claim("21", "Copied maps help a detector", _BOXES("fcos, copy"), _BOXES("fcos, scratch"), SCENES),
    Claim(
        "21",
        "A fine-tuned backbone is better for a detector than one with distilled maps",
        _BOXES("fcos, fine-tune"),
        _BOXES("fcos, distill"),
        SCENES,
        "box AP on COCO: 46.3 against 43.6",
    ),
    Claim(
        "21",
        "Under a detector, features learned along copied maps beat the teacher's own",
        _BOXES("fcos, copy"),
        _BOXES("fcos, frozen"),
        SCENES,
    ),
    Claim(
        "21",
        "Distilled maps help to tell an object's pixels",
        _PIXELS("mask r-cnn, distill"),
        _PIXELS("mask r-cnn, scratch"),
        SCENES,
        "mask AP on COCO: 38.7 against 34.6",
    ),
)


def findings_table(*chapters: str, results: Path | None = None) -> str:
    """The claims of some chapters ("05"), of all when none is named, as a Markdown table with a column for
    each place where they are asked: verdict, difference, interval.

    results: the folder of the records, by default the book's. Raises `ValueError` for a chapter without
    claims.
    """
    judged = _judged(chapters, results)
    return _table(judged, {each.scale for each in judged}, _cell)


def verdicts_table(*chapters: str, results: Path | None = None) -> str:
    """The same with the verdicts alone, one line a claim, a column for each place where any is recorded; a
    dash where fewer than three seeds are."""
    judged = _judged(chapters, results)
    recorded = {each.scale for each in judged if each.verdict != NOT_RECORDED}
    return _table(judged, recorded, lambda each: "–" if each.verdict == NOT_RECORDED else each.verdict)


def _judged(chapters: Sequence[str], results: Path | None) -> list[Judged]:
    known = {claim.chapter for claim in CLAIMS}
    for chapter in chapters:
        require_known("chapter with claims", chapter, sorted(known))
    return judge([claim for claim in CLAIMS if claim.chapter in (chapters or known)], results)


def _table(judged: Sequence[Judged], shown: set[str], cell: Callable[[Judged], str]) -> str:
    scales = [scale for scale in SCALES if scale in shown]
    cells = {(each.claim, each.scale): cell(each) for each in judged}
    rows = [
        [claim.sentence, claim.paper or "–", *(cells.get((claim, scale), "") for scale in scales)]
        for claim in dict.fromkeys(each.claim for each in judged)
    ]
    return markdown_table(["claim", "paper", *(SCALES[scale] for scale in scales)], *rows)


def _cell(judged: Judged) -> str:
    """ "**holds** +14.2 [12.1, 16.3]": the verdict, the difference, its interval."""
    if judged.estimate is None:
        return NOT_RECORDED
    factor = judged.claim.factor
    digits = 1 if factor == 100 else 2
    difference, low, high = (f"{factor * value:+.{digits}f}" for value in judged.estimate[:3])
    return f"**{judged.verdict}** {difference} [{low}, {high}]".replace("-", "−")
