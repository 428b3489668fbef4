"""Wrong answers to A3, and the points that each is worth: {(task, variant): [(in the solution, in its place,
points), ...]}."""

CENTRE = "            p, q = (z - z.mean(0) for z in (p, q))\n"
NOT_CENTRED = (CENTRE, "", 5)
# The classes are not looked at.
NO_CLASSES = ("z[of == c].double()", "z.double()", 0)
# Groups of 3 images and fewer have no such estimate.
ANY_SIZE = ("if n >= 4:", "if n >= 1:", 4)

PAIRED = "heads[linear_sum_assignment(heads)].mean().item()"
HEADS_SHARED = (PAIRED, "heads.min(1).mean().item()", 0)
ZERO_LOG_ZERO = ("torch.special.entr(p).sum(-1)", "-(p * p.log()).sum(-1)", 6)
A_IS_SHALLOWER = ("few = min(len(a), len(b))", "few = len(a)", 6)
WAYS = "from itertools import combinations\n"
ANY_ORDER = "from itertools import permutations as combinations\n"
MANY = "from itertools import combinations_with_replacement as combinations\n"

CLIPPED = (
    "    pool = (above > 0).all(0)\n",
    "    above = above.clamp(0.01, 0.99)\n    pool = (above > 0).all(0)\n",
    5,
)
WITHOUT_A_LINE = ("if x[row].max() > x[row].min()", "if True", 6)
AXES = ("(by_x @ y) / (by_x @ by_x)", "((y - y.mean()) @ y) / (by_x @ y)", 0)
NO_CORRECTION = ("1 / classes", "0", 0)

MUTANTS = {
    ("q1", "a"): [
        NOT_CENTRED,
        NO_CLASSES,
        ANY_SIZE,
        ("n * hsic(", "hsic(", 5),  # groups alike
    ],
    ("q1", "b"): [
        NOT_CENTRED,
        ANY_SIZE,
        ("+ n * found", "+ found", 5),  # groups of a class alike
        ("sums[c] / images[c]", "sums[c]", 3),  # images alike
    ],
    ("q1", "c"): [
        ("(total.square().sum() - squares) / (images**2 - own)", "total.square().sum() / images**2", 0),
        ("/ (n - 1)", "/ n", 3),
        ("/ (n - 1)\n", "/ (n - 1)\n            n = 1\n", 3),  # groups alike
        ("len(p) >= 2", "len(p) >= 1", 4),
    ],
    ("q2", "a"): [HEADS_SHARED, A_IS_SHALLOWER, (WAYS, ANY_ORDER, 5), (WAYS, MANY, 1)],
    ("q2", "b"): [
        HEADS_SHARED,
        ZERO_LOG_ZERO,
        ("cost, pairs = best[i][j]", "cost, pairs = min(best[i][j], best[i][j + 1])", 5),  # many to one
        ("(left + price, back)", "(left, back)", 1),  # b's layers are free
    ],
    ("q2", "c"): [
        HEADS_SHARED,
        ZERO_LOG_ZERO,
        (WAYS, MANY, 1),
        (
            "min(max(cost[i][j] for i, j in pairs) for pairs in ways)",
            "max(cost[i][j] for i, j in min(ways, key=lambda w: sum(cost[i][j] for i, j in w)))",
            6,  # the worst pair of the best mean
        ),
    ],
    ("q3", "a"): [CLIPPED, WITHOUT_A_LINE, AXES, ("pool[model] = False", "pool[model] = True", 0)],
    ("q3", "b"): [
        ("100 * (found - expected)", "found - expected", 0),
        AXES,
        ("pool[pair] = False", "pool[pair[0]] = False", 0),
        ("(above > 0).all(0)", "above[1] > 0", 5),  # below chance on one axis only
    ],
    ("q3", "c"): [
        ("left = above[:, (above > 0).all(0)]", "left = above.clamp(0.01, 0.99)", 4),
        ("if x.max() > x.min():", "if True:", 6),
        NO_CORRECTION,
        ("if left.shape[1]:", "if True:", 6),  # methods without seeds are drawn, too
    ],
}
