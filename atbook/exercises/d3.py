"""Exercises of page D3, Same features, same mistakes?."""

from collections.abc import Callable
from itertools import permutations
from math import ceil, floor

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from atbook.exercises.inputs import maps, normal
from atbook.exercises.judging import Exercise, told
from atfamily.measures.cka import MinibatchCKA
from atlib.analysis import jensen_shannon

Hsic = Callable[[Tensor, Tensor], Tensor]

# --- D3.1 ---


def without_diagonal(K: Tensor) -> Tensor:
    """Similarities of different images only."""
    return K - K.diag().diag()


def hsic_1(K: Tensor, L: Tensor) -> Tensor:
    """The unbiased HSIC₁ of two tables of similarities."""
    return from_tables(without_diagonal(K), without_diagonal(L))


def from_tables(K: Tensor, L: Tensor, factor: float = 2.0) -> Tensor:
    """The formula of HSIC₁, with `factor` in its last term."""
    n, k, l = len(K), K.sum(1), L.sum(1)
    sums = (K * L).sum() + k.sum() * l.sum() / ((n - 1) * (n - 2)) - factor / (n - 2) * (k @ l)
    return sums / (n * (n - 3))


def ratio(x: Tensor, y: Tensor, hsic: Hsic) -> Tensor:
    """CKA from a HSIC."""
    K, L = x @ x.T, y @ y.T
    return hsic(K, L) / (hsic(K, K) * hsic(L, L)).sqrt()


def unbiased_cka(x: Tensor, y: Tensor) -> Tensor:
    """CKA from HSIC₁."""
    return ratio(x, y, hsic_1)


def from_four_images(x: Tensor, y: Tensor) -> Tensor:
    """The same, from its meaning: the mean over all choices of four different images."""
    i, j, q, r = torch.tensor(list(permutations(range(len(x)), 4))).T

    def hsic(K: Tensor, L: Tensor) -> Tensor:
        return (K[i, j] * (L[i, j] + L[q, r] - 2 * L[i, q])).mean()

    return ratio(x, y, hsic)


def centred(K: Tensor) -> Tensor:
    """Rows and columns of mean 0."""
    return K - K.mean(0) - K.mean(1, keepdim=True) + K.mean()


def biased(K: Tensor, L: Tensor) -> Tensor:
    """Wrong: the chapter's HSIC."""
    return (centred(K) * centred(L)).sum()


def centred_without_diagonal(K: Tensor, L: Tensor) -> Tensor:
    """Wrong: the chapter's HSIC of tables with an empty diagonal."""
    return biased(without_diagonal(K), without_diagonal(L))


def one_in_place_of_two(K: Tensor, L: Tensor) -> Tensor:
    """Wrong: the last term once."""
    return from_tables(without_diagonal(K), without_diagonal(L), factor=1.0)


def entry_by_entry(K: Tensor, L: Tensor) -> Tensor:
    """Wrong: 1ᵀ K L 1 is taken for the sum of the products of entries."""
    n, K, L = len(K), without_diagonal(K), without_diagonal(L)
    product = (K * L).sum()
    return product + K.sum() * L.sum() / ((n - 1) * (n - 2)) - 2 / (n - 2) * product


def alike(rows: int, p: int, q: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Features of the same images that share a part, with means other than 0."""
    x, y = normal(rows, p, seed=seed) + 1, normal(rows, q, seed=seed + 1) - 0.5
    shared = min(p, q) // 2 + 1
    y[:, :shared] += 1.5 * x[:, :shared]
    return x, y


# --- D3.2 ---


def cka_from_batches(xs: list[Tensor], ys: list[Tensor], hsic: Hsic) -> Tensor:
    """Three HSICs, means over images, then one ratio."""
    xy = xx = yy = 0
    for n, (K, L) in tables(xs, ys):
        xy, xx, yy = xy + n * hsic(K, L), xx + n * hsic(K, K), yy + n * hsic(L, L)
    return xy / (xx * yy).sqrt()


def tables(xs: list[Tensor], ys: list[Tensor]) -> list[tuple[int, tuple[Tensor, Tensor]]]:
    """For every batch, the number of its images and the similarities in x and in y."""
    return [(len(x), (x @ x.T, y @ y.T)) for x, y in zip(xs, ys)]


def batches_by_atlib(xs: list[Tensor], ys: list[Tensor], hsic: Hsic) -> float:
    """The same, by atlib."""
    cka = MinibatchCKA()
    for x, y in zip(xs, ys):
        cka.update(x, y)
    return cka.value()


def batches_alike(xs, ys, hsic):
    """Every batch counts alike, so an image of the small last batch counts more than others. Weigh each batch
    by its images."""
    hsics = [(hsic(K, L), hsic(K, K), hsic(L, L)) for _, (K, L) in tables(xs, ys)]
    xy, xx, yy = (torch.stack(values).sum() for values in zip(*hsics))
    return xy / (xx * yy).sqrt()


def root_in_a_batch(xs, ys, hsic):
    """The root was taken batch by batch. The mean of roots is not the root of means: add up HSIC(K, K) and
    HSIC(L, L) first."""
    terms = [(n * hsic(K, L), n * (hsic(K, K) * hsic(L, L)).sqrt()) for n, (K, L) in tables(xs, ys)]
    above, below = map(sum, zip(*terms))
    return above / below


def in_batches(p: int, q: int, *sizes: int, seed: int = 0) -> tuple[list[Tensor], list[Tensor], Hsic]:
    """Batches of these sizes, and the HSIC to use."""
    xs, ys = zip(*(alike(n, p, q, seed + 10 * i) for i, n in enumerate(sizes)))
    return list(xs), list(ys), hsic_1


# --- D3.3 ---

Pairs = dict[str, float | list[int]]


def divergences(a: Tensor, b: Tensor, divergence: Callable = jensen_shannon) -> Tensor:
    """The divergence of every head of a from every head of b, mean over images and queries: (H, H)."""
    return torch.stack([divergence(p[:, None].expand_as(b), b).mean((0, 2)) for p in a.unbind(1)])


def assigned(cost: Tensor, largest: bool = False) -> Pairs:
    """Heads paired one to one, so that the sum of the costs is least."""
    heads, partners = linear_sum_assignment(cost.numpy(), maximize=largest)
    return {"divergence": cost[heads, partners].mean().item(), "partner": partners.tolist()}


def pair_heads(a: Tensor, b: Tensor) -> Pairs:
    """The mean divergence of heads paired one to one, and b's head for each of a's."""
    return assigned(divergences(a, b))


def by_trying_all(a: Tensor, b: Tensor) -> Pairs:
    """The same: all pairings are tried, on a divergence of two Kullback-Leibler terms."""
    middle = (a[:, :, None] + b[:, None]) / 2
    to_middle = [(p * (p / middle).log()).sum(-1) for p in (a[:, :, None], b[:, None])]
    cost = (sum(to_middle) / 2).mean((0, 3))
    ways = torch.tensor(list(permutations(range(len(cost)))))
    means = cost[torch.arange(len(cost)), ways].mean(1)
    return {"divergence": means.min().item(), "partner": ways[means.argmin()].tolist()}


def each_the_nearest(a, b):
    """Two heads got the same partner: the smallest number of each row is no pairing. One to one is an
    assignment problem, scipy.optimize.linear_sum_assignment."""
    cost = divergences(a, b)
    return {"divergence": cost.amin(1).mean().item(), "partner": cost.argmin(1).tolist()}


def one_after_the_other(a, b):
    """Head 0 chose first and the others took what was left. What is best for one may cost another more: look
    for the least *sum*, scipy.optimize.linear_sum_assignment."""
    cost, partners = divergences(a, b), []
    for row in cost:
        left = row.clone()
        left[partners] = torch.inf
        partners.append(left.argmin().item())
    return {"divergence": cost[range(len(cost)), partners].mean().item(), "partner": partners}


def averaged_first(a, b):
    """Maps were averaged over images and queries before they were compared, and two heads that look elsewhere
    in every image may have the same mean. Compare row by row, then average."""
    p, q = a.mean((0, 2)), b.mean((0, 2))
    return assigned(torch.stack([jensen_shannon(row.expand_as(q), q) for row in p]))


def other_order(heads: int, order: list[int], seed: int = 0) -> tuple[Tensor, Tensor]:
    """Maps of a, and maps like them with heads in a different order."""
    a = maps(3, heads, 6, 6, seed=seed)
    return a, (0.7 * a + 0.3 * maps(3, heads, 6, 6, seed=seed + 1))[:, order]


def rivals() -> tuple[Tensor, Tensor]:
    """Two heads of a are nearest to b's head 0, and the second of them is near to no other."""
    a = maps(3, 3, 6, 6, seed=5)
    b = torch.stack([0.7 * a[:, 0] + 0.3 * a[:, 1], a[:, 2], 0.5 * a[:, 0] + 0.5 * a[:, 2]], 1)
    return a, b


# --- D3.4 ---

Echo = dict[str, float]


def half_an_echo(accuracy: float, copied: float, classes: int) -> Echo:
    """Accuracy, disagreement and its place for a model that echoes another one on a share of images."""
    b = copied * accuracy + (1 - copied) / classes
    return placed(accuracy, b, (1 - copied) * (1 - 1 / classes), classes)


def placed(a: float, b: float, different: float, classes: int) -> Echo:
    """A disagreement between nested and independent mistakes."""
    least = a - b
    independent = 1 - a * b - (1 - a) * (1 - b) / (classes - 1)
    return {"accuracy": b, "different": different, "place": (different - least) / (independent - least)}


def echo_by_cases(accuracy: float, copied: float, classes: int) -> Echo:
    """The same, from all that can happen: class 0 is right, each model names one of them."""
    wrong = (1 - accuracy) / (classes - 1)
    first = torch.tensor([accuracy] + (classes - 1) * [wrong], dtype=torch.float64)
    both = copied * first.diag() + (1 - copied) * first[:, None] / classes  # (first's class, echo's)
    second = both.sum(0)
    different, independent = (1 - chances.trace() for chances in (both, first[:, None] * second))
    least = first[0] - second[0]
    place = (different - least) / (independent - least)
    return {"accuracy": second[0].item(), "different": different.item(), "place": place.item()}


def never_wrong_alike(accuracy, copied, classes):
    """Your independent models agree only where both are right. Two mistakes agree as well, one time in C -
    1."""
    echo = half_an_echo(accuracy, copied, classes)
    a, b = accuracy, echo["accuracy"]
    return echo | {"place": (echo["different"] - (a - b)) / (1 - a * b - (a - b))}


def from_no_disagreement(accuracy, copied, classes):
    """Your scale begins at no disagreement. Models of unequal accuracy *must* differ on a - b of the images:
    nested, 0, is there."""
    echo = half_an_echo(accuracy, copied, classes)
    a, b = accuracy, echo["accuracy"]
    return echo | {"place": echo["different"] / (1 - a * b - (1 - a) * (1 - b) / (classes - 1))}


# --- D3.5 ---


def images_needed(accuracy_a: float, accuracy_b: float, changed: float, z: float) -> int:
    """The number of images at which the gain is z standard errors, when both models see the same images."""
    gain = accuracy_a - accuracy_b
    return ceil(z**2 * (changed - gain**2) / gain**2)


def by_counting_up(accuracy_a: float, accuracy_b: float, changed: float, z: float) -> int:
    """The same: the spread of +1, 0 and -1, and the first number that is enough."""
    gain = abs(accuracy_a - accuracy_b)
    chances = {1: (changed + gain) / 2, 0: 1 - changed, -1: (changed - gain) / 2}
    spread = sum(chance * (value - gain) ** 2 for value, chance in chances.items())
    images = 1
    while gain < z * (spread / images) ** 0.5:
        images += 1
    return images


EXERCISES = (
    Exercise(
        "D3.1",
        subject="features",
        right=unbiased_cka,
        cases={
            "12 images": lambda: alike(12, 3, 4),
            "6 images, 20 features": lambda: alike(6, 20, 15, seed=4),
        },
        also_right=(from_four_images,),
        wrong={
            "That is the chapter's HSIC, centred and biased:"
            " an image's likeness to itself, large in every model,"
            " makes any two models alike. In HSIC₁ it occurs nowhere.": lambda x, y: ratio(x, y, biased),
            "The formula is right, and the diagonals are still there."
            " Set them to 0 in both tables before anything is summed.": lambda x, y: ratio(x, y, from_tables),
            "You emptied the diagonals and then centred with H, which fills them again. The"
            " last two terms of HSIC₁ do the centring.": lambda x, y: ratio(x, y, centred_without_diagonal),
            "The last term has the factor 2/(n - 2):"
            " rows of K and rows of L are both centred.": lambda x, y: ratio(x, y, one_in_place_of_two),
            "1ᵀK̃L̃1 is a matrix product: the row sums of one times the row sums of the other, not the"
            " sum over products of entries, which is the trace.": lambda x, y: ratio(x, y, entry_by_entry),
            "The root is missing in the denominator,"
            " so that the scale of the features counts.": lambda x, y: (
                hsic_1(x @ x.T, y @ y.T) / (hsic_1(x @ x.T, x @ x.T) * hsic_1(y @ y.T, y @ y.T))
            ),
        },
        see='What "the same features" should mean',
    ),
    Exercise(
        "D3.2",
        subject="features",
        right=cka_from_batches,
        cases={
            "batches of 10, 9 and 6": lambda: in_batches(4, 5, 10, 9, 6),
            "batches of 14 and 6": lambda: in_batches(3, 3, 14, 6, seed=50),
        },
        also_right=(batches_by_atlib,),
        wrong={
            "You averaged the batches' CKAs. Each HSIC is unbiased, a ratio"
            " of them is not: average the three of them, then divide once.": lambda xs, ys, hsic: (
                sum(len(x) * ratio(x, y, hsic) for x, y in zip(xs, ys)) / sum(map(len, xs))
            ),
            "You put all images into one table. That is a good estimate,"
            " too, but its table grows with the square of the images, which"
            " is what batches are to avoid.": lambda xs, ys, hsic: ratio(torch.cat(xs), torch.cat(ys), hsic),
            **told(batches_alike, root_in_a_batch),
        },
    ),
    Exercise(
        "D3.3",
        subject="maps",
        right=pair_heads,
        cases={
            "8 heads in another order": lambda: other_order(8, [3, 1, 4, 0, 7, 2, 6, 5]),
            "two heads want the same partner": rivals,
        },
        also_right=(by_trying_all,),
        wrong={
            "You found the pairing with the *largest* divergence. A divergence is a cost.": lambda a, b: (
                assigned(divergences(a, b), largest=True)
            ),
            "The mean is right, but the list is turned round:"
            " the task asks for the head of b for each head of a.": lambda a, b: (
                pair_heads(a, b) | {"partner": torch.tensor(pair_heads(a, b)["partner"]).argsort().tolist()}
            ),
            "You took the Jensen-Shannon *distance*, the root of the divergence,"
            " as scipy.spatial.distance.jensenshannon does. Square it before you"
            " average.": lambda a, b: assigned(divergences(a, b, lambda p, q: jensen_shannon(p, q).sqrt())),
            "That is the Kullback-Leibler divergence of a's rows from b's, which"
            " depends on the order of the two. Jensen-Shannon compares both with their"
            " mean.": lambda a, b: assigned(divergences(a, b, lambda p, q: (p * (p / q).log()).sum(-1))),
            **told(each_the_nearest, one_after_the_other, averaged_first),
        },
    ),
    Exercise(
        "D3.4",
        subject="predictions",
        right=half_an_echo,
        cases={
            "half, 8 classes": lambda: (0.96, 0.5, 8),
            "nine of ten, 5 classes": lambda: (0.7, 0.9, 5),
            "nothing copied": lambda: (0.8, 0.0, 8),
        },
        also_right=(echo_by_cases,),
        wrong={
            "You took every guess for a mistake. One of C guesses is right by luck: b is right"
            " on (1 - copied)/C of the images without knowing why.": lambda accuracy, copied, classes: placed(
                accuracy, copied * accuracy, (1 - copied) * (1 - 1 / classes), classes
            ),
            "You took the share that is not copied for the place. Guesses make b less accurate,"
            " and most of the disagreement is due to that alone.": lambda accuracy, copied, classes: (
                half_an_echo(accuracy, copied, classes) | {"place": 1 - copied}
            ),
            "You let every guess differ from a's answer."
            " Whatever a says, one of C guesses says the same.": lambda a, copied, classes: placed(
                a, copied * a + (1 - copied) / classes, 1 - copied, classes
            ),
            **told(never_wrong_alike, from_no_disagreement),
        },
        see="The same mistakes?",
    ),
    Exercise(
        "D3.5",
        subject="statistics",
        right=images_needed,
        cases={
            "half a point, 5 % changed": lambda: (0.965, 0.960, 0.05, 1.96),
            "three points, the second is better": lambda: (0.77, 0.80, 0.15, 2.58),
        },
        also_right=(by_counting_up,),
        wrong={
            "That is the spread of one model's accuracy, a (1 - a)."
            " The task asks for the spread of the *difference*, which"
            " is 0 wherever both are right or both are wrong.": lambda accuracy_a, accuracy_b, changed, z: (
                ceil(z**2 * accuracy_a * (1 - accuracy_a) / (accuracy_a - accuracy_b) ** 2)
            ),
            "You treated the two accuracies as measured on different images. On the same"
            " ones an image that both know, or neither, says nothing: the variance is changed"
            " - gain².": lambda a, b, changed, z: ceil(z**2 * (a * (1 - a) + b * (1 - b)) / (a - b) ** 2),
            "z has to be squared: the standard error falls with the root of n.": lambda a, b, changed, z: (
                ceil(z * (changed - (a - b) ** 2) / (a - b) ** 2)
            ),
            "A variance is the mean of squares minus the *square* of the mean:"
            " changed - gain².": lambda a, b, changed, z: ceil(z**2 * (changed - abs(a - b)) / (a - b) ** 2),
            "Rounded down, n is an image too small: the gain falls just short of z errors."
            " Round up.": lambda a, b, changed, z: floor(z**2 * (changed - (a - b) ** 2) / (a - b) ** 2),
        },
        see="The same mistakes?",
        rtol=0,
        atol=0.5,
    ),
)
