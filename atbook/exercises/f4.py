"""Exercises of card F4, A distillation token."""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from atbook.exercises.inputs import maps, normal
from atbook.exercises.judging import Exercise, told
from atlib.data import UNLABELLED

# --- F4.1 ---


def joined(of_logits: Tensor, of_softmaxes: Tensor) -> dict[str, Tensor]:
    """Both answers, by name."""
    return {"mean of logits": of_logits, "mean of softmaxes": of_softmaxes}


def two_answers(of_class: Tensor, of_token: Tensor) -> dict[str, Tensor]:
    """The two ways of making one answer of two heads."""
    heads = torch.stack([of_class, of_token])
    return joined(heads.mean(0).softmax(-1), heads.softmax(-1).mean(0))


def geometric(of_class: Tensor, of_token: Tensor) -> dict[str, Tensor]:
    """The same: a mean of logits is the geometric mean of the probabilities, and then divided by its sum."""
    p, q = of_class.softmax(-1), of_token.softmax(-1)
    root = (p * q).sqrt()
    return joined(root / root.sum(-1, keepdim=True), (p + q) / 2)


def a_sure_and_an_unsure_head() -> tuple[Tensor, Tensor]:
    """One head rules a class out that the other is sure of: the two ways name different classes."""
    return (
        torch.tensor([[9.0, 0.0, 0.0], [2.0, 1.0, 0.0]], dtype=torch.float64),
        torch.tensor([[-12.0, 0.5, 0.0], [0.0, 3.0, 1.0]], dtype=torch.float64),
    )


# --- F4.2 ---


def partly_labelled(of_class: Tensor, of_token: Tensor, z_t: Tensor, labels: Tensor) -> Tensor:
    """DeiT's hard loss where some labels are missing: the class head learns from those that are known, the
    other from the teacher, on all images."""
    labelled = labels != UNLABELLED
    task = cross_entropy(of_class[labelled], labels[labelled]) if labelled.any() else 0 * of_class.sum()
    return (task + cross_entropy(of_token, z_t.argmax(-1))) / 2


def by_weights(of_class: Tensor, of_token: Tensor, z_t: Tensor, labels: Tensor) -> Tensor:
    """The same with a weight of 0 or 1 for each image."""
    weight = (labels >= 0).to(of_class.dtype)
    task = -of_class.log_softmax(-1).gather(1, labels.clamp(min=0)[:, None])[:, 0]
    taught = -of_token.log_softmax(-1).gather(1, z_t.argmax(-1, keepdim=True))[:, 0]
    return 0.5 * (weight * task).sum() / weight.sum().clamp(min=1) + 0.5 * taught.mean()


def over_all_images(of_class, of_token, z_t, labels):
    """The labels' part is divided by the number of *all* images, so that it weighs less the fewer are
    labelled. Take the mean over those that have a label."""
    task = cross_entropy(of_class, labels, ignore_index=UNLABELLED, reduction="sum") / len(labels)
    return (task + cross_entropy(of_token, z_t.argmax(-1))) / 2


def teacher_on_labelled(of_class, of_token, z_t, labels):
    """The teacher is heard on labelled images alone. It answers for every image, and there its answer is the
    label once more."""
    labelled = labels != UNLABELLED
    if not labelled.any():
        return 0 * (of_class.sum() + of_token.sum())
    return partly_labelled(of_class[labelled], of_token[labelled], z_t[labelled], labels[labelled])


def teacher_on_the_others(of_class, of_token, z_t, labels):
    """The teacher is heard on unlabelled images alone. In DeiT the token learns its answer for every
    image."""
    labelled = labels != UNLABELLED
    task = cross_entropy(of_class[labelled], labels[labelled]) if labelled.any() else 0 * of_class.sum()
    if labelled.all():
        return task / 2
    return (task + cross_entropy(of_token[~labelled], z_t[~labelled].argmax(-1))) / 2


def labels_filled_in(of_class, of_token, z_t, labels):
    """Where a label is missing, the class head learns the teacher's answer. It should learn nothing there;
    the teacher speaks to the token."""
    top = z_t.argmax(-1)
    filled = torch.where(labels == UNLABELLED, top, labels)
    return (cross_entropy(of_class, filled) + cross_entropy(of_token, top)) / 2


def teachers_probabilities(of_class, of_token, z_t, labels):
    """The token learns the teacher's probabilities. The task asks for the hard loss: its top class."""
    hard = cross_entropy(of_token, z_t.argmax(-1))
    return (
        partly_labelled(of_class, of_token, z_t, labels)
        + (cross_entropy(of_token, z_t.softmax(-1)) - hard) / 2
    )


def batch(*labels: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits of both heads and of a teacher for five classes, and labels."""
    of_class, of_token, z_t = (2 * normal(len(labels), 5, seed=seed + i) for i in range(3))
    return of_class, of_token, z_t, torch.tensor(labels)


# --- F4.3 ---


def own_share(p_s: Tensor, places: list[int]) -> Tensor:
    """The share that each row of the student gives to its own tokens."""
    return p_s[..., places].sum(-1, keepdim=True)


def common_tokens(p_s: Tensor, places: list[int]) -> list[int]:
    """The tokens that teacher and student have."""
    return [token for token in range(p_s.shape[-1]) if token not in places]


def with_own_tokens(p_t: Tensor, p_s: Tensor, places: list[int]) -> Tensor:
    """The teacher's map with room for the student's own tokens: their rows are the student's, and every other
    row leaves them the student's share."""
    common = torch.tensor(common_tokens(p_s, places))
    made = p_s.clone()
    made[..., common[:, None], common] = (1 - own_share(p_s, places))[..., common, :] * p_t
    return made


def not_shrunk(p_t, p_s, places):
    """Rows sum to more than 1: the teacher's part stays whole beside the student's share s. Multiply it by 1
    - s."""
    common = torch.tensor(common_tokens(p_s, places))
    made = p_s.clone()
    made[..., common[:, None], common] = p_t
    return made


def own_rows_are_empty(p_t, p_s, places):
    """The rows of the student's own tokens are 0. These tokens listen, too, as the student tells them to:
    their rows are the student's."""
    made = with_own_tokens(p_t, p_s, places)
    made[..., places, :] = 0
    return made


def nobody_listens(p_t, p_s, places):
    """The teacher's rows give nothing to the student's own tokens. Then no other token ever hears of them;
    they keep the share s."""
    common = torch.tensor(common_tokens(p_s, places))
    made = p_s.clone()
    made[..., common, :] = 0
    made[..., common[:, None], common] = p_t
    return made


def first_come(p_t, p_s, places):
    """The teacher's tokens were put first and the student's own last. `places` says where these are; the
    teacher's fill the other places, in their order."""
    n = p_t.shape[-1]
    made = p_s.clone()
    made[..., :n, :n] = (1 - own_share(p_s, places))[..., :n, :] * p_t
    return made


def one_share_for_all(p_t, p_s, places):
    """One share serves all rows. Each row gives its own s to the own tokens."""
    common = torch.tensor(common_tokens(p_s, places))
    made = p_s.clone()
    share = own_share(p_s, places)[..., common, :].mean(-2, keepdim=True)
    made[..., common[:, None], common] = (1 - share) * p_t
    return made


def with_more_tokens(B: int, H: int, n: int, places: list[int], seed: int = 0):
    """The teacher's map of n tokens, the student's of n and its own."""
    N = n + len(places)
    return maps(B, H, n, n, seed=seed), maps(B, H, N, N, seed=seed + 1), places


EXERCISES = (
    Exercise(
        "F4.1",
        subject="predictions",
        right=two_answers,
        cases={
            "random": lambda: (2 * normal(5, 4), 2 * normal(5, 4, seed=1)),
            "one head is sure": a_sure_and_an_unsure_head,
        },
        also_right=(geometric,),
        wrong={
            "The logits are added and not averaged. That names the same class,"
            " but as probabilities it is sharper: a temperature of one half.": lambda of_class, of_token: (
                two_answers(of_class, of_token) | {"mean of logits": (of_class + of_token).softmax(-1)}
            ),
            "The mean of logits still needs its"
            " softmax: the task asks for probabilities.": lambda of_class, of_token: (
                two_answers(of_class, of_token) | {"mean of logits": (of_class + of_token) / 2}
            ),
            "The two softmaxes are added, so that rows sum to 2. Halve them;"
            " it changes no answer, but the task asks for probabilities.": lambda *z: (
                two_answers(*z) | {"mean of softmaxes": 2 * two_answers(*z)["mean of softmaxes"]}
            ),
            "The softmax runs along the images. Classes are the last axis: softmax(-1).": lambda a, b: joined(
                ((a + b) / 2).softmax(0), (a.softmax(0) + b.softmax(0)) / 2
            ),
            "You took a softmax of probabilities. The mean of two softmaxes sums to 1 already.": lambda *z: (
                two_answers(*z) | {"mean of softmaxes": two_answers(*z)["mean of softmaxes"].softmax(-1)}
            ),
            "Each answer stands under the other's name.": lambda *z: dict(
                zip(two_answers(*z), reversed(two_answers(*z).values()))
            ),
        },
        see="What it changes",
    ),
    Exercise(
        "F4.2",
        subject="losses",
        right=partly_labelled,
        cases={
            "two of five": lambda: batch(3, UNLABELLED, 0, UNLABELLED, UNLABELLED),
            "all": lambda: batch(1, 4, 2, seed=5),
            "none": lambda: batch(UNLABELLED, UNLABELLED, seed=9),
        },
        also_right=(by_weights,),
        wrong={
            "The heads are swapped: labels go to the class"
            " head, the teacher's answers to the token's.": lambda of_class, of_token, z_t, labels: (
                partly_labelled(of_token, of_class, z_t, labels)
            ),
            "Both parts are of the averaged logits. That is how the student"
            " answers after training; while it learns, each head has a loss"
            " of its own.": lambda a, b, z_t, labels: partly_labelled((a + b) / 2, (a + b) / 2, z_t, labels),
            **told(
                over_all_images,
                teacher_on_labelled,
                teacher_on_the_others,
                labels_filled_in,
                teachers_probabilities,
            ),
        },
        see="What it changes",
    ),
    Exercise(
        "F4.3",
        subject="maps",
        right=with_own_tokens,
        cases={
            "second of five": lambda: with_more_tokens(2, 2, 4, [1]),
            "first and third of six": lambda: with_more_tokens(1, 3, 4, [0, 2], seed=5),
        },
        wrong={
            "The share was taken from a column. A row says which tokens its token listens to, so s is the sum"
            " of row i over the own columns.": lambda p_t, p_s, places: (
                with_own_tokens(p_t.mT, p_s.mT, places).mT
            ),
            "You put both side by side and divided by the sum, so the own tokens get s"
            " / (1 + s). The student gave them s: keep that, and shrink the teacher's"
            " part by 1 - s.": lambda *maps: not_shrunk(*maps) / not_shrunk(*maps).sum(-1, keepdim=True),
            **told(not_shrunk, own_rows_are_empty, nobody_listens, first_come, one_share_for_all),
        },
        see="What can be handed over",
    ),
)
