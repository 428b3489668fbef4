"""Exercises of how-to H3, From one laptop to a cluster."""

import io
from collections.abc import Callable
from copy import deepcopy
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atbook.exercises.inputs import normal
from atbook.exercises.judging import Exercise, told
from atfamily.measures import accounting

# --- H3.1 ---


class Run:
    """A small training run with all that a real one has."""

    def __init__(self, seed: int):
        # Draws the noise on the inputs, and the order of every epoch.
        self.generator = torch.Generator().manual_seed(seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.model = nn.Linear(4, 2).double()
        # A running average of the model's weights.
        self.average = deepcopy(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        # The order of the images in this epoch.
        self.order = torch.randperm(12, generator=self.generator).tolist()
        # How many steps have been taken.
        self.done = 0

    def go_on(self, until: int) -> None:
        """Take steps of four images, three an epoch."""
        x, y = normal(12, 4), normal(12, 2, seed=1)
        while self.done < until:
            if self.done and self.done % 3 == 0:
                self.order = torch.randperm(12, generator=self.generator).tolist()
            batch = self.order[4 * (self.done % 3) :][:4]
            noise = torch.randn(4, 4, generator=self.generator, dtype=torch.float64)
            self.optimizer.zero_grad()
            F.mse_loss(self.model(x[batch] + 0.1 * noise), y[batch]).backward()
            self.optimizer.step()
            with torch.no_grad():
                for slow, fast in zip(self.average.parameters(), self.model.parameters()):
                    slow.lerp_(fast, 0.2)
            self.done += 1

    def __deepcopy__(self, memo):
        raise TypeError("a run is a process: when it dies, nothing of it is left. Keep its state")


BESIDE_WEIGHTS = ("average", "optimizer", "chance", "order", "done")  # the other parts of the state


def state_of(run: Run) -> dict:
    """All that decides how a run goes on, at this moment."""
    return {
        "model": run.model.state_dict(),
        "average": run.average.state_dict(),
        "optimizer": run.optimizer.state_dict(),
        "chance": run.generator.get_state(),
        "order": run.order,
        "done": run.done,
    }


def put_back(kept: dict, fresh: Run) -> Run:
    """Put parts of a state into a run that was just started."""
    for name in ("model", "average", "optimizer"):
        if name in kept:
            getattr(fresh, name).load_state_dict(kept[name])
    if "chance" in kept:
        fresh.generator.set_state(kept["chance"])
    fresh.order = kept.get("order", fresh.order)
    fresh.done = kept.get("done", fresh.done)
    return fresh


def survive(run: Run, crash: Callable, fresh: Run) -> Run:
    """Keep a copy of a run's state, and go on from there."""
    kept = deepcopy(state_of(run))
    crash(run)
    return put_back(kept, fresh)


def without(*parts: str) -> Callable:
    """Wrong: the same, but some parts of the state are not kept."""

    def answer(run: Run, crash: Callable, fresh: Run) -> Run:
        kept = deepcopy({name: part for name, part in state_of(run).items() if name not in parts})
        crash(run)
        return put_back(kept, fresh)

    return answer


def through_a_file(run: Run, crash: Callable, fresh: Run) -> Run:
    """The same with a file, as a real run does it."""
    file = io.BytesIO()
    torch.save(state_of(run), file)
    crash(run)
    file.seek(0)
    return put_back(torch.load(file), fresh)


def by_reference(run, crash, fresh):
    """Your state was not copied: a state_dict holds the run's own tensors. The steps after the checkpoint
    changed them, and the crash wiped them out. Copy it before (copy.deepcopy, or torch.save)."""
    kept = state_of(run)
    crash(run)
    return put_back(kept, fresh)


def too_late(run, crash, fresh):
    """The state was read after the crash, when nothing was left. Keep before it what is to survive."""
    crash(run)
    return put_back(deepcopy(state_of(run)), fresh)


def never_crashed(run, crash, fresh):
    """`crash` was not called, so nothing had to survive. Call it once, after the state was kept."""
    return put_back(state_of(run), fresh)


def outcome_of(run: Run, until: int) -> dict:
    """The weights, the average and the order of a run after its last step, and how often it crashed."""
    run.go_on(until)
    weights = {"weights": run.model.weight, "average": run.average.weight}
    return {"crashes": len(_cuts), **weights, "order": run.order}


_cuts: list[int] = []  # of this case


def power_cut(run: Run, after: int) -> None:
    """Let a run go on to that step, and then wipe out all that it has in memory."""
    _cuts.append(after)
    run.go_on(after)
    moments = [value for state in run.optimizer.state.values() for value in state.values()]
    for tensor in (*run.model.parameters(), *run.average.parameters(), *moments):
        tensor.detach().fill_(torch.nan)
    run.generator.manual_seed(0)
    run.order, run.done = [], 0


def interrupted(checkpoint: int, after: int) -> tuple:
    """A run at its checkpoint, what will happen to it, and a run that was just started."""
    _cuts.clear()
    run = Run(seed=0)
    run.go_on(checkpoint)
    return run, partial(power_cut, after=after), Run(seed=1)


# --- H3.2 ---


def by_blocks(step: list[int], processes: int) -> list:
    """Blocks of a step whose sizes differ by one at most, the larger ones first, each with its weight."""
    small, larger = divmod(len(step), processes)
    shares, start = [], 0
    for rank in range(processes):
        shares.append(step[start : start + small + (rank < larger)])
        start += len(shares[-1])
    return weighed(shares, step)


def by_tensor_split(step: list[int], processes: int) -> list:
    """The same, cut by torch."""
    blocks = [block.tolist() for block in torch.tensor(step).tensor_split(processes)]
    return [(block, len(block) * processes / len(step)) if block else (step[:1], 0.0) for block in blocks]


def weighed(blocks: list[list[int]], step: list[int]) -> list:
    """Shares of a step with their weights."""
    return [[block or step[:1], len(block) * len(blocks) / len(step)] for block in blocks]


def blocks_as_large_as_the_first(step, processes):
    """Every block is as large as the first, and the last process gets what is left: one image of ten, none of
    nine. Sizes may differ by one image at most."""
    size = -(-len(step) // processes)
    return weighed([step[rank * size :][:size] for rank in range(processes)], step)


# --- H3.3 ---


def step_flops(N: int, D: int, hidden: int, depth: int, layers: int, how: str) -> int:
    """FLOPs of one training step on one image."""
    teacher = (layers - 1) * block(N, D, hidden) + asking(N, D)
    student = 3 * depth * block(N, D, hidden)
    if how == "copy":  # no q, k, scores, three times; and no gradient of a map
        student -= layers * (3 * asking(N, D) + 2 * N * D * N)
    return teacher + student


def asking(N: int, D: int) -> int:
    """Forward FLOPs of q, k and scores."""
    return 2 * (2 * N * D * D) + 2 * N * D * N


def block(N: int, D: int, hidden: int) -> int:
    """Forward FLOPs of a block: as many again for v, output and mixing, and the MLP."""
    return 2 * asking(N, D) + 2 * (2 * N * D * hidden)


def by_accounting(N: int, D: int, hidden: int, depth: int, layers: int, how: str) -> int:
    """The library's count, of a ViT without patch embedding and head."""
    shape = accounting.Shape(N, 0, depth, D, hidden, 0, 0)
    return {"copy": accounting.copy, "distill": accounting.distill}[how](shape, layers)


def backward_once(N, D, hidden, depth, layers, how):
    """The backward pass of a product is *two* products of its size, one for each factor that needs a
    gradient: 3 × forward in all, not 2."""
    saved = layers * asking(N, D) if how == "copy" else 0
    teacher = (layers - 1) * block(N, D, hidden) + asking(N, D)
    return teacher + 2 * (depth * block(N, D, hidden) - saved)


def saved_once(N, D, hidden, depth, layers, how):
    """What Copy does not compute it does not differentiate either: q, k and scores are saved three times, not
    once."""
    saved = layers * asking(N, D) if how == "copy" else 0
    return step_flops(N, D, hidden, depth, layers, "distill") - saved


def gradient_of_a_copied_map(N, D, hidden, depth, layers, how):
    """Nearly. A copied map is a constant: the backward pass of map · v has a gradient for v alone, one
    product less in each copied layer."""
    extra = layers * 2 * N * D * N if how == "copy" else 0
    return step_flops(N, D, hidden, depth, layers, how) + extra


# --- H3.4 ---


def gradient_of(W: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """The gradient of the mean squared error of x W."""
    W = W.clone().requires_grad_()
    return torch.autograd.grad(F.mse_loss(x @ W, y), W)[0]


def of_parts(W: Tensor, x: Tensor, y: Tensor, sizes: list[int]) -> list[Tensor]:
    """The gradient of each part."""
    return [gradient_of(W, *part) for part in zip(x.split(sizes), y.split(sizes))]


def clipped(gradient: Tensor, longest: float) -> Tensor:
    """The gradient, scaled down where it is longer than `longest`."""
    return gradient * min(1.0, longest / gradient.norm().item())


def accumulated(W: Tensor, x: Tensor, y: Tensor, sizes: list[int], longest: float) -> Tensor:
    """The clipped gradient of a step in parts of these sizes."""
    total = torch.zeros_like(W)
    for some_x, some_y in zip(x.split(sizes), y.split(sizes)):
        total = total + len(some_x) / len(x) * gradient_of(W, some_x, some_y)
    return clipped(total, longest)


def by_backward(W: Tensor, x: Tensor, y: Tensor, sizes: list[int], longest: float) -> Tensor:
    """The same with PyTorch's own adding up and clipping."""
    W = nn.Parameter(W.clone())
    for some_x, some_y in zip(x.split(sizes), y.split(sizes)):
        (len(some_x) / len(x) * F.mse_loss(some_x @ W, some_y)).backward()
    nn.utils.clip_grad_norm_([W], longest)
    return W.grad


def each_clipped(W, x, y, sizes, longest):
    """Each part was clipped by itself. Clipping is not linear: add up first, then clip the whole step
    once."""
    parts = zip(x.split(sizes), y.split(sizes))
    return sum(len(part[0]) / len(x) * clipped(gradient_of(W, *part), longest) for part in parts)


def sum_clipped_on_the_way(W, x, y, sizes, longest):
    """The sum was clipped after every part, so what comes first counts less than what comes last. Clip once,
    when all parts are in."""
    total = torch.zeros_like(W)
    for some_x, some_y in zip(x.split(sizes), y.split(sizes)):
        total = clipped(total + len(some_x) / len(x) * gradient_of(W, some_x, some_y), longest)
    return total


def harder_and_harder() -> tuple:
    """A step of 5, 5 and 2 images whose later images have larger gradients."""
    targets = normal(12, 20, seed=1) * torch.linspace(0.1, 3, 12, dtype=torch.float64)[:, None]
    return normal(3, 20, seed=2), normal(12, 3), targets, [5, 5, 2], 0.5


EXERCISES = (
    Exercise(
        "H3.1",
        subject="checkpoints",
        right=survive,
        cases={
            "checkpoint 4, crash after 5": lambda: interrupted(4, 5),
            "checkpoint 2, crash after 7": lambda: interrupted(2, 7),
        },
        also_right=(through_a_file,),
        wrong={
            "The optimiser's state was not kept: without AdamW's moments"
            " the first steps after the cut have a different size.": without("optimizer"),
            "The generator's state was not kept: the noise, and the order"
            " of the next epoch, are drawn otherwise than without the cut.": without("chance"),
            "The place was not kept: the run begins again at"
            " step 0, with weights that have seen those images.": without("done"),
            "The order of this epoch was not kept: some images come twice in it, others not at all.": without(
                "order"
            ),
            "The running average was not kept: it begins again at weights that were never trained.": without(
                "average"
            ),
            "Weights alone were kept. Running average, optimiser,"
            " generator, order and place belong to a run, too.": without(*BESIDE_WEIGHTS),
            **told(by_reference, too_late, never_crashed),
        },
        see="Pull the plug",
        view=lambda run: outcome_of(run, until=8),
        rtol=0,
        atol=0,
    ),
    Exercise(
        "H3.2",
        subject="processes",
        right=by_blocks,
        cases={
            "10 images to 4": lambda: (list(range(10)), 4),
            "3 images to 4": lambda: ([7, 8, 9], 4),
            "8 to 2": lambda: ([5, 2, 0, 7, 1, 6, 4, 3], 2),
            "9 to 4": lambda: (list(range(20, 29)), 4),
        },
        also_right=(by_tensor_split,),
        wrong={
            "The images were dealt in turn, as in the"
            " chapter. The task asks for blocks of neighbours.": lambda step, processes: weighed(
                [step[rank::processes] for rank in range(processes)], step
            ),
            "Every share weighs 1, the stand-in among them. A mean of unequal shares' means is"
            " not the mean of the step: the weight is images of the share × processes / images"
            " of the step.": lambda step, processes: [[part, 1.0] for part, _ in by_blocks(step, processes)],
            "The factor `processes` is missing in the weights: gradients are *averaged*"
            " over processes, so your step is that many times too small.": lambda step, processes: (
                [[part, w / processes] for part, w in by_blocks(step, processes)]
            ),
            "A process without images got an empty share. It has to compute something,"
            " or the others wait for it: the step's first image, with weight"
            " 0.": lambda step, processes: [[part if w else [], w] for part, w in by_blocks(step, processes)],
            **told(blocks_as_large_as_the_first),
        },
        see="Which process gets which image?",
    ),
    Exercise(
        "H3.3",
        subject="counting",
        right=step_flops,
        cases={
            "copy, 3 of 4 layers": lambda: (17, 12, 48, 4, 3, "copy"),
            "distill, 3 of 4 layers": lambda: (17, 12, 48, 4, 3, "distill"),
            "copy, all layers": lambda: (50, 8, 20, 3, 3, "copy"),
        },
        also_right=(by_accounting,),
        wrong={
            "A student that copies makes no queries, keys and scores in"
            " its copied layers: less than Distill, not the same.": lambda N, D, hidden, depth, layers, how: (
                step_flops(N, D, hidden, depth, layers, "distill")
            ),
            "The teacher was charged for a backward pass. It is"
            " frozen: one forward pass, as far as it is needed.": lambda N, D, M, depth, n, how: (
                step_flops(N, D, M, depth, n, how) + 2 * ((n - 1) * block(N, D, M) + asking(N, D))
            ),
            "The whole teacher was charged. It stops at"
            " the scores of the last transferred layer.": lambda N, D, M, depth, n, how: (
                step_flops(N, D, M, depth, n, how) + (depth - n + 1) * block(N, D, M) - asking(N, D)
            ),
            "The teacher's last needed block was charged whole. Its q, its k and their"
            " scores are enough: no values, no output projection, no MLP.": lambda N, D, M, depth, n, how: (
                step_flops(N, D, M, depth, n, how) + block(N, D, M) - asking(N, D)
            ),
            **told(backward_once, saved_once, gradient_of_a_copied_map),
        },
        see="Computed: 8 to 64 GPUs",
        rtol=1e-9,
    ),
    Exercise(
        "H3.4",
        subject="accumulation",
        right=accumulated,
        cases={
            "5, 5 and 2 images": harder_and_harder,
            "nothing to clip": lambda: (normal(3, 2, seed=6), normal(6, 3), normal(6, 2, seed=5), [4, 2], 50),
        },
        also_right=(by_backward,),
        wrong={
            "The gradient is right, but all images went through"
            " at once. The point is that they do not fit: take"
            " one part at a time.": lambda W, x, y, sizes, longest: clipped(gradient_of(W, x, y), longest),
            "The gradient of the step is right, and it was not clipped.": lambda *inputs: accumulated(
                *inputs[:4], longest=float("inf")
            ),
            "All parts weigh the same, though the last has fewer images."
            " Multiply each part's gradient by its share of the images.": lambda W, x, y, sizes, longest: (
                clipped(torch.stack(of_parts(W, x, y, sizes)).mean(0), longest)
            ),
            "The parts' gradients were added up as they are. Each is a mean"
            " over its own images: multiply it by the part's share of the"
            " images first.": lambda W, x, y, sizes, longest: clipped(sum(of_parts(W, x, y, sizes)), longest),
            **told(each_clipped, sum_clipped_on_the_way),
        },
        see="What fits on a GPU",
        largest=200,
    ),
)
