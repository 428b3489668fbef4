"""Exercises of chapter 4, Routing or message?."""

from statistics import mean

import torch
from torch import Tensor

from atbook.exercises.inputs import maps
from atbook.exercises.judging import Exercise, told

# --- 4.1 ---

Seeds = list[float]  # accuracies of one method, one for each seed


def gain_shares(scratch: Seeds, routing: Seeds, message: Seeds, copy: Seeds) -> dict[str, float]:
    """The share of Copy's gain that each twin keeps, and the share that neither keeps."""
    gain = mean(copy) - mean(scratch)
    first, second = ((mean(twin) - mean(scratch)) / gain for twin in (routing, message))
    return {"routing": first, "message": second, "rest": 1 - first - second}


def by_seeds_gains(scratch: Seeds, routing: Seeds, message: Seeds, copy: Seeds) -> dict[str, float]:
    """The same from gains within seeds."""
    gain, *twins = (sum(a - s for a, s in zip(method, scratch)) for method in (copy, routing, message))
    first, second = (twin / gain for twin in twins)
    return {"routing": first, "message": second, "rest": (gain - sum(twins)) / gain}


def what_the_other_lacks(scratch, routing, message, copy):
    """You gave routing all that the message twin lacks, and message all that the routing twin lacks. What
    takes both is then counted twice: a twin's share is its own gain over scratch."""
    gain = mean(copy) - mean(scratch)
    first, second = ((mean(copy) - mean(twin)) / gain for twin in (message, routing))
    return {"routing": first, "message": second, "rest": 1 - first - second}


def made_to_add_up(scratch, routing, message, copy):
    """You stretched both shares until their sum is 1. They need not add up: some of the gain may take both,
    or either may be enough."""
    share = gain_shares(scratch, routing, message, copy)
    total = share["routing"] + share["message"]
    return {"routing": share["routing"] / total, "message": share["message"] / total, "rest": 0.0}


def ratios_averaged(scratch, routing, message, copy):
    """You took shares for each seed and averaged them. A seed in which Copy gains little then decides all:
    divide mean gains."""
    by_seed = [gain_shares(*([x] for x in seed)) for seed in zip(scratch, routing, message, copy)]
    return {name: mean(shares[name] for shares in by_seed) for name in by_seed[0]}


def counted_from_nothing(scratch, routing, message, copy):
    """You divided accuracies. What a student reaches without a teacher is no gain of the maps: take scratch
    away first."""
    first, second = (mean(twin) / mean(copy) for twin in (routing, message))
    return {"routing": first, "message": second, "rest": 1 - first - second}


# --- 4.2 ---

Scene = dict[str, Tensor]


def twins_of(scene: Scene, other: Scene) -> dict[str, Scene | Tensor]:
    """The routing twin and the message twin of scenes, and the labels that go with them."""
    rows = torch.arange(len(scene["cell"]))
    labels = scene["shape"][rows, scene["cell"]]
    shape = other["shape"].clone()
    shape[rows, other["cell"]] = labels
    return {
        "routing": scene | {"shape": other["shape"]},
        "message": other | {"shape": shape},
        "labels": labels,
    }


def by_scattering(scene: Scene, other: Scene) -> dict[str, Scene | Tensor]:
    """The same by gather and scatter."""
    labels = scene["shape"].gather(1, scene["cell"][:, None])
    shape = other["shape"].scatter(1, other["cell"][:, None], labels)
    routing = {"cell": scene["cell"], "hue": scene["hue"], "shape": other["shape"]}
    message = {"cell": other["cell"], "hue": other["hue"], "shape": shape}
    return {"routing": routing, "message": message, "labels": labels[:, 0]}


def with_message(scene: Scene, other: Scene, message: Scene) -> dict[str, Scene | Tensor]:
    """The right twins, except for the message twin."""
    return twins_of(scene, other) | {"message": message}


def only_the_asked_for(scene, other):
    """In the routing twin only the marked glyph has another shape. All shapes are drawn again: the
    distractors' are content of the image, too."""
    rows, shape = torch.arange(len(scene["cell"])), scene["shape"].clone()
    shape[rows, scene["cell"]] = other["shape"][rows, scene["cell"]]
    return twins_of(scene, other) | {"routing": scene | {"shape": shape}}


def at_the_old_place(scene, other):
    """The message twin has the shape where the image has it. Its own mark is at other['cell']: the shape has
    to be there, or the teacher does not look at it."""
    right, rows = twins_of(scene, other), torch.arange(len(scene["cell"]))
    shape = other["shape"].clone()
    shape[rows, scene["cell"]] = right["labels"]
    return with_message(scene, other, other | {"shape": shape})


def mark_stays(scene, other):
    """Your message twin has its mark where the image has it, so its maps tell the routing as well. Place and
    hues are the other scene's."""
    shape = at_the_old_place(scene, other)["message"]["shape"]
    return with_message(scene, other, other | {"shape": shape, "cell": scene["cell"]})


def in_every_image(scene, other):
    """shape[:, cell] writes the cells of all images into every image. One cell for each row:
    shape[torch.arange(n), cell]."""
    shape, labels = other["shape"].clone(), twins_of(scene, other)["labels"]
    shape[:, other["cell"]] = labels
    return with_message(scene, other, other | {"shape": shape})


def labels_of_the_twin(scene, other):
    """The labels are those of the routing twin. The student looks at the image itself and is asked about
    that; only the teacher sees the twin."""
    right, rows = twins_of(scene, other), torch.arange(len(scene["cell"]))
    return right | {"labels": right["routing"]["shape"][rows, scene["cell"]]}


def scenes(number: int, seed: int) -> Scene:
    """The mark's cell, the shapes and the hues of some images of Find."""
    rng = torch.Generator().manual_seed(seed)
    cell, shape, hue = (
        torch.randint(kinds, size, generator=rng)
        for kinds, size in ((16, (number,)), (8, (number, 16)), (6, (number, 16)))
    )
    return {"cell": cell, "shape": shape, "hue": hue}


# --- 4.3 ---


def mean_of_others(p: Tensor) -> Tensor:
    """For each image the mean map of the other images."""
    return (p.sum(0) - p) / (len(p) - 1)


def one_left_out(p: Tensor) -> Tensor:
    """The same image by image."""
    return torch.stack([torch.cat([p[:b], p[b + 1 :]]).mean(0) for b in range(len(p))])


# --- 4.4 ---

Batches = list[tuple[Tensor, Tensor]]


def mean_map_of_cells(batches: Batches, number: int) -> Tensor:
    """The mean map of all images with the mark in a cell: (number, H, N, N)."""
    total = torch.zeros(number, *batches[0][0].shape[1:]).to(batches[0][0])
    count = torch.zeros(number).to(total)
    for p, cells in batches:
        total.index_add_(0, cells, p)
        count += cells.bincount(minlength=number)
    even = torch.full_like(total, 1 / total.shape[-1])
    seen = count[:, None, None, None]
    return torch.where(seen > 0, total / seen.clamp(min=1), even)


def zero_by_zero(batches, number):
    """A cell that no image marks got nan, the mean of nothing. Its map has to say nothing: the even one, 1/N
    everywhere."""
    p, cells = (torch.cat(parts) for parts in zip(*batches))
    return torch.stack([p[cells == c].mean(0) for c in range(number)])


def everybodys_mean(batches, number):
    """A cell that no image marks got the mean of all images, which looks at other cells. It has to be the
    even map, 1/N everywhere."""
    means = zero_by_zero(batches, number)
    return torch.where(means.isnan(), torch.cat([p for p, _ in batches]).mean(0), means)


def mean_of_means(batches, number):
    """You averaged the means of the batches as if all had equally many images of a cell. Add up maps and
    counts, and divide once."""
    means = torch.stack([zero_by_zero([batch], number) for batch in batches]).nanmean(0)
    return means.nan_to_num(1 / means.shape[-1])


def repeats_lost(batches, number):
    """Of several images with the same cell in a batch only one was added: total[cells] += p writes each place
    once. index_add_ adds them all."""
    total = torch.zeros(number, *batches[0][0].shape[1:]).to(batches[0][0])
    count = torch.zeros(number).to(total)
    for p, cells in batches:
        total[cells] += p
        count += cells.bincount(minlength=number)
    seen = count[:, None, None, None]
    return (total / seen).nan_to_num(1 / total.shape[-1])


EXERCISES = (
    Exercise(
        "4.1",
        subject="controls",
        right=gain_shares,
        cases={
            "as in Find": lambda: (
                [75.1, 76.9, 75.7],
                [81.0, 82.4, 81.7],
                [88.0, 85.6, 87.4],
                [94.2, 95.3, 94.6],
            ),
            "as in Match": lambda: (
                [14.9, 13.8, 15.4],
                [79.1, 81.2, 80.6],
                [14.2, 14.6, 14.7],
                [81.0, 82.9, 82.1],
            ),
            "either is enough": lambda: ([50.0, 56.0], [58.0, 59.0], [57.0, 60.0], [59.0, 60.0]),
            "a seed that only guesses": lambda: ([30.0, 34.0], [12.5, 60.0], [40.0, 12.5], [80.0, 82.0]),
        },
        also_right=(by_seeds_gains,),
        wrong={
            "Negative shares were set to 0. A negative rest says that either alone"
            " is nearly enough, and a twin may end below scratch.": lambda scratch, routing, message, copy: (
                {name: max(0.0, x) for name, x in gain_shares(scratch, routing, message, copy).items()}
            ),
            "Seeds that only guess were left out. They are results as"
            " good as any: a method that sometimes fails has a lower mean.": lambda *methods: gain_shares(
                *([accuracy for accuracy in seeds if accuracy > 12.5] for seeds in methods)
            ),
            **told(what_the_other_lacks, made_to_add_up, ratios_averaged, counted_from_nothing),
        },
        see="Many seeds, two worlds",
    ),
    Exercise(
        "4.2",
        subject="controls",
        right=twins_of,
        cases={
            "6 images": lambda: (scenes(6, seed=0), scenes(6, seed=1)),
            "1 image": lambda: (scenes(1, seed=2), scenes(1, seed=3)),
        },
        also_right=(by_scattering,),
        wrong=told(only_the_asked_for, at_the_old_place, mark_stays, in_every_image, labels_of_the_twin),
        see="The twin",
    ),
    Exercise(
        "4.3",
        subject="maps",
        right=mean_of_others,
        cases={
            "a batch of 4": lambda: (maps(4, 2, 5, 5),),
            "a batch of 2": lambda: (maps(2, 3, 4, 4, seed=1),),
        },
        also_right=(one_left_out,),
        wrong={
            "An image's own map is part of its mean: what it says of this image is still there,"
            " in a B-th of its strength. Leave it out.": lambda p: p.mean(0, keepdim=True).expand_as(p),
            "The sum of B - 1 maps was divided by B, so rows no longer sum to 1.": lambda p: (
                (p.sum(0) - p) / len(p)
            ),
            "That is the mean over the other heads of the same image. Images are axis 0.": lambda p: (
                (p.sum(1, keepdim=True) - p) / (p.shape[1] - 1)
            ),
            "That is one map for the whole batch, with every image in it. Each image needs"
            " its own mean, of B - 1 maps: the shape stays (B, H, N, N).": lambda p: p.mean(0, keepdim=True),
        },
        see="And in the paper?",
    ),
    Exercise(
        "4.4",
        subject="controls",
        right=mean_map_of_cells,
        cases={
            "cell 2 of 4 is never marked": lambda: (
                [
                    (maps(5, 2, 6, 6), torch.tensor([0, 0, 1, 0, 3])),
                    (maps(2, 2, 6, 6, seed=3), torch.tensor([0, 1])),
                ],
                4,
            ),
            "one batch": lambda: ([(maps(4, 1, 5, 5, seed=5), torch.tensor([1, 1, 0, 1]))], 3),
        },
        wrong={
            "A cell that no image marks got rows of zeros, a token"
            " that listens to none. Rows are shares: use the even"
            " map, 1/N everywhere.": lambda batches, number: zero_by_zero(batches, number).nan_to_num(0.0),
            "A cell that no image marks got 1/number everywhere, with the"
            " number of cells. Its rows have N entries and sum to 1: the even"
            " map has 1/N.": lambda batches, number: zero_by_zero(batches, number).nan_to_num(1 / number),
            **told(zero_by_zero, everybodys_mean, mean_of_means, repeats_lost),
        },
    ),
)
