"""What the hidden tests of A3 ask; `course/a3/master.md` gives each its points."""

from itertools import combinations, permutations
from math import exp, log, sqrt

import torch
from torch import Tensor

from course import hidden
from course.hidden import Asked


def number(value, what: str) -> float:
    """A number that an answer returned, as Python's own."""
    if isinstance(value, bool) or not isinstance(value, (int, float, Tensor)):
        raise AssertionError(f"{what}: expected a number, got {type(value).__name__}")
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise AssertionError(f"{what}: expected a number, got {type(value).__name__}") from None


def same_number(got, want: float, what: str, tolerance: float = 1e-6) -> None:
    """A number is as it must be."""
    hidden.same(torch.tensor(number(got, what), dtype=torch.float64), torch.tensor(want), what, tolerance)


def entry(got, key: str):
    """The value that an answer's dict has under a key."""
    if type(got) is not dict or key not in got:
        raise AssertionError(f"expected a dict with {key!r}")
    return got[key]


# --- Task 1: unbiased CKA within classes ---


def features(seed: int, sizes: list[dict[int, int]]) -> tuple[list, list, list]:
    """Features of two models and labels, batch by batch; sizes: {class: images} of every batch. The part that
    the models share differs from class to class."""
    shared, wide = hidden.normal(seed, 3, 6), hidden.normal(seed + 1, 3, 5)
    batches = []
    for at, counts in enumerate(sizes):
        labels = torch.tensor([c for c, many in counts.items() for _ in range(many)])
        labels = labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed + at))]
        spread = 1.5 * torch.stack([(hidden.normal(seed + 7 + c, 3) * 0.6).exp() for c in labels.tolist()])
        centre = torch.stack([2 * hidden.normal(seed + 40 + c, 11) for c in labels.tolist()])
        known = spread * hidden.normal(seed + 100 + at, len(labels), 3)
        rest = centre + 0.5 * hidden.normal(seed + 200 + at, len(labels), 11)
        batches.append((known @ shared + rest[:, :6], known @ wide + rest[:, 6:], labels))
    return tuple(list(parts) for parts in zip(*batches))


def groups(xs: list, ys: list, labels: list) -> list[tuple[int, Tensor, Tensor]]:
    """(class, features of one model, of the other) of the images of one class in one batch."""
    return [
        (c, x[kinds == c].double(), y[kinds == c].double())
        for x, y, kinds in zip(xs, ys, labels)
        for c in set(kinds.tolist())
    ]


def by_covariances(x: Tensor, y: Tensor) -> float:
    """HSIC of a group without bias, from its definition: centred tables, and the part that chance adds to
    them."""
    n = len(x)
    K, L = (z @ z.T for z in (x - x.mean(0), y - y.mean(0)))
    K, L = (gram - gram.diag().diag() for gram in (K, L))
    k, l = K.sum(0), L.sum(0)
    inner = (K * L).sum() - 2 * (k * l).sum() / (n - 2) + k.sum() * l.sum() / ((n - 1) * (n - 2))
    return (inner / (n * (n - 3))).item()


def expected_cka(letter: str, xs: list, ys: list, labels: list) -> float:
    """CKA as this edition's variant defines it."""
    of_class = groups(xs, ys, labels)

    def hsic(s: int, t: int) -> float:
        if letter == "c":
            use = [g for g in of_class if len(g[1]) >= 2]
            total = weight = 0.0
            for g, h in combinations(use, 2):
                covariances = [torch.cov(torch.cat([u[s], u[t]], 1).T) for u in (g, h)]
                p, w = g[s].shape[1], len(g[1]) * len(h[1])
                total += w * (covariances[0][:p, p:] * covariances[1][:p, p:]).sum().item()
                weight += w
            return total / weight
        use = [g for g in of_class if len(g[1]) >= 4]
        sums = {}
        for c, *sides in use:
            x, y = sides[s - 1], sides[t - 1]
            total, many = sums.get(c, (0.0, 0))
            sums[c] = total + len(x) * by_covariances(x, y), many + len(x)
        if letter == "a":
            return sum(total for total, _ in sums.values()) / sum(many for _, many in sums.values())
        return sum(total / many for total, many in sums.values()) / len(sums)

    return hsic(1, 2) / sqrt(hsic(1, 1) * hsic(2, 2))


def cka(cka_within, asked: Asked, inputs: tuple, what: str, tolerance: float = 1e-6) -> None:
    """An answer's CKA is the variant's."""
    want = expected_cka(asked.variants["q1"], *inputs)
    same_number(cka_within(*inputs), want, what, tolerance)


def cka_equal(cka_within, asked: Asked) -> None:
    """Every class has 6 images in every batch."""
    cka(cka_within, asked, features(asked.seed("A3.1"), [{1: 6, 4: 6, 5: 6}] * 3), "CKA of equal groups")


def cka_few(cka_within, asked: Asked) -> None:
    """Classes of 1, 2 and 3 images in a batch, and one that a batch does not have."""
    sizes = [{1: 6, 4: 1, 5: 6}, {1: 3, 4: 6, 5: 6, 8: 1}, {1: 6, 4: 2, 5: 6}, {1: 6, 4: 6, 5: 1}]
    cka(cka_within, asked, features(asked.seed("A3.1 few"), sizes), "CKA where classes have few images")


def cka_unequal(cka_within, asked: Asked) -> None:
    """Batches and classes of very unequal sizes."""
    sizes = [{1: 25, 4: 4, 5: 7}, {1: 4, 4: 5}, {1: 5, 4: 18, 5: 4}]
    cka(cka_within, asked, features(asked.seed("A3.1 unequal"), sizes), "CKA of unequal batches")


def cka_single(cka_within, asked: Asked) -> None:
    """Features in single precision, ten thousand times as far from 0 as from each other."""
    xs, ys, labels = features(asked.seed("A3.1 single"), [{1: 6, 4: 6, 5: 6}] * 3)
    inputs = [(x + 1e5).float() for x in xs], [(y - 1e5).float() for y in ys], labels
    cka(cka_within, asked, inputs, "CKA of features in single precision, far from 0", 2e-4)


# --- Task 2: layers in order, heads paired ---


def maps(seed: int, heads: int, tokens: int = 6) -> Tensor:
    """Maps of 2 images."""
    return (1.5 * hidden.normal(seed, 2, heads, tokens, tokens)).softmax(-1)


def like(seed: int, near: Tensor, share: float) -> Tensor:
    """Maps that are like others, with their heads in a different order, and with one head that is like
    none."""
    order = torch.randperm(near.shape[1], generator=torch.Generator().manual_seed(seed))
    rest = maps(seed, near.shape[1])
    last = rest[:, -1:]
    return torch.cat([(share * near[:, order] + (1 - share) * rest)[:, :-1], last], 1)


def table(a: list, b: list) -> list[list[float]]:
    """The divergence of every layer of a from every layer of b, heads paired by trying all ways."""

    def layers(p: Tensor, q: Tensor) -> float:
        if p.shape[1] > q.shape[1]:
            p, q = q, p
        p, q = p[:, :, None], q[:, None]
        middle = ((p + q) / 2).clamp_min(1e-300)
        log_p, log_q = ((p_or_q.clamp_min(1e-300) / middle).log() for p_or_q in (p, q))
        cost = ((p * log_p).sum(-1) + (q * log_q).sum(-1)).mean((0, 3)) / 2
        cost = cost.tolist()
        ways = permutations(range(len(cost[0])), len(cost))
        return min(sum(row[h] for row, h in zip(cost, way)) for way in ways) / len(cost)

    return [[layers(p, q) for q in b] for p in a]


def best(letter: str, cost: list[list[float]], price: float) -> tuple[float, list]:
    """The variant's answer and its pairs, from a table of divergences."""
    rows, columns = len(cost), len(cost[0])
    all_pairs = [
        list(zip(i, j))
        for many in (range(min(rows, columns) + 1) if letter == "b" else [min(rows, columns)])
        for i in combinations(range(rows), many)
        for j in combinations(range(columns), many)
    ]
    values = []
    for pairs in all_pairs:
        costs = [cost[i][j] for i, j in pairs]
        match letter:
            case "a":
                value = sum(costs) / len(costs)
            case "b":
                value = sum(costs) + price * (rows + columns - 2 * len(pairs))
            case "c":
                value = max(costs)
        values.append((value, pairs))
    return min(values)


def aligned(align, asked: Asked, a: list, b: list, what: str, price: float = 0.05) -> None:
    """An answer's alignment is the variant's."""
    letter = asked.variants["q2"]
    value, pairs = best(letter, table(a, b), price)
    more = (price,) if letter == "b" else ()
    got = align(a, b, *more)
    if letter == "c":
        same_number(got, value, f"{what}: the worst pair")
        return
    answer = entry(got, "pairs")
    try:
        answer = [(int(number(i, "pairs")), int(number(j, "pairs"))) for i, j in answer]
    except (TypeError, ValueError):
        raise AssertionError(f"{what}: pairs has to be a list of pairs of numbers") from None
    if sorted(answer) != sorted(pairs):
        raise AssertionError(f"{what}: the pairs are not those of the best alignment")
    key = {"a": "divergence", "b": "cost"}[letter]
    same_number(entry(got, key), value, f"{what}: {key}")


def align_heads(align, asked: Asked) -> None:
    """Both models have one layer, and two heads of one have the same nearest head in the other."""
    seed = asked.seed("A3.2")
    p = maps(seed, 4)
    q = 0.3 * p[:, [2, 0, 3, 1]] + 0.7 * maps(seed + 1, 4)
    q[:, 1] = 0.4 * p[:, 0] + 0.4 * p[:, 1] + 0.2 * p[:, 2]
    aligned(align, asked, [p], [q], "one layer each", price=0.5)


def align_order(align, asked: Asked) -> None:
    """The layers that are alike come in a different order; both models have as many."""
    seed = asked.seed("A3.2 order")
    a = [maps(seed + i, 4) for i in range(3)]
    b = [like(seed + 10 + at, a[i], 0.9) for at, i in enumerate((1, 2, 0))]
    # A price at which layer 0 and its likeness, 2, do not stay alone for the sake of the order.
    aligned(align, asked, a, b, "layers in another order", price=0.06)


def align_many(align, asked: Asked) -> None:
    """All layers of a are like one layer of b, which has five."""
    seed = asked.seed("A3.2 many")
    common = maps(seed, 4)
    a = [0.75 * common + 0.25 * maps(seed + 1 + i, 4) for i in range(3)]
    b = [maps(seed + 10 + j, 4) for j in range(5)]
    b[2] = common
    b[1], b[4] = like(seed + 20, a[0], 0.4), like(seed + 21, a[2], 0.4)
    aligned(align, asked, a, b, "one layer that is like all", price=0.06)


def align_deep(align, asked: Asked) -> None:
    """a is deeper than b, and has more heads. What is best on average has a bad pair in it."""
    seed = asked.seed("A3.2 deep")
    a = [maps(seed + i, 4) for i in range(5)]
    near = {2: 0.65, 1: 0.32}, {3: 0.45, 2: 0.35}, {3: 0.4, 4: 0.22}
    b = []
    for at, shares in enumerate(near):
        rest = (1 - sum(shares.values())) * maps(seed + 10 + at, 4)
        b.append((rest + sum(share * a[i] for i, share in shares.items()))[:, [2, 0, 3]])
    aligned(align, asked, a, b, "a deeper model with more heads", price=0.08)


def align_zeros(align, asked: Asked) -> None:
    """Some tokens get nothing at all."""
    seed = asked.seed("A3.2 zeros")
    a, b = ([maps(seed + start + i, 4) for i in range(2)] for start in (0, 10))
    b.append(like(seed + 20, a[1], 0.8))
    for at, p in enumerate([*a, *b]):
        p[..., at % 3] = 0
        p /= p.sum(-1, keepdim=True)
    aligned(align, asked, a, b, "maps with zeros", price=0.1)


# --- Task 3: effective robustness ---


def spread(seed: int, many: int, classes: int) -> list[tuple[float, float]]:
    """(ordinary, shifted) accuracies of models that lie near a line, all above chance."""
    noise = hidden.normal(seed, many, 2).clamp(-2, 2).tolist()
    pairs = []
    for at, (e, f) in enumerate(noise):
        place = -0.8 + 3.2 * at / (many - 1) + 0.15 * e
        shares = [1 / (1 + exp(-place_on_axis)) for place_on_axis in (place, 0.7 * place - 0.6 + 0.3 * f)]
        pairs.append(tuple(1 / classes + (1 - 1 / classes) * share for share in shares))
    order = torch.randperm(many, generator=torch.Generator().manual_seed(seed)).tolist()
    return [pairs[at] for at in order]


def pool_of(letter: str, seed: int, many: int, classes: int) -> list[list[tuple[float, float]]]:
    """Models, each a list of its seeds: one seed, or two or three in variant c."""
    pairs = spread(seed, many, classes)
    if letter != "c":
        return [[pair] for pair in pairs]
    step = [0.0, 0.012, -0.009]
    return [
        [(a + step[k] * (1 - a), b - step[k] * (1 - b)) for k in range(2 + at % 2)]
        for at, (a, b) in enumerate(pairs)
    ]


def judged(models: list, asked: list[int], classes: int, samples: int, seed: int) -> dict[str, float]:
    """The variant's answer, with sums written out; asked: the models that are judged by the others."""

    def odds(a: float) -> float:
        return log((classes * a - 1) / (classes * (1 - a)))

    pool = [
        [(odds(a), odds(b)) for a, b in model if min(a, b) > 1 / classes]
        for at, model in enumerate(models)
        if at not in asked
    ]
    pool = [model for model in pool if model]

    def points(chosen: list) -> float | None:
        line = [pair for model in chosen for pair in model]
        if len({x for x, _ in line}) == 1:
            return None
        m = len(line)
        sx, sy = sum(x for x, _ in line), sum(y for _, y in line)
        xx, xy = sum(x * x for x, _ in line), sum(x * y for x, y in line)
        slope = (m * xy - sx * sy) / (m * xx - sx * sx)
        intercept = (sy - slope * sx) / m
        points_of = []
        for at in asked:
            less = []
            for a, b in models[at]:
                share = 1 / (1 + exp(-intercept - slope * odds(a)))
                less.append(100 * (b - 1 / classes - (1 - 1 / classes) * share))
            points_of.append(sum(less) / len(less))
        return points_of[0] - sum(points_of[1:])

    drawn = torch.randint(
        len(pool), (samples, len(pool)), generator=torch.Generator().manual_seed(seed)
    ).tolist()
    values = sorted(v for v in (points([pool[i] for i in row]) for row in drawn) if v is not None)

    def quantile(share: float) -> float:
        place = share * (len(values) - 1)
        below = int(place)
        above = min(below + 1, len(values) - 1)
        return values[below] + (place - below) * (values[above] - values[below])

    return {
        "members": sum(map(len, pool)),
        "points": points(pool),
        "low": quantile(0.025),
        "high": quantile(0.975),
    }


def robust(
    robustness, asked: Asked, models: list, judging: list[int], classes: int, keys: tuple, what: str
) -> None:
    """Some entries of an answer are the variant's."""
    letter = asked.variants["q3"]
    judging = judging if letter == "b" else judging[:1]
    want = judged(models, judging, classes, 500, 11)
    ordinary, shifted = ([[pair[k] for pair in model] for model in models] for k in (0, 1))
    if letter != "c":
        ordinary, shifted = ([accuracy for (accuracy,) in side] for side in (ordinary, shifted))
    got = robustness(ordinary, shifted, tuple(judging) if letter == "b" else judging[0], classes, 500, 11)
    for key in keys:
        same_number(entry(got, key), float(want[key]), f"{what}: {key}", 1e-5)


def robust_points(robustness, asked: Asked) -> None:
    """No member of the pool is near chance."""
    models = pool_of(asked.variants["q3"], asked.seed("A3.3"), 9, 8)
    robust(robustness, asked, models, [3, 6], 8, ("members", "points"), "a pool above chance")


def robust_chance(robustness, asked: Asked) -> None:
    """Some members are below chance on one axis or both, one is exactly at chance, and a judged model is
    below it."""
    models = pool_of(asked.variants["q3"], asked.seed("A3.3 chance"), 11, 5)
    models[1] = [(0.23, 0.17), *models[1][1:]]  # with the shift only
    models[4] = [(0.2, 0.26) for _ in models[4]]  # exactly at it, without
    models[7] = [(0.15, 0.18) for _ in models[7]]
    models[8] = [(a, 0.19) for a, _ in models[8]]  # who is judged
    robust(robustness, asked, models, [8, 0], 5, ("members", "points"), "members at and below chance")


def robust_interval(robustness, asked: Asked) -> None:
    """The interval is right where no member is near chance."""
    models = pool_of(asked.variants["q3"], asked.seed("A3.3 interval"), 10, 8)
    robust(robustness, asked, models, [5, 2], 8, ("low", "high"), "the interval")


def robust_small(robustness, asked: Asked) -> None:
    """The pool is so small that some samples have no line; in variant c, one method only guesses."""
    letter = asked.variants["q3"]
    models = pool_of(asked.variants["q3"], asked.seed("A3.3 small"), 5 if letter == "a" else 6, 10)
    a = models[2][0][0]
    models[2], models[3] = [(a, models[2][0][1])], [(a, models[3][0][1])]
    if letter == "c":
        models[4] = [(0.1, 0.11), (0.12, 0.09)]
    robust(robustness, asked, models, [0, 1], 10, ("low", "high"), "samples without a line")
