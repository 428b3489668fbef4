"""Wrong answers to A1, and the points that each is worth: {(task, variant): [(in the solution, in its place,
points), ...]}."""

LAYOUT = (".transpose(1, 2).flatten(2)", ".reshape(len(q), q.shape[2], -1)", 4)
NO_SCALE = (" / q.shape[-1] ** 0.5", "", 2)
# Right for heads of width 4 alone.
HALVED = (" / q.shape[-1] ** 0.5", " / 2", 2)
HALVED_BACK = ("scale = q.shape[-1] ** -0.5", "scale = 0.5", 0)
# The row's own mean is not subtracted, nor is 1 / sqrt(d) there on the way back.
CONSTANT = ("(by_p - (p * by_p).sum(-1, keepdim=True))", "by_p", 0)
NO_SCALE_BACK = ("return scale * ", "return ", 0)
# As many keys as queries are taken for granted.
SQUARE = ("by_p = grad @ v.mT", "by_p = (grad @ v.mT).reshape(*q.shape[:3], q.shape[2])", 5)
# Numbers that were typed in.
COMPUTED = ("SHARES = ", "SHARES = sorted(shares(maps)) or ", 0)
LAST_LAYER = ("]]", ", 0.0]]", 3)
FIRST_LAYER = ("SHARES = [[0.", "SHARES = [[9.", 3)

MUTANTS = {
    ("q1", "a"): [
        LAYOUT,
        NO_SCALE,
        HALVED,
        ("gh,bhij->bgij", "hg,bhij->bgij", 3),
        ("mix, z).softmax(-1)", "mix, z.softmax(-1))", 1),  # mixed after the softmax
    ],
    ("q1", "b"): [
        LAYOUT,
        NO_SCALE,
        HALVED,
        ("return (r @", "r = r / r.sum(-1, keepdim=True)\n    return (r @", 1),
        (
            '.softmax(-1)\n    r = torch.einsum("gh,bhij->bgij", mix, p)',
            '\n    r = torch.einsum("gh,bhij->bgij", mix, p).softmax(-1)',
            1,
        ),
    ],
    ("q1", "c"): [
        LAYOUT,
        NO_SCALE,
        HALVED,
        ("bigh,bhij->bgij", "bjgh,bhij->bgij", 1),  # the key's matrix
        ("bigh,bhij->bgij", "bihg,bhij->bgij", 2),
    ],
    ("q2", "a"): [
        CONSTANT,
        SQUARE,
        HALVED_BACK,
        ("(-largest).exp() + ", "", 0),  # no sink
        ("z.amax(-1, keepdim=True).clamp_min(0)", "torch.zeros_like(z[..., :1])", 4),  # overflows
    ],
    ("q2", "b"): [CONSTANT, SQUARE, HALVED_BACK, NO_SCALE_BACK, (" * (1 - t * t)", "", 0)],
    ("q2", "c"): [
        NO_SCALE_BACK,
        HALVED_BACK,
        ('torch.einsum("gh,bgij->bhij", mix, by_mixed)', "by_mixed", 0),
        ("gh,bgij->bhij", "hg,bgij->bhij", 0),
        (
            "scale * q @ k.mT).softmax(-1)\n",
            "scale * q @ k.mT).exp()\n    p = p / p.sum(-1, keepdim=True)\n",
            4,  # overflows
        ),
    ],
    ("q3", "a"): [COMPUTED, LAST_LAYER, FIRST_LAYER],
    ("q3", "b"): [COMPUTED, LAST_LAYER, FIRST_LAYER],
    ("q3", "c"): [COMPUTED, LAST_LAYER, FIRST_LAYER],
}
