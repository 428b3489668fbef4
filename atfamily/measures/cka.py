"""CKA: do two layers hold the same features?

CKA(x, y) = HSIC(x, y) / √(HSIC(x, x) · HSIC(y, y)) is 1 for features that differ by a rotation, a reflection,
a translation or one common scale, and falls under any other change, invertible linear maps among them.
Sources: Kornblith et al. 2019 (arXiv 1905.00414), section 3; for minibatches Nguyen et al. 2021 (arXiv
2010.15327).
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from atfamily.measures.checks import check_features
from atlib.analysis import as_double, vit_of, walks
from atlib.data import Images

Read = Callable[[Tensor], Tensor]  # tokens (B, N, D) -> rows (n, D)


def linear_cka(x: Tensor, y: Tensor) -> float:
    """Linear CKA of two sets of features of the same rows, x (n, p) and y (n, q): from 0 to 1, computed in
    float64. Source: Kornblith et al. 2019 (arXiv 1905.00414), section 3."""
    (x,), (y,) = _checked([x], [y], 2)
    for name, side in (("x", x), ("y", y)):
        if (side == side[0]).all():
            raise ValueError(f"{name} is the same in every row: it has no variance")
    x, y = (side.double() - side.double().mean(0) for side in (x, y))
    # CKA does not see a scale, and its fourth power would leave float64.
    x, y = x / x.abs().max(), y / y.abs().max()
    n, p, q = len(x), x.shape[1], y.shape[1]
    if n * (p + q) < p * p + q * q + p * q:  # the same number from n x n similarities of rows
        x, y = x @ x.T, y @ y.T
        return ((x * y).sum() / (x.norm() * y.norm())).item()
    return ((x.T @ y).norm() ** 2 / ((x.T @ x).norm() * (y.T @ y).norm())).item()


class _LayerPairs:
    """CKA of every layer of x with every layer of y, batch by batch: what the two accumulators share."""

    least = 1  # rows of a batch

    def __init__(self):
        self.rows = 0
        # The first row of every layer of x and y, and whether any other differs from it.
        self._first: tuple[list[Tensor], ...] = ([], [])
        self._varying: tuple[list[bool], ...] = ([], [])

    def update(self, x: Tensor, y: Tensor) -> None:
        """Add the same rows of x (n, p) and y (n, q)."""
        self.update_layers([x], [y])

    def update_layers(self, xs: Sequence[Tensor], ys: Sequence[Tensor]) -> None:
        """Add the same rows of all layers: xs and ys hold one (n, p) each."""
        sides = _checked(xs, ys, self.least)
        if self.rows == 0:
            self._first = tuple([x[0].clone() for x in side] for side in sides)
            self._varying = tuple([False] * len(side) for side in sides)
            self._start(*([x.shape[1] for x in side] for side in sides), sides[0][0].device)
        for side, first, varying in zip(sides, self._first, self._varying):
            varying[:] = [varied or bool((x != row).any()) for varied, x, row in zip(varying, side, first)]
        self._add(*sides)
        self.rows += len(sides[0][0])

    def matrix(self) -> Tensor:
        """CKA of every pair of layers, (layers of x, layers of y), float64."""
        for name, varying in zip("xy", self._varying):
            if not all(varying):
                raise ValueError(f"layer {varying.index(False)} of {name} is the same in every row")
        xy, xx, yy = self._hsic()
        if min(xx.min(), yy.min()) <= 0:
            raise ValueError("a layer's HSIC with itself is not above 0: larger batches, or StreamingCKA")
        return (xy / (xx.sqrt()[:, None] * yy.sqrt())).cpu()

    def value(self) -> float:
        """CKA of the one pair of layers."""
        return self.matrix().item()


class StreamingCKA(_LayerPairs):
    """Linear CKA of data that come in batches: what `linear_cka` computes from all rows at once, to rounding.

    It keeps centred second moments in float64, (p, p) and (q, q) a layer and (p, q) a pair of layers. Moments
    are merged as in Chan, Golub and LeVeque 1983, so that a large mean costs no digits.
    """

    def _start(self, p: list[int], q: list[int], device: torch.device) -> None:
        self._widths = p, q
        kind = {"dtype": torch.float64, "device": device}
        self._means = [torch.zeros(sum(widths), **kind) for widths in (p, q)]
        # All layers side by side: one product for all pairs.
        self._across = torch.zeros(sum(p), sum(q), **kind)
        self._within = [[torch.zeros(width, width, **kind) for width in widths] for widths in (p, q)]

    def _add(self, xs: list[Tensor], ys: list[Tensor]) -> None:
        centred, steps = [], []
        n = len(xs[0])
        weight = self.rows * n / (self.rows + n)
        for side, mean, within in zip((xs, ys), self._means, self._within):
            side = torch.cat([x.double() for x in side], 1)
            batch_mean = side.mean(0)
            steps.append(batch_mean - mean)
            centred.append(side.sub_(batch_mean))
            mean += steps[-1] * (n / (self.rows + n))
            widths = [len(moments) for moments in within]
            for moments, part, step in zip(within, centred[-1].split(widths, 1), steps[-1].split(widths)):
                moments.addmm_(part.T, part).addr_(step, step, alpha=weight)
        self._across.addmm_(centred[0].T, centred[1]).addr_(*steps, alpha=weight)

    def _hsic(self) -> tuple[Tensor, Tensor, Tensor]:
        p, q = self._widths
        blocks = [rows.split(q, 1) for rows in self._across.split(p)]
        across = torch.stack([torch.stack([block.norm() for block in row]) for row in blocks])
        within = [torch.stack([moments.norm() for moments in side]) for side in self._within]
        return across**2, within[0] ** 2, within[1] ** 2


class MinibatchCKA(_LayerPairs):
    """Linear CKA from the unbiased HSIC₁ of minibatches, averaged over them: for features too wide for second
    moments.

    It needs (n, n) numbers for each layer of a batch of n rows, at least 4, and keeps three numbers a pair.
    `linear_cka`, which is biased upwards where rows are few, agrees with it for many rows only. A batch is a
    random sample: shuffle data that are sorted by class. Source: Nguyen et al. 2021 (arXiv 2010.15327); HSIC₁
    is by Song et al. 2012 (JMLR 13).
    """

    least = 4

    def _start(self, p: list[int], q: list[int], device: torch.device) -> None:
        shapes = (len(p), len(q)), (len(p),), (len(q),)
        self._sums = [torch.zeros(shape, dtype=torch.float64, device=device) for shape in shapes]

    def _add(self, xs: list[Tensor], ys: list[Tensor]) -> None:
        n, similar = len(xs[0]), []
        for side in (xs, ys):
            # centred, which keeps digits and is the same for HSIC₁
            centred = [x.double() - x.double().mean(0) for x in side]
            similar.append(torch.stack([(x @ x.T).fill_diagonal_(0) for x in centred]))
        x, y = similar  # (L, n, n)
        estimates = _hsic_1(x, y), _hsic_1(x, x).diagonal(), _hsic_1(y, y).diagonal()
        for total, estimate in zip(self._sums, estimates):
            total += n * estimate

    def _hsic(self) -> tuple[Tensor, Tensor, Tensor]:
        return tuple(total / self.rows for total in self._sums)


def layer_cka(
    a: nn.Module,
    b: nn.Module,
    images: Images,
    read: Read,
    *,
    read_b: Read | None = None,
    batch_size: int = 50,
    accumulator: StreamingCKA | MinibatchCKA | None = None,
) -> Tensor:
    """CKA of every block's output of `a` with every block's of `b`: (layers of a, layers of b), in one pass
    over the images.

    a, b: what `walks` takes. `read`, `read_b` turn tokens (B, N, D) into rows (n, D). accumulator: None for
    an exact `StreamingCKA`. It gets the rows of `batch_size` images at a time; a rest that is too little for
    it goes with those before.
    """
    pairs = StreamingCKA() if accumulator is None else accumulator
    reads = read, read if read_b is None else read_b
    for name, model, reading in zip("ab", (a, b), reads):
        vit = vit_of(model)
        if reading is class_token and vit.cls_token is None:
            raise ValueError(f"{name} has no class token: read patch_mean({vit.num_prefix_tokens}) instead")

    def add(waiting: list) -> None:
        pairs.update_layers(*([torch.cat(parts) for parts in zip(*side)] for side in zip(*waiting)))

    # Rows are copies: a class token alone would keep all tokens in memory.
    waiting, left, batches = [], len(images), 0
    for walked in walks((a,) if a is b else (a, b), images, batch_size):
        sides = zip(reads, (walked[0], walked[-1]))
        waiting.append([[read(tokens).clone() for tokens in seen.stream] for read, seen in sides])
        left -= len(walked[0].tokens)
        if left == 0 or len(images) - left >= batch_size * (batches + 1) and left >= pairs.least:
            add(waiting)
            waiting, batches = [], batches + 1
    if waiting:  # fewer came than there are: some cannot be decoded
        add(waiting)
    return pairs.matrix()


def class_token(tokens: Tensor) -> Tensor:
    """The class token of every image: (B, N, D) to (B, D)."""
    return tokens[:, 0]


def patch_mean(prefix_tokens: int) -> Read:
    """A function that averages every image's tokens after `prefix_tokens`, (B, N, D) to (B, D)."""

    def read(tokens: Tensor) -> Tensor:
        return tokens[:, prefix_tokens:].mean(1)

    return read


def every_token(tokens: Tensor) -> Tensor:
    """Every token of every image as a row, (B, N, D) to (B·N, D)."""
    return tokens.flatten(0, 1)


def _hsic_1(K: Tensor, L: Tensor) -> Tensor:
    """The unbiased HSIC₁, (a, b), of all K (a, n, n) with all L (b, n, n), symmetric, of zero diagonals."""
    n = K.shape[-1]
    k, l = K.sum(-1), L.sum(-1)
    trace = K.flatten(1) @ L.flatten(1).T  # of the products K L
    totals = k.sum(-1)[:, None] * l.sum(-1)
    return (trace + totals / ((n - 1) * (n - 2)) - 2 / (n - 2) * k @ l.T) / (n * (n - 3))


def _checked(xs: Sequence[Tensor], ys: Sequence[Tensor], rows: int) -> tuple[list[Tensor], list[Tensor]]:
    """Both sides checked, on one device that has float64, into which they are turned one by one."""
    for name, side in (("x", xs), ("y", ys)):
        for x in side:
            check_features(x, name, rows)
    device = as_double(xs[0][:0]).device
    return tuple([x.detach().to(device) for x in side] for side in (xs, ys))
