"""Wrong answers to A3, and the points that each is worth: {(task, variant): [(in the solution, in its place,
points), ...]}."""

CENTRE = "            p, q = (z - z.mean(0) for z in (p, q))\n"
NOT_CENTRED = (CENTRE, "", 5)
# The classes are not looked at.
NO_CLASSES = ("z[of == c].double()", "z.double()", 0)
# Groups of 3 images and fewer have no such estimate.
ANY_SIZE = ("if n >= 4:", "if n >= 1:", 4)
# The classes are those of the first batch.
FIRST_ONLY = ("for c in of.unique():", "for c in labels[0].unique():", 4)

# The numbers are off, computed, or those of somebody else.
OFF = ("LIKENESS = [[", "LIKENESS = [[1", 3)
COMPUTED = ("LIKENESS = ", "LIKENESS = 2 * ", 0)
TURNED = ("POINTS = ", "POINTS = [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]] #", 0)
FLAT = ("POINTS = ", "POINTS = [0.0, 0.0, 0.0] #", 0)

MUTANTS = {
    ("q1", "a"): [
        NOT_CENTRED,
        NO_CLASSES,
        ANY_SIZE,
        FIRST_ONLY,
        ("n * hsic(", "hsic(", 5),  # groups alike
    ],
    ("q1", "b"): [
        NOT_CENTRED,
        ANY_SIZE,
        ("+ n * hsics", "+ hsics", 5),  # groups of a class alike
        ("sums[c] / images[c]", "sums[c]", 3),  # images alike
    ],
    ("q1", "c"): [
        ("(total.square().sum() - squares) / (images**2 - diagonal)", "total.square().sum() / images**2", 0),
        ("/ (n - 1)", "/ n", 3),
        ("/ (n - 1)\n", "/ (n - 1)\n            n = 1\n", 3),  # groups alike
        ("len(p) >= 2", "len(p) >= 1", 4),
    ],
}
MUTANTS |= {("q2", letter): [OFF, COMPUTED] for letter in "abc"}
MUTANTS |= {("q3", letter): [TURNED, FLAT] for letter in "abc"}
