"""Tasks of assignment A3, The same, or just as good?: three variants of each, of which an edition has one."""

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import combinations, permutations

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from scipy.special import expit, logit
from torch import Tensor

from atbook.exercises.ch10 import biased, hsic_1
from atbook.exercises.ch11 import entropy
from atbook.exercises.inputs import maps, normal
from atbook.exercises.judging import Exercise, Wrong, checker
from atlib.analysis.cka import MinibatchCKA
from atlib.analysis.divergence import StreamingDivergence, jensen_shannon

# --- A3.1: (xs, ys, labels), lists of batches, to CKA ---

Batches = Sequence[Tensor]
Group = tuple[Tensor, Tensor, int]  # features of the same images in two models, and their class


def apart(xs: Batches, ys: Batches, labels: Batches) -> list[Group]:
    """The images of one class in one batch."""
    return [
        (x[kinds == c].double(), y[kinds == c].double(), c)
        for x, y, kinds in zip(xs, ys, labels)
        for c in kinds.unique().tolist()
    ]


def whole_batches(xs: Batches, ys: Batches, labels: Batches) -> list[Group]:
    """Wrong: classes are ignored."""
    return [(x, y, 0) for x, y in zip(xs, ys)]


def means_taken_out(xs: Batches, ys: Batches, labels: Batches) -> list[Group]:
    """Wrong: whole batches, minus the means of their classes."""
    less_means = []
    for x, y, kinds in zip(xs, ys, labels):
        same = (kinds[:, None] == kinds).double()
        same /= same.sum(1, keepdim=True)
        less_means.append((x - same @ x, y - same @ y, 0))
    return less_means


def put_together(xs: Batches, ys: Batches, labels: Batches) -> list[Group]:
    """Wrong: the images of one class in all batches."""
    return apart(*([torch.cat(list(batches))] for batches in (xs, ys, labels)))


def ratio(hsic: Callable[[int, int], Tensor]) -> Tensor:
    """CKA from HSICs of the models 0 and 1."""
    return hsic(0, 1) / (hsic(0, 0) * hsic(1, 1)).sqrt()


def by_images(of_group: int, of_class: int) -> float:
    """A group counts by its images."""
    return of_group


def by_classes(of_group: int, of_class: int) -> float:
    """A class counts 1, a group by its share in it."""
    return of_group / of_class


def all_alike(of_group: int, of_class: int) -> float:
    """A group counts 1."""
    return 1.0


def within(weigh: Callable = by_images, groups: Callable = apart, hsic: Callable = hsic_1) -> Callable:
    """CKA from a weighted mean of the groups' HSIC."""

    def cka_within(xs: Batches, ys: Batches, labels: Batches) -> Tensor:
        used = [group for group in groups(xs, ys, labels) if len(group[0]) >= 4]
        images = Counter()
        for x, _, c in used:
            images[c] += len(x)

        def mean(s: int, t: int) -> Tensor:
            tables = [(group[s] @ group[s].T, group[t] @ group[t].T) for group in used]
            weights = [weigh(len(group[0]), images[group[2]]) for group in used]
            return sum(w * hsic(K, L) for w, (K, L) in zip(weights, tables)) / sum(weights)

        return ratio(mean)

    return cka_within


def by_atlib(xs: Batches, ys: Batches, labels: Batches) -> float:
    """Groups as atlib's batches."""
    cka = MinibatchCKA()
    for x, y, _ in apart(xs, ys, labels):
        if len(x) >= 4:
            cka.update(x, y)
    return cka.value()


def class_by_class(xs: Batches, ys: Batches, labels: Batches) -> Tensor:
    """Classes alike, with a loop over them."""
    used = [group for group in apart(xs, ys, labels) if len(group[0]) >= 4]
    totals = torch.zeros(3, dtype=torch.float64)
    for c in {c for _, _, c in used}:
        of_class = [(x, y) for x, y, kind in used if kind == c]
        for at, (s, t) in enumerate(((0, 1), (0, 0), (1, 1))):
            parts = [len(g[0]) * hsic_1(g[s] @ g[s].T, g[t] @ g[t].T) for g in of_class]
            totals[at] += sum(parts) / sum(len(g[0]) for g in of_class)
    return totals[0] / (totals[1] * totals[2]).sqrt()


def mean_of_ratios(weigh: Callable) -> Callable:
    """Wrong: a CKA for every group, and the mean of them."""

    def cka_within(xs: Batches, ys: Batches, labels: Batches) -> Tensor:
        by_group = apart(xs, ys, labels)
        images = Counter()
        for x, _, c in by_group:
            images[c] += len(x)
        weights = [weigh(len(x), images[c]) for x, _, c in by_group]
        ratios = [within()([x], [y], [torch.zeros(len(x))]) for x, y, _ in by_group]
        return sum(w * r for w, r in zip(weights, ratios)) / sum(weights)

    return cka_within


def covariance(group: Group, s: int, t: int, less: int = 1) -> Tensor:
    """The covariance of the features of two models in a group, divided by the number of its images minus
    `less`."""
    x, y = (group[k] - group[k].mean(0) for k in (s, t))
    return x.T @ y / (len(x) - less)


def across(
    weigh: Callable = by_images,
    groups: Callable = apart,
    less: int = 1,
    counted: Callable[[int, Group, int, Group], bool] = lambda i, g, j, h: i != j,
) -> Callable:
    """CKA from products of the covariances of two groups, for all pairs of groups that are counted."""

    def cka_within(xs: Batches, ys: Batches, labels: Batches) -> Tensor:
        numbered = list(enumerate(g for g in groups(xs, ys, labels) if len(g[0]) >= 2))

        def mean(s: int, t: int) -> Tensor:
            covariances = [covariance(g, s, t, less) for _, g in numbered]
            weight = [weigh(len(g[0]), 1) for _, g in numbered]
            chosen = [(i, j) for i, g in numbered for j, h in numbered if counted(i, g, j, h)]
            total = sum(weight[i] * weight[j] * (covariances[i] * covariances[j]).sum() for i, j in chosen)
            return total / sum(weight[i] * weight[j] for i, j in chosen)

        return ratio(mean)

    return cka_within


def all_less_own(xs: Batches, ys: Batches, labels: Batches) -> Tensor:
    """The same as the square of a sum minus the squares."""
    used = [g for g in apart(xs, ys, labels) if len(g[0]) >= 2]
    n = torch.tensor([len(g[0]) for g in used], dtype=torch.float64)

    def mean(s: int, t: int) -> Tensor:
        parts = torch.stack([covariance(g, s, t) for g in used]) * n[:, None, None]
        return (parts.sum(0).square().sum() - parts.square().sum()) / (n.sum() ** 2 - n.square().sum())

    return ratio(mean)


def batches(*counts: tuple[int, ...], seed: int = 0) -> Callable[[], tuple]:
    """Features (n, 5) and (n, 4) that share something, and labels; `counts`: images of each class, a tuple a
    batch. Every class has means and a spread of its own."""

    def make() -> tuple:
        shared, width = normal(3, 5, seed=seed + 90), normal(3, 4, seed=seed + 91)
        centre = 3 * normal(len(counts[0]), 9, seed=seed + 92)
        spread = 2 * normal(len(counts[0]), 3, seed=seed + 93).exp()
        xs, ys, labels = [], [], []
        for at, of_classes in enumerate(counts):
            kinds = torch.arange(len(of_classes)).repeat_interleave(torch.tensor(of_classes))
            kinds = kinds[torch.randperm(len(kinds), generator=torch.Generator().manual_seed(seed + at))]
            known = normal(len(kinds), 3, seed=seed + 10 + at) * spread[kinds]
            noise = 0.8 * normal(len(kinds), 9, seed=seed + 20 + at) + centre[kinds]
            xs.append(known @ shared + noise[:, :5])
            ys.append(known @ width + noise[:, 5:])
            labels.append(3 * kinds + 2)
        return xs, ys, labels

    return make


MILD = {
    "equal groups": batches((6, 6), (6, 6)),
    "unequal groups": batches((12, 4, 5), (4, 5, 14), (4, 9, 0), seed=5),
}
CLASSES = (
    "The classes are ignored, and most of this likeness is that of their means. A group is the images of one"
    " class in one batch."
)
TOGETHER = (
    "The batches were put together. Batches come one by one, and the sum of their estimates is all that may"
    " be kept."
)
RATIOS = (
    "You took a CKA in every group, and then a mean. A ratio of unbiased estimates is biased: each HSIC is"
    " averaged first, and the ratio comes last, once."
)
GROUPS_ALIKE = "Every group counts alike here, one of 4 images as much as one of 12."

# --- A3.2: maps of two models' layers to their alignment ---

Model = Sequence[Tensor]
Pairs = list[tuple[int, int]]


def one_to_one(heads: Tensor) -> Tensor:
    """The mean divergence of heads that are paired one to one."""
    return heads[linear_sum_assignment(heads.numpy())].mean()


def nearest_heads(heads: Tensor) -> Tensor:
    """Wrong: a head may serve twice."""
    return heads.amin(1).mean()


def numbered_heads(heads: Tensor) -> Tensor:
    """Wrong: head h with head h."""
    return heads.diagonal().mean()


def tried_heads(heads: Tensor) -> Tensor:
    """The same as one to one, by trying all ways."""
    if heads.shape[0] > heads.shape[1]:
        heads = heads.T
    ways = permutations(range(heads.shape[1]), len(heads))
    return min(heads[range(len(heads)), way].mean() for way in ways)


def between(p: Tensor, q: Tensor) -> Tensor:
    """The divergence of every head of one layer from every head of another, mean over images and queries."""
    p, q = p[:, :, None], q[:, None]
    by_row = entropy((p + q) / 2) - (entropy(p) + entropy(q)) / 2
    return by_row.mean((0, 3))


def by_streaming(p: Tensor, q: Tensor) -> Tensor:
    """The same, by atlib."""
    stream = StreamingDivergence()
    stream.update(p, q)
    return stream.matrix()


def averaged(p: Tensor, q: Tensor) -> Tensor:
    """Wrong: maps are averaged over heads first."""
    return jensen_shannon(p.mean(1), q.mean(1)).mean()[None, None]


def table(a: Model, b: Model, pair: Callable = one_to_one, compare: Callable = between) -> Tensor:
    """The divergence of every layer of a from every layer of b."""
    return torch.stack([torch.stack([pair(compare(p, q)) for q in b]) for p in a])


def in_order(rows: int, columns: int) -> list[Pairs]:
    """Every way to give each of the fewer layers a partner of its own, in order."""
    if rows <= columns:
        return [list(enumerate(chosen)) for chosen in combinations(range(columns), rows)]
    return [[(i, j) for j, i in enumerate(chosen)] for chosen in combinations(range(rows), columns)]


def mean_of(cost: Tensor, pairs: Pairs) -> Tensor:
    """The mean over pairs of layers."""
    return torch.stack([cost[pair] for pair in pairs]).mean()


def told(cost: Tensor, pairs: Pairs) -> dict:
    """An alignment, as it is asked for."""
    return {"divergence": mean_of(cost, pairs).item(), "pairs": pairs}


def tried(cost: Tensor) -> Pairs:
    """The best of all ways in order."""
    return min(in_order(*cost.shape), key=lambda pairs: mean_of(cost, pairs))


def grown(cost: Tensor) -> Pairs:
    """The same, layer by layer."""
    if cost.shape[0] > cost.shape[1]:
        return [(i, j) for j, i in grown(cost.T)]
    best = {j: (0.0, []) for j in range(cost.shape[1] + 1)}  # {columns used or passed: (sum, pairs)}
    for i in range(len(cost)):
        after = {}
        for j in range(i, cost.shape[1]):
            ways = [after[j]] if j in after else []
            if j in best:
                ways.append((best[j][0] + cost[i, j].item(), [*best[j][1], (i, j)]))
            after[j + 1] = min(ways)
        best = after
    return min(best.values())[1]


def nearest_layers(cost: Tensor) -> Pairs:
    """Wrong: a layer of b may serve twice."""
    return list(enumerate(cost.argmin(1).tolist()))


def any_order(cost: Tensor) -> Pairs:
    """Wrong: one to one, in any order."""
    return [(int(i), int(j)) for i, j in zip(*linear_sum_assignment(cost.numpy()))]


def greedy(cost: Tensor) -> Pairs:
    """Wrong: each takes the nearest of those that are left, one after the other."""
    pairs, first = [], 0
    for i, row in enumerate(cost):
        last = cost.shape[1] - (len(cost) - i) + 1  # leave enough for the others
        first += int(row[first:last].argmin()) + 1
        pairs.append((i, first - 1))
    return pairs


def same_number(cost: Tensor) -> Pairs:
    """Wrong: layer i with layer i."""
    return [(i, i) for i in range(min(cost.shape))]


def aligned(choose: Callable, of_table: Callable = table, **options) -> Callable:
    """(a, b) to an alignment."""

    def align(a: Model, b: Model) -> dict:
        cost = of_table(a, b, **options)
        return told(cost, choose(cost))

    return align


def summed(a: Model, b: Model) -> dict:
    """The pairs are right; their divergences were added. The task asks for the mean."""
    alignment = aligned(tried)(a, b)
    return alignment | {"divergence": alignment["divergence"] * len(alignment["pairs"])}


def some_in_order(cost: Tensor) -> list[Pairs]:
    """Every way to pair none, some or all layers in order."""
    rows, columns = map(range, cost.shape)
    return [
        list(zip(i, j))
        for many in range(min(cost.shape) + 1)
        for i in combinations(rows, many)
        for j in combinations(columns, many)
    ]


def priced(cost: Tensor, pairs: Pairs, price: float) -> float:
    """The divergences of pairs, and a price for every layer of both models that has no partner."""
    return sum(cost[pair].item() for pair in pairs) + price * (sum(cost.shape) - 2 * len(pairs))


def bill(cost: Tensor, pairs: Pairs, price: float) -> dict:
    """An alignment, as it is asked for."""
    return {"cost": priced(cost, pairs, price), "pairs": pairs}


def tried_at_a_price(cost: Tensor, price: float) -> Pairs:
    """The best of all ways in order."""
    return min(some_in_order(cost), key=lambda pairs: priced(cost, pairs, price))


def edited(cost: Tensor, price: float) -> Pairs:
    """The same as the distance between two words: the cheapest way to edit one into the other."""
    rows, columns = cost.shape
    best: dict[tuple[int, int], tuple[float, Pairs]] = {}
    for i in range(rows + 1):
        for j in range(columns + 1):
            ways = [] if i or j else [(0.0, [])]
            if i:
                ways.append((best[i - 1, j][0] + price, best[i - 1, j][1]))
            if j:
                ways.append((best[i, j - 1][0] + price, best[i, j - 1][1]))
            if i and j:
                before, pairs = best[i - 1, j - 1]
                ways.append((before + cost[i - 1, j - 1].item(), [*pairs, (i - 1, j - 1)]))
            best[i, j] = min(ways)
    return best[rows, columns][1]


def worth_it(cost: Tensor, price: float, choose: Callable) -> Pairs:
    """The pairs that are chosen, without those that cost more than two layers without a partner."""
    return [pair for pair in choose(cost) if cost[pair] < 2 * price]


def any_order_at_a_price(cost: Tensor, price: float) -> Pairs:
    """Wrong: in any order."""
    return worth_it((cost - 2 * price).clamp(max=0), 0.0, any_order)


def aligned_at_a_price(choose: Callable, said: Callable = bill, **options) -> Callable:
    """(a, b, price) to an alignment."""

    def align(a: Model, b: Model, price: float) -> dict:
        cost = table(a, b, **options)
        return said(cost, choose(cost, price), price)

    return align


def one_sided(a: Model, b: Model, price: float) -> dict:
    """Only layers of a that stay alone were paid for. Those of b cost as much."""
    cost = table(a, b)

    def total(pairs: Pairs) -> float:
        return sum(cost[pair].item() for pair in pairs) + price * (len(a) - len(pairs))

    best = min(some_in_order(cost), key=total)
    return {"cost": total(best), "pairs": best}


def worst_of(cost: Tensor, pairs: Pairs) -> float:
    """The largest divergence of a pair."""
    return max(cost[pair].item() for pair in pairs)


def least_worst(pair: Callable = one_to_one, compare: Callable = between) -> Callable:
    """The least that the worst pair can be, of all ways in order."""

    def align(a: Model, b: Model) -> float:
        cost = table(a, b, pair, compare)
        return min(worst_of(cost, pairs) for pairs in in_order(*cost.shape))

    return align


def raised(a: Model, b: Model) -> float:
    """The same: a bound is raised until every layer finds a partner below it."""
    cost = table(a, b, tried_heads)
    cost = cost if cost.shape[0] <= cost.shape[1] else cost.T
    for bound in sorted(cost.flatten().tolist()):
        first = 0
        for row in cost:
            fits = [j for j in range(first, cost.shape[1]) if row[j] <= bound]
            first = fits[0] + 1 if fits else None
            if first is None:
                break
        else:
            return bound
    raise AssertionError("no bound lets every layer find a partner")


def worst_in_any_order(a: Model, b: Model) -> float:
    """Wrong: one to one, in any order."""
    cost = table(a, b)
    ways = permutations(range(len(b)), len(a))
    return min(worst_of(cost, list(enumerate(way))) for way in ways)


def worst_by(choose: Callable) -> Callable:
    """Wrong: the worst pair of an alignment that was chosen in another way."""

    def align(a: Model, b: Model) -> float:
        cost = table(a, b)
        return worst_of(cost, choose(cost))

    return align


def models(depth: int, *near: dict[int, float], heads: int = 3, seed: int = 0) -> tuple[list, list]:
    """Maps of `depth` layers, and of one layer for each of `near`, {layer that it is like: how much}, with
    heads in another order."""
    a = [maps(2, heads, 5, 5, seed=seed + layer) for layer in range(depth)]
    b = []
    for at, like in enumerate(near):
        mixed = maps(2, heads, 5, 5, seed=seed + 50 + at)
        for layer, weight in like.items():
            mixed = mixed + weight * (a[layer] - mixed)
        mixed[:, -1] = maps(2, 5, 5, seed=seed + 70 + at)  # whose likeness in a has to look elsewhere
        b.append(mixed.roll(at + 1, dims=1))
    return a, b


# With these numbers every mistake below has another result.
TWO = {1: 0.4}, {0: 0.4}, {1: 0.5, 0: 0.5}, {}
THREE = {1: 0.2}, {1: 0.6}, {2: 0.8, 1: 0.3}, {0: 0.4}, {2: 0.5, 0: 0.5}
HEADS_SHARED = (
    "Two heads of one layer share a partner. Pair heads one to one, so that their mean is least"
    " (`linear_sum_assignment`)."
)
HEADS_NUMBERED = (
    "Head h was compared with head h. Which head is which is each model's own choice: pair them one to one,"
    " so that their mean is least."
)
AVERAGED = "Maps were averaged over heads, and then compared. Compare heads, and pair them."
MANY = (
    "Two layers share a partner. A layer has at most one: with b's one good layer for all of them, any model"
    " looks like any other."
)
ORDER = (
    "The layers' pairs cross. If layer i goes with j, a later layer than i has to go with a later one than j."
)
GREEDY = (
    "Each layer took the nearest that was left. An early one may have to do with its second choice, so that"
    " a later one finds a partner at all."
)

# --- A3.3: accuracies of a pool to effective robustness with its interval ---

Numbers = Sequence[float]


def above_chance(accuracy: float | np.ndarray, classes: int) -> float | np.ndarray:
    """The accuracy scaled so that guessing is 0 and a perfect model 1."""
    return (accuracy - 1 / classes) / (1 - 1 / classes)


def with_guesses(share: np.ndarray, classes: int) -> np.ndarray:
    """The accuracy that has this share above chance."""
    return 1 / classes + (1 - 1 / classes) * share


def nothing(accuracy: float | np.ndarray, classes: int) -> float | np.ndarray:
    """Wrong: not corrected."""
    return accuracy


def expected_at(place: float, x: np.ndarray, y: np.ndarray) -> float:
    """The logit that a line through a pool expects at a place."""
    by_x = x - x.mean()
    return y.mean() + by_x @ y / (by_x @ by_x) * (place - x.mean())


def read_backwards(place: float, x: np.ndarray, y: np.ndarray) -> float:
    """Wrong: axes exchanged."""
    by_y = y - y.mean()
    return y.mean() + (by_y @ by_y) / (by_y @ x) * (place - x.mean())


def drawn(many: int, samples: int, seed: int) -> list[list[int]]:
    """The samples, as the task says that they are drawn."""
    return torch.randint(many, (samples, many), generator=torch.Generator().manual_seed(seed)).tolist()


def ends(values: Numbers, level: float = 0.95) -> dict[str, float]:
    """The percentile interval."""
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
    return {"low": low.item(), "high": high.item()}


def robust(
    *,
    out: Callable[[int, list[int]], bool] = lambda i, asked: i in asked,
    first: Callable = above_chance,
    second: Callable = above_chance,
    back: Callable = with_guesses,
    expect: Callable = expected_at,
    kept: Callable = lambda x, y: x > 0 and y > 0,
    clip: float = 0.0,
    units: float = 100.0,
    level: float = 0.95,
    logits: bool = False,
) -> Callable[..., tuple[int, list[float], list[list[float]], float]]:
    """A function of (groups of (ordinary, shifted), asked, classes, samples, seed) that returns the number of
    members, the points of the models asked about, their points in every sample, and the interval's level. The
    groups `asked` are not in the pool. The options make mistakes."""

    def judge(groups: Sequence, asked: list[int], classes: int, samples: int, seed: int) -> tuple:
        corrected = [[(first(a, classes), second(b, classes)) for a, b in group] for group in groups]
        pool = [group for i, group in enumerate(corrected) if not out(i, asked)]
        if clip:
            pool = [[tuple(np.clip(pair, clip, 1 - clip)) for pair in group] for group in pool]
        pool = [[pair for pair in group if kept(*pair)] for group in pool]
        pool = [logit(np.array(group)) for group in pool if group]

        def points(members: list) -> list[float]:
            x, y = np.concatenate(members).T
            points_of = []
            for i in asked:
                by_seed = []
                for place, observed in corrected[i]:
                    line = expect(logit(place), x, y)
                    if logits:
                        by_seed.append(logit(observed) - line)
                    else:
                        by_seed.append(units * (back(observed, classes) - back(expit(line), classes)))
                points_of.append(float(np.mean(by_seed)))
            return points_of

        resampled = []
        for sample in drawn(len(pool), samples, seed):
            members = [pool[i] for i in sample]
            if np.ptp(np.concatenate(members)[:, 0]) > 0:
                resampled.append(points(members))
        return sum(map(len, pool)), points(pool), resampled, level

    return judge


def alone(judge: Callable) -> Callable:
    """A model of the pool, judged by the others."""

    def robustness(
        ordinary: Numbers, shifted: Numbers, model: int, classes: int, samples: int, seed: int
    ) -> dict:
        groups = [[pair] for pair in zip(ordinary, shifted)]
        members, (points,), samples_of, level = judge(groups, [model], classes, samples, seed)
        return {"members": members, "points": points} | ends([value for (value,) in samples_of], level)

    return robustness


def by_torch(
    ordinary: Numbers, shifted: Numbers, model: int, classes: int, samples: int, seed: int
) -> dict[str, float]:
    """The same, all samples at once."""
    both = torch.tensor([list(ordinary), list(shifted)], dtype=torch.float64)
    corrected = (both * classes - 1) / (classes - 1)
    use = (corrected > 0).all(0)
    use[model] = False
    x, y = corrected[:, use].logit()
    chosen = torch.randint(len(x), (samples, len(x)), generator=torch.Generator().manual_seed(seed))
    chosen = torch.cat([torch.arange(len(x))[None], chosen])
    x, y = x[chosen], y[chosen]
    has_line = x.amax(1) > x.amin(1)
    x, y = x[has_line], y[has_line]
    by_x = x - x.mean(1, keepdim=True)
    slope = (by_x * y).sum(1) / by_x.square().sum(1)
    line = y.mean(1) + slope * (corrected[0, model].logit() - x.mean(1))
    points = 100 * (both[1, model] - (1 + (classes - 1) * line.sigmoid()) / classes)
    low, high = torch.quantile(points[1:], torch.tensor([0.025, 0.975], dtype=torch.float64))
    return {"members": x.shape[1], "points": points[0].item(), "low": low.item(), "high": high.item()}


def two(judge: Callable, difference: Callable = lambda a, b: a - b) -> Callable:
    """How much more robust one model is than another, neither in the pool."""

    def robustness(
        ordinary: Numbers, shifted: Numbers, pair: tuple[int, int], classes: int, samples: int, seed: int
    ) -> dict:
        groups = [[accuracies] for accuracies in zip(ordinary, shifted)]
        members, points, samples_of, level = judge(groups, list(pair), classes, samples, seed)
        differences = [difference(*sample) for sample in samples_of]
        return {"members": members, "points": difference(*points)} | ends(differences, level)

    return robustness


def less_expected(
    ordinary: Numbers, shifted: Numbers, pair: tuple[int, int], classes: int, samples: int, seed: int
) -> dict[str, float]:
    """The same: what was found to differ, less what was expected to."""
    rest = [k for k in range(len(ordinary)) if k not in pair]
    rest = [k for k in rest if min(ordinary[k], shifted[k]) > 1 / classes]
    x, y = (
        np.array([np.log((classes * accuracies[k] - 1) / (classes * (1 - accuracies[k]))) for k in rest])
        for accuracies in (ordinary, shifted)
    )
    observed = 100 * (shifted[pair[0]] - shifted[pair[1]])
    places = [np.log((classes * ordinary[k] - 1) / (classes * (1 - ordinary[k]))) for k in pair]

    def points(at: Sequence[int]) -> float:
        slope, intercept = np.polyfit(x[at], y[at], 1)
        first, second = (1 / (1 + np.exp(-intercept - slope * place)) for place in places)
        return observed - 100 * (1 - 1 / classes) * (first - second)

    values = [points(at) for at in drawn(len(rest), samples, seed) if np.ptp(x[at]) > 0]
    return {"members": len(rest), "points": points(range(len(rest)))} | ends(values)


def other_samples(
    ordinary: Numbers, shifted: Numbers, pair: tuple[int, int], classes: int, samples: int, seed: int
) -> dict:
    """The ends of two intervals were subtracted. One sample of the pool moves the line for both: take the
    difference in every sample, and then its quantiles."""
    groups = [[accuracies] for accuracies in zip(ordinary, shifted)]
    members, points, samples_of, _ = robust()(groups, list(pair), classes, samples, seed)
    first, second = (ends([sample[k] for sample in samples_of]) for k in (0, 1))
    return {
        "members": members,
        "points": points[0] - points[1],
        "low": first["low"] - second["high"],
        "high": first["high"] - second["low"],
    }


def family(judge: Callable) -> Callable:
    """A method of several seeds, judged by other methods; samples are drawn of whole methods."""

    def robustness(
        ordinary: Sequence[Numbers],
        shifted: Sequence[Numbers],
        model: int,
        classes: int,
        samples: int,
        seed: int,
    ) -> dict:
        groups = [list(zip(*seeds)) for seeds in zip(ordinary, shifted)]
        members, (points,), samples_of, level = judge(groups, [model], classes, samples, seed)
        return {"members": members, "points": points} | ends([value for (value,) in samples_of], level)

    return robustness


def seeds_drawn(
    ordinary: Sequence[Numbers], shifted: Sequence[Numbers], model: int, classes: int, samples: int, seed: int
) -> dict:
    """The points are right; seeds were drawn. Seeds of one method are alike, and their number would make the
    interval too narrow: draw whole methods."""
    groups = [list(zip(*seeds)) for seeds in zip(ordinary, shifted)]
    flat = [groups[model], *([pair] for i, group in enumerate(groups) if i != model for pair in group)]
    members, (points,), samples_of = robust()(flat, [0], classes, samples, seed)
    return {"members": members, "points": points} | ends([value for (value,) in samples_of])


def own_seeds_stay(
    ordinary: Sequence[Numbers], shifted: Sequence[Numbers], model: int, classes: int, samples: int, seed: int
) -> dict:
    """A seed was judged by the other seeds of its method. Leave the method out."""
    groups = [list(zip(*seeds)) for seeds in zip(ordinary, shifted)]
    judged = []
    for at, pair in enumerate(groups[model]):
        left = [other_pair for k, other_pair in enumerate(groups[model]) if k != at]
        other_methods = [group for i, group in enumerate(groups) if i != model]
        judged.append(robust()([[pair], left, *other_methods], [0], classes, samples, seed))
    means = [float(np.mean(parts)) for parts in zip(*([e for (e,) in f[2]] for f in judged))]
    return {"members": judged[0][0], "points": float(np.mean([f[1][0] for f in judged]))} | ends(means)


def family_by_weights(
    ordinary: Sequence[Numbers], shifted: Sequence[Numbers], model: int, classes: int, samples: int, seed: int
) -> dict[str, float]:
    """The same: a method that is drawn twice weighs twice."""
    members = [
        (i, logit(above_chance(a, classes)), logit(above_chance(b, classes)))
        for i, group in enumerate(zip(ordinary, shifted))
        for a, b in zip(*group)
        if i != model and min(a, b) > 1 / classes
    ]
    names = sorted({i for i, _, _ in members})
    method, x, y = (np.array(column) for column in zip(*members))
    judged = [np.array(accuracies[model]) for accuracies in (ordinary, shifted)]

    def points(times: np.ndarray) -> float:
        slope, intercept = np.polyfit(x, y, 1, w=np.sqrt(times))
        line = intercept + slope * logit(above_chance(judged[0], classes))
        return float(100 * (judged[1] - with_guesses(expit(line), classes)).mean())

    values = []
    for sample in drawn(len(names), samples, seed):
        times = np.array([sample.count(names.index(i)) for i in method])
        if np.ptp(x[times > 0]) > 0:
            values.append(points(times))
    return {"members": len(method), "points": points(np.ones(len(method)))} | ends(values)


def with_itself(i: int, asked: list[int]) -> bool:
    """Wrong: no model is left out."""
    return False


def mistakes(ask: Callable) -> dict[str, Wrong]:
    """What can go wrong in all three variants."""
    return {
        "itself in the pool": Wrong(
            ask(robust(out=with_itself)),
            "The model that is judged helps to draw the line, and pulls it. Fit it to the others alone.",
        ),
        "not corrected": Wrong(
            ask(robust(first=nothing, second=nothing, back=nothing)),
            "The logits are those of the accuracies as they are. Take chance out first, so that guessing is"
            " at 0: (a − 1/C) / (1 − 1/C).",
        ),
        "one axis": Wrong(
            ask(robust(first=nothing)),
            "Only the shifted accuracies were corrected for chance. Both axes are.",
        ),
        "axes exchanged": Wrong(
            ask(robust(expect=read_backwards)),
            "The line was fitted to predict the ordinary accuracy from the shifted one. Least squares is not"
            " symmetric: fit the shifted logit by the ordinary one.",
        ),
        "corrected shares": Wrong(
            ask(robust(back=nothing)),
            "These are points of the corrected share. Bring what is expected back to an accuracy, guesses"
            " included, and subtract accuracies.",
        ),
        "left in logits": Wrong(
            ask(robust(logits=True)), "The difference was taken on the logit axis. The task asks for points."
        ),
        "shares": Wrong(
            ask(robust(units=1.0)),
            "These are shares, from 0 to 1. The task asks for points: 100 times as much.",
        ),
        "90 %": Wrong(
            ask(robust(level=0.9)),
            "The points are right; the interval holds 90 % of the samples. The task asks for the quantiles"
            " 0.025 and 0.975.",
        ),
    }


ORDINARY = [0.45, 0.5, 0.62, 0.71, 0.78, 0.83, 0.86, 0.9, 0.93]
SHIFTED = [0.31, 0.33, 0.36, 0.5, 0.49, 0.61, 0.7, 0.66, 0.81]
FAMILIES = (
    [[0.52, 0.55], [0.64, 0.61, 0.67], [0.8, 0.83], [0.91, 0.9, 0.93], [0.75, 0.7]],
    [[0.3, 0.36], [0.35, 0.39, 0.44], [0.6, 0.57], [0.72, 0.78, 0.7], [0.58, 0.47]],
)


def task(number: str, title: str, stars: int, minutes: int, **parts) -> Exercise:
    """A variant of a task."""
    return Exercise(f"A3.{number}", title, stars, minutes, "assignment A3", **parts)


EXERCISES = (
    task(
        "1a",
        "CKA within classes, where images count alike",
        2,
        50,
        right=within(),
        also_right=(by_atlib,),
        cases=MILD,
        wrong={
            "classes ignored": Wrong(within(groups=whole_batches), CLASSES),
            "means taken out": Wrong(
                within(groups=means_taken_out),
                "The classes' means were taken out of a batch, and the formula used on the batch. It is"
                " unbiased for images of which none had a part in another's features: use it on each class"
                " by itself.",
            ),
            "put together": Wrong(within(groups=put_together), TOGETHER),
            "groups alike": Wrong(within(all_alike), GROUPS_ALIKE + " Weigh by images."),
            "classes alike": Wrong(
                within(by_classes), "Every class counts alike here. It is images that do."
            ),
            "mean of ratios": Wrong(mean_of_ratios(by_images), RATIOS),
            "biased": Wrong(
                within(hsic=biased), "That is from the chapter's biased HSIC. Take HSIC₁ of exercise 10.1."
            ),
        },
    ),
    task(
        "1b",
        "CKA within classes, where classes count alike",
        2,
        50,
        right=within(by_classes),
        also_right=(class_by_class,),
        cases=MILD,
        wrong={
            "classes ignored": Wrong(within(by_classes, whole_batches), CLASSES),
            "put together": Wrong(within(by_classes, put_together), TOGETHER),
            "groups alike": Wrong(within(all_alike), GROUPS_ALIKE + " Weigh by images within a class."),
            "images alike": Wrong(
                within(), "Every image counts alike here, so that large classes rule. It is classes that do."
            ),
            "mean of ratios": Wrong(mean_of_ratios(by_classes), RATIOS),
            "biased": Wrong(
                within(by_classes, hsic=biased),
                "That is from the chapter's biased HSIC. Take HSIC₁ of exercise 10.1.",
            ),
        },
    ),
    task(
        "1c",
        "CKA within classes, from pairs of groups",
        2,
        50,
        right=across(),
        also_right=(all_less_own,),
        cases=MILD,
        wrong={
            "classes ignored": Wrong(across(groups=whole_batches), CLASSES),
            "put together": Wrong(across(groups=put_together), TOGETHER),
            "groups alike": Wrong(across(all_alike), GROUPS_ALIKE + " Weigh both groups by their images."),
            "with itself": Wrong(
                across(counted=lambda *pair: True),
                "A group was multiplied with itself, too. Then chance does not cancel: only pairs of"
                " *different* groups are free of bias.",
            ),
            "divided by n": Wrong(
                across(less=0),
                "The covariances were divided by n. They are taken about the group's own mean: n − 1.",
            ),
            "one class at a time": Wrong(
                across(counted=lambda i, g, j, h: i != j and g[2] == h[2]),
                "Only pairs of the same class were counted. All pairs of different groups are.",
            ),
        },
    ),
    task(
        "2a",
        "Layers in order, each with its own partner",
        3,
        60,
        right=aligned(tried),
        also_right=(aligned(grown, pair=tried_heads, compare=by_streaming),),
        cases={
            "2 layers and 4": lambda: models(2, *TWO, seed=373),
            "3 layers and 5": lambda: models(3, *THREE, seed=12),
        },
        wrong={
            "many to one": Wrong(aligned(nearest_layers), MANY),
            "any order": Wrong(aligned(any_order), ORDER),
            "greedy": Wrong(aligned(greedy), GREEDY),
            "by number": Wrong(
                aligned(same_number), "Layer i was paired with layer i. Look for the partners."
            ),
            "heads shared": Wrong(aligned(tried, pair=nearest_heads), HEADS_SHARED),
            "heads numbered": Wrong(aligned(tried, pair=numbered_heads), HEADS_NUMBERED),
            "averaged": Wrong(aligned(tried, compare=averaged), AVERAGED),
            "summed": Wrong(summed),
        },
    ),
    task(
        "2b",
        "Layers in order, at a price",
        3,
        60,
        right=aligned_at_a_price(edited),
        also_right=(aligned_at_a_price(tried_at_a_price, pair=tried_heads),),
        cases={
            "2 layers and 4": lambda: (*models(2, *TWO, seed=373), 0.08),
            "3 layers and 5": lambda: (*models(3, *THREE, seed=12), 0.07),
        },
        wrong={
            "many to one": Wrong(
                aligned_at_a_price(lambda cost, price: worth_it(cost, price, nearest_layers)), MANY
            ),
            "any order": Wrong(aligned_at_a_price(any_order_at_a_price), ORDER),
            "everybody": Wrong(
                aligned_at_a_price(lambda cost, price: tried(cost)),
                "As many layers as possible were paired. Two that have nothing in common stay alone where"
                " their divergence is more than two prices.",
            ),
            "one-sided": Wrong(one_sided),
            "heads shared": Wrong(aligned_at_a_price(edited, pair=nearest_heads), HEADS_SHARED),
            "heads numbered": Wrong(aligned_at_a_price(edited, pair=numbered_heads), HEADS_NUMBERED),
            "averaged": Wrong(aligned_at_a_price(edited, compare=averaged), AVERAGED),
        },
    ),
    task(
        "2c",
        "Layers in order, by their worst pair",
        3,
        60,
        right=least_worst(),
        also_right=(raised,),
        cases={
            "2 layers and 4": lambda: models(2, *TWO, seed=373),
            "3 layers and 5": lambda: models(3, *THREE, seed=12),
        },
        wrong={
            "many to one": Wrong(worst_by(nearest_layers), MANY),
            "any order": Wrong(worst_in_any_order, ORDER),
            "greedy": Wrong(worst_by(greedy), GREEDY),
            "of the best mean": Wrong(
                worst_by(tried),
                "That is the worst pair of the alignment whose mean is least. A different alignment has a"
                " better worst pair.",
            ),
            "heads shared": Wrong(least_worst(nearest_heads), HEADS_SHARED),
            "heads numbered": Wrong(least_worst(numbered_heads), HEADS_NUMBERED),
            "averaged": Wrong(least_worst(compare=averaged), AVERAGED),
        },
    ),
    task(
        "3a",
        "Effective robustness of a model outside its pool",
        3,
        60,
        right=alone(robust()),
        also_right=(by_torch,),
        cases={
            "8 classes": lambda: (ORDINARY, SHIFTED, 3, 8, 40, 1),
            "4 classes": lambda: (ORDINARY[::-1], SHIFTED[::-1], 0, 4, 60, 2),
        },
        wrong=mistakes(alone),
    ),
    task(
        "3b",
        "How much more robust one model is than another",
        3,
        60,
        right=two(robust()),
        also_right=(less_expected,),
        cases={
            "8 classes": lambda: (ORDINARY, SHIFTED, (6, 2), 8, 40, 1),
            "4 classes": lambda: (ORDINARY[::-1], SHIFTED[::-1], (0, 4), 4, 60, 2),
        },
        wrong=mistakes(two)
        | {
            "turned": Wrong(
                two(robust(), lambda a, b: b - a),
                "The sign is turned: the task asks how much more robust the first is than the second.",
            ),
            "one outside": Wrong(
                two(robust(out=lambda i, asked: i == asked[0])),
                "The second model is still in the pool that it is judged by. Leave both out.",
            ),
            "two intervals": Wrong(other_samples),
        },
    ),
    task(
        "3c",
        "Effective robustness where methods have seeds",
        3,
        60,
        right=family(robust()),
        also_right=(family_by_weights,),
        cases={"8 classes": lambda: (*FAMILIES, 1, 8, 40, 1), "4 classes": lambda: (*FAMILIES, 3, 4, 60, 2)},
        wrong=mistakes(family) | {"seeds drawn": Wrong(seeds_drawn), "own seeds stay": Wrong(own_seeds_stay)},
    ),
)

check = checker(EXERCISES)
