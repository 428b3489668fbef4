"""Exercises of chapter 17, Before there are labels."""

import torch
from torch import Tensor

from atlib.exercises.inputs import normal
from atlib.exercises.judging import Exercise, Wrong

# --- 17.1 ---


def normalised(patches: Tensor) -> Tensor:
    """Each patch with mean 0 and variance 1."""
    variance, mean = torch.var_mean(patches, -1, keepdim=True)
    return (patches - mean) / (variance + 1e-6).sqrt()


def hidden_loss(guess: Tensor, patches: Tensor, hidden: Tensor) -> Tensor:
    """Mean squared error on the hidden patches, each normalised."""
    error = (guess - normalised(patches)).square().mean(-1)
    return error.gather(1, hidden).mean()


def by_mask(guess: Tensor, patches: Tensor, hidden: Tensor) -> Tensor:
    """The same with zeros and ones, as the published code has it."""
    mean = patches.mean(-1, keepdim=True)
    target = (patches - mean) / (patches.var(-1, keepdim=True) + 1e-6) ** 0.5
    mask = torch.zeros(patches.shape[:2], dtype=patches.dtype).scatter(1, hidden, 1)
    return ((guess - target).square().mean(-1) * mask).sum() / mask.sum()


def visible_too(guess: Tensor, patches: Tensor, hidden: Tensor) -> Tensor:
    """Wrong: all patches count."""
    return (guess - normalised(patches)).square().mean()


def visible_alone(guess: Tensor, patches: Tensor, hidden: Tensor) -> Tensor:
    """Wrong: what was not hidden counts."""
    shown = torch.ones(patches.shape[:2], dtype=torch.bool).scatter(1, hidden, False)
    return (guess - normalised(patches)).square().mean(-1)[shown].mean()


def raw_pixels(guess: Tensor, patches: Tensor, hidden: Tensor) -> Tensor:
    """Wrong: the target is not normalised."""
    return (guess - patches).square().mean(-1).gather(1, hidden).mean()


def normalised_together(guess: Tensor, patches: Tensor, hidden: Tensor) -> Tensor:
    """Wrong: one mean and one spread for all patches."""
    target = (patches - patches.mean()) / (patches.var() + 1e-6).sqrt()
    return (guess - target).square().mean(-1).gather(1, hidden).mean()


def divided_by_n(guess: Tensor, patches: Tensor, hidden: Tensor) -> Tensor:
    """Wrong: the variance of a layer norm."""
    target = torch.nn.functional.layer_norm(patches, patches.shape[-1:], eps=1e-6)
    return (guess - target).square().mean(-1).gather(1, hidden).mean()


def first_images_mask(guess: Tensor, patches: Tensor, hidden: Tensor) -> Tensor:
    """Wrong: the first image's hidden patches serve for all."""
    return (guess - normalised(patches)).square().mean(-1)[:, hidden[0]].mean()


def drawn(B: int, P: int, pixels: int, number: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Guesses, patches that are neither centred nor of one spread, and other hidden places in each image."""
    patches = 1 + 2 * normal(B, P, pixels, seed=seed + 1) * (1 + normal(B, P, 1, seed=seed + 2).abs())
    return normal(B, P, pixels, seed=seed), patches, normal(B, P, seed=seed + 3).argsort(1)[:, :number]


# --- 17.2 ---


def parts(asked: Tensor, seen: Tensor) -> dict[str, Tensor]:
    """The answer, from the whole loss and from what of it a map can show."""
    return {"loss": asked, "without row means": seen, "no map can show": 1 - seen / asked}


def unseen_part(z_s: Tensor, z_t: Tensor) -> dict[str, Tensor]:
    """The squared error of attention logits, with and without row means, and the share of what is lost."""
    gap = z_s - z_t
    return parts(gap.square().mean(), (gap - gap.mean(-1, keepdim=True)).square().mean())


def by_variance(z_s: Tensor, z_t: Tensor) -> dict[str, Tensor]:
    """The same: what is left without its mean is a variance."""
    gap = z_s - z_t
    means = gap.mean(-1)
    seen = gap.var(-1, correction=0).mean()
    return parts(seen + means.square().mean(), seen)


def over_queries(z_s: Tensor, z_t: Tensor) -> dict[str, Tensor]:
    """Wrong: means down the columns."""
    gap = z_s - z_t
    return parts(gap.square().mean(), (gap - gap.mean(-2, keepdim=True)).square().mean())


def one_for_a_head(z_s: Tensor, z_t: Tensor) -> dict[str, Tensor]:
    """Wrong: one mean for a whole table of logits."""
    gap = z_s - z_t
    return parts(gap.square().mean(), (gap - gap.mean((-2, -1), keepdim=True)).square().mean())


def student_alone(z_s: Tensor, z_t: Tensor) -> dict[str, Tensor]:
    """Wrong: the teacher keeps its row means."""
    centred = z_s - z_s.mean(-1, keepdim=True)
    return parts((z_s - z_t).square().mean(), (centred - z_t).square().mean())


def log_shares(z_s: Tensor, z_t: Tensor) -> dict[str, Tensor]:
    """Wrong: the log-sum-exp is taken away instead of the mean."""
    seen = (z_s.log_softmax(-1) - z_t.log_softmax(-1)).square().mean()
    return parts((z_s - z_t).square().mean(), seen)


def of_maps(z_s: Tensor, z_t: Tensor) -> dict[str, Tensor]:
    """Wrong: the squared error of shares."""
    seen = (z_s.softmax(-1) - z_t.softmax(-1)).square().mean()
    return parts((z_s - z_t).square().mean(), seen)


def what_maps_show(z_s: Tensor, z_t: Tensor) -> dict[str, Tensor]:
    """Wrong: the other share."""
    right = unseen_part(z_s, z_t)
    return right | {"no map can show": 1 - right["no map can show"]}


def logits(*shape: int, offset: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Of a student and of a teacher; the teacher's rows each lie somewhere else."""
    teacher = 2 * normal(*shape, seed=seed + 1) + offset * normal(*shape[:-1], 1, seed=seed + 2)
    return normal(*shape, seed=seed), teacher


def the_same_maps() -> tuple[Tensor, Tensor]:
    """Logits that differ by a constant in each row."""
    student = normal(2, 2, 4, 4)
    return student, student + normal(2, 2, 4, 1, seed=1)


EXERCISES = (
    Exercise(
        "17.1",
        "Only what was hidden counts",
        stars=2,
        minutes=15,
        subject="losses",
        right=hidden_loss,
        cases={"6 of 8 hidden": lambda: drawn(3, 8, 12, 6), "1 of 4": lambda: drawn(2, 4, 5, 1, seed=5)},
        also_right=(by_mask,),
        wrong={
            "visible too": Wrong(
                visible_too,
                "All patches count. To paint a patch that was shown is copying; the loss is over the hidden"
                " ones alone.",
            ),
            "visible alone": Wrong(
                visible_alone, "The patches that were *shown* count. Asked are those that were hidden."
            ),
            "raw pixels": Wrong(
                raw_pixels,
                "The target is not normalised: take away each patch's own mean and divide by its standard"
                " deviation.",
            ),
            "all normalised together": Wrong(
                normalised_together,
                "One mean and one spread serve all patches. Each patch has its own, over its pixels: the last"
                " axis.",
            ),
            "variance of a layer norm": Wrong(
                divided_by_n,
                "The variance was divided by the number of pixels, as in layer_norm. MAE takes tensor.var(),"
                " which divides by one less.",
            ),
            "the first image's mask": Wrong(
                first_images_mask,
                "All images are judged on the first one's hidden patches. `hidden` has a row for each image:"
                " gather along axis 1.",
            ),
        },
    ),
    Exercise(
        "17.2",
        "What no map can show",
        stars=2,
        minutes=15,
        subject="losses",
        right=unseen_part,
        cases={
            "far apart": lambda: logits(2, 3, 5, 5, offset=3),
            "nearly centred": lambda: logits(1, 2, 4, 4, offset=0.2, seed=5),
            "the same maps": the_same_maps,
        },
        also_right=(by_variance,),
        wrong={
            "columns": Wrong(
                over_queries,
                "Means were taken over queries, down the columns. The softmax runs along a row, so it is a"
                " constant added to a *row* that it does not see: the mean over the last axis.",
            ),
            "one for a head": Wrong(
                one_for_a_head,
                "One mean was taken away from each head's whole table. Every row may be shifted by a number"
                " of its own: the mean over the last axis alone.",
            ),
            "student alone": Wrong(
                student_alone,
                "Row means were taken from the student's logits only. Both have some: take the mean of the"
                " difference, or one from each.",
            ),
            "log-shares": Wrong(
                log_shares,
                "You compared logarithms of shares. They do not see a row's constant either, but they take"
                " away a log-sum-exp where asked is the mean, and the error left is larger.",
            ),
            "shares": Wrong(
                of_maps,
                "You compared the maps. The loss is of logits, before the softmax; take their row means away"
                " and stay there.",
            ),
            "the other share": Wrong(
                what_maps_show,
                "That is the share which maps do show. Asked is the rest: what row means add to the loss, in"
                " parts of the whole loss.",
            ),
        },
    ),
)
