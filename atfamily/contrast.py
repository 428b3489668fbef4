"""Learning by contrast: a ViT that shall say the same of two views of an image, beside a copy of itself that
follows slowly. MoCo-v3 and DINO make teachers of images alone so.

Sources: Chen, Xie & He 2021, "An Empirical Study of Training Self-Supervised Vision Transformers" (arXiv
2104.02057); Caron et al. 2021, "Emerging Properties in Self-Supervised Vision Transformers" (arXiv
2104.14294). What is said here of "the published code" was read in github.com/facebookresearch/moco-v3 and
github.com/facebookresearch/dino.
"""

import copy
import math
from abc import ABC, abstractmethod
from itertools import pairwise

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from atfamily.processes import gathered, summed
from atlib._util import in_eval_mode
from atlib.data import Images
from atlib.loading import ShardSpec
from atlib.recipe import Recipe

# --- What both have: a copy that follows ---


class MomentumPair(nn.Module, ABC):
    """A ViT that learns, `vit`, and its copy, `momentum_vit`, which follows it and gets no gradient.

    Images are given to it as views, (B, views, 3, height, width) (`atrun.data.views`); `forward` returns the
    loss, a scalar, the mean over the images. The training loop calls `follow` after each step.

    The copy is a part of the module, and in eval mode always: it has no stochastic depth. What a loss needs
    of all images comes from all processes. Weights that are divided among processes (FSDP) are refused.
    """

    def __init__(self, vit: nn.Module, momentum: float):
        super().__init__()
        if not 0 <= momentum <= 1:
            raise ValueError(f"momentum={momentum}: it is a share, from 0 to 1, such as 0.99")
        self.vit, self.momentum_vit, self.momentum = vit, _copy(vit), momentum
        # The share of the run that is done; a buffer, so that a checkpoint has it.
        self.register_buffer("done", torch.zeros(()))

    @property
    @abstractmethod
    def result(self) -> nn.Module:
        """The ViT that is kept after pre-training."""

    @abstractmethod
    def following(self) -> list[tuple[nn.Module, nn.Module]]:
        """What learns, and what follows it."""

    def follow(self, step: int, steps: int) -> None:
        """`step` of `steps` steps are done: the copies move towards what they follow."""
        self.done.fill_(step / steps)
        self.move(momentum_at(self.share_of_momentum(step, steps), self.momentum))

    def share_of_momentum(self, step: int, steps: int) -> float:
        """How far the momentum's schedule is when so many steps are done."""
        return step / steps

    @torch.no_grad()
    def move(self, momentum: float) -> None:
        """copy ← momentum · copy + (1 - momentum) · what it follows; buffers are taken over as they are."""
        for leader, follower in self.following():
            weights = list(leader.parameters())
            if any(hasattr(weight, "full_tensor") for weight in weights):
                raise ValueError("a momentum copy was never tried with divided weights (FSDP): use DDP")
            torch._foreach_lerp_(list(follower.parameters()), weights, 1 - momentum)
            for buffer, leading in zip(follower.buffers(), leader.buffers(), strict=True):
                buffer.copy_(leading)

    def train(self, mode: bool = True) -> "MomentumPair":
        """As of any module, but what follows stays in eval mode."""
        super().train(mode)
        for _, follower in self.following():
            follower.eval()
        return self

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Compute the ViT's activations a second time instead of keeping them."""
        self.vit.set_grad_checkpointing(enable)

    def no_weight_decay(self) -> set[str]:
        """The ViT's positions and tokens."""
        names = getattr(self.vit, "no_weight_decay", set)()
        return {f"vit.{name}" for name in names}


def momentum_at(done: float, start: float) -> float:
    """The momentum when the share `done` of a run is done: from `start` to 1 along a half cosine (arXiv
    2104.02057, appendix A.1; arXiv 2104.14294, section 3.1)."""
    return 1 - (1 - start) * (1 + math.cos(math.pi * done)) / 2


def features(vit: nn.Module, images: Tensor) -> Tensor:
    """What a ViT's head would read, (B, D): the class token, or the mean, after the final norm; of another of
    timm's networks likewise."""
    return vit.forward_head(vit.forward_features(images), pre_logits=True)


def contrast_loss(model: MomentumPair, views: Tensor, targets: Tensor, recipe: Recipe) -> Tensor:
    """The model's own loss; labels are not used."""
    if isinstance(model, MoCo):
        recipe.require_whole_steps("MoCo tells an image from the others of its step")
    return model(views)


def unmatched(model: MomentumPair, images: Images, batch_size: int = 250) -> float:
    """The share of images whose first view is not nearest to their own second view, by the cosine of the
    result's features, among `batch_size` others: what a contrast has left unlearned. images: with views."""
    device, wrong, compared = model.done.device, 0, 0
    with torch.no_grad(), in_eval_mode(model):
        for batch in images.epoch(ShardSpec(0, 0, batch_size)):
            x, y = (
                nn.functional.normalize(features(model.result, view), dim=1)
                for view in batch.images[:, :2].to(device).unbind(1)
            )
            wrong += ((x @ y.T).argmax(1) != torch.arange(len(x), device=device)).sum().item()
            compared += len(x)  # fewer than `len(images)` where some could not be decoded
    return wrong / compared


def _copy(module: nn.Module) -> nn.Module:
    return copy.deepcopy(module).eval().requires_grad_(False)


def _exact(x: Tensor) -> Tensor:
    """In float32 at least, also where Accelerate computes in half."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


# --- MoCo-v3 ---


class BatchNorm(nn.Module):
    """Batch normalisation by the mean and the variance of the batch over all processes, in eval mode too:
    what is thrown away after training needs no running averages. (..., width) in float32. affine: with a
    learned scale and shift."""

    def __init__(self, width: int, affine: bool = True, eps: float = 1e-5):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width)) if affine else None
        self.bias = nn.Parameter(torch.zeros(width)) if affine else None

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x (B, width)."""
        x = _exact(x)
        count = summed(x.new_tensor(float(len(x))))
        x = x - summed(x.sum(0)) / count
        x = x * (summed(x.square().sum(0)) / count + self.eps).rsqrt()
        return x if self.weight is None else x * self.weight + self.bias


def draw_patches(vit: VisionTransformer) -> VisionTransformer:
    """Give a ViT the random patch projection of the published code, which MoCo-v3 never trains: even between
    ± √(6 / (3 · patch area + D)), without a bias. Changes the ViT in place and returns it."""
    weight = vit.patch_embed.proj.weight  # (D, 3, patch height, patch width)
    bound = math.sqrt(6 / (weight[0].numel() + len(weight)))
    nn.init.uniform_(weight, -bound, bound)
    nn.init.zeros_(vit.patch_embed.proj.bias)
    return vit


def info_nce(q: Tensor, k: Tensor, temperature: float) -> Tensor:
    """How badly queries find their own keys among all: 2τ · the mean over i of -log (exp(q_i · k_i / τ) / Σ_j
    exp(q_i · k_j / τ)), q and k (B, d) scaled to length 1; a scalar. The keys j are those of all processes,
    without gradients. Source: arXiv 2104.02057, algorithm 1."""
    q, k = (nn.functional.normalize(x, dim=1) for x in (q, k))
    keys, first = gathered(k)
    targets = first + torch.arange(len(q), device=q.device)
    return 2 * temperature * nn.functional.cross_entropy(q @ keys.T / temperature, targets)


class MoCo(MomentumPair):
    """MoCo-v3: each of two views shall be told from all other images of the step, by its predicted likeness
    to the momentum copy's other view.

    A projector (three layers of width `hidden`, the last of width `projection`) and, in the learning half
    alone, a predictor (two) stand behind the ViT; both have batch normalisation, the last one without scale
    and shift, and are thrown away. The loss is `info_nce` of both views, with both roles. freeze_patches:
    leave the patch projection as it is drawn, which keeps training stable (section 4.1; `draw_patches` draws
    it as published). `result`: the ViT that learns.

    Source: arXiv 2104.02057, algorithm 1 and appendix A. As in the published code the copy has moved before
    it makes keys. Departures: positions and first weights are the ViT's own, not fixed sines and Xavier's;
    AdamW decays there biases, norms and the token too.
    """

    def __init__(
        self,
        vit: VisionTransformer,
        *,
        projection: int = 256,
        hidden: int = 4096,
        temperature: float = 0.2,
        momentum: float = 0.99,
        freeze_patches: bool = True,
    ):
        if not temperature > 0:
            raise ValueError(f"temperature={temperature}: it must be above 0; MoCo-v3 has 0.2")
        super().__init__(vit, momentum)
        self.temperature = temperature
        if freeze_patches:
            vit.patch_embed.requires_grad_(False)
        self.projector = _perceptron(vit.num_features, hidden, hidden, projection)
        self.predictor = _perceptron(projection, hidden, projection)
        self.momentum_projector = _copy(self.projector)

    @property
    def result(self) -> nn.Module:
        """The ViT that learns."""
        return self.vit

    def following(self) -> list[tuple[nn.Module, nn.Module]]:
        """ViT and projector, and their copies."""
        return [(self.vit, self.momentum_vit), (self.projector, self.momentum_projector)]

    def forward(self, views: Tensor) -> Tensor:
        """The loss, a scalar, of views (B, 2, 3, height, width)."""
        first, second = views.unbind(1)
        queries = [self.predictor(self.projector(features(self.vit, view))) for view in (first, second)]
        with torch.no_grad():
            keys = [self.momentum_projector(features(self.momentum_vit, view)) for view in (first, second)]
        return sum(info_nce(q, k, self.temperature) for q, k in zip(queries, keys[::-1]))


def _perceptron(*widths: int) -> nn.Sequential:
    """Linear layers without biases, each followed by batch normalisation; between them ReLU."""
    layers: list[nn.Module] = []
    for number, (before, after) in enumerate(pairwise(widths), 1):
        last = number == len(widths) - 1
        layers += [nn.Linear(before, after, bias=False), BatchNorm(after, affine=not last)]
        layers += [] if last else [nn.ReLU()]
    return nn.Sequential(*layers)


# --- DINO ---


class Prototypes(nn.Module):
    """The last layer of DINO's head: the cosines of features with learned directions, (B, width) to (B,
    outputs), times a learned length of each where `lengths`, else 1."""

    def __init__(self, width: int, outputs: int, lengths: bool = False):
        super().__init__()
        self.directions = nn.Parameter(nn.Linear(width, outputs, bias=False).weight.detach())
        self.lengths = nn.Parameter(torch.ones(outputs, 1), requires_grad=lengths)

    def forward(self, x: Tensor, frozen: Tensor) -> Tensor:
        """The cosines; where `frozen`, a scalar of bool, the directions get no gradient."""
        directions = torch.where(frozen, self.directions.detach(), self.directions)
        weight = nn.functional.normalize(directions, dim=1) * self.lengths
        return nn.functional.linear(nn.functional.normalize(x, dim=1), weight)


class DinoHead(nn.Module):
    """Three layers with GELU between them, and `Prototypes`."""

    def __init__(self, width: int, hidden: int, bottleneck: int, outputs: int, lengths: bool):
        super().__init__()
        sizes = width, hidden, hidden, bottleneck
        layers = [part for pair in pairwise(sizes) for part in (nn.Linear(*pair), nn.GELU())]
        self.mlp = nn.Sequential(*layers[:-1])
        for layer in self.mlp[::2]:
            nn.init.trunc_normal_(layer.weight, std=0.02)
            nn.init.zeros_(layer.bias)
        self.prototypes = Prototypes(bottleneck, outputs, lengths)

    def forward(self, x: Tensor, frozen: Tensor) -> Tensor:
        """Features (B, width) to (B, outputs)."""
        return self.prototypes(self.mlp(x), frozen)


def dino_cross_entropy(
    student: Tensor, teacher: Tensor, centre: Tensor, student_temperature: float, teacher_temperature: Tensor
) -> Tensor:
    """Cross-entropy from the teacher's to the student's shares of the outputs, the mean over images and over
    all pairs of different views, a scalar.

    student: (V, B, K), teacher: (2, B, K), of the first two of these views; the teacher's are centred by
    `centre` (K,) and sharpened by a low temperature: softmax((t - c) / τ_t), without gradients. Source: arXiv
    2104.14294, equation 3 and algorithm 1.
    """
    log_p = (student / student_temperature).log_softmax(-1)
    q = ((teacher - centre) / teacher_temperature).softmax(-1).detach()
    others = log_p.sum(0) - log_p[: len(q)]  # of each of the teacher's views, all that the student saw but it
    return -(q * others).sum(-1).mean() / (len(log_p) - 1)


class Dino(MomentumPair):
    """DINO: what the momentum copy, the teacher, says of a large view the student shall say of all others,
    large and small; nothing is told apart.

    Both have a head of `outputs` (a `DinoHead`); that nothing collapses to one answer is due to the teacher's
    `centre`, the running mean of its outputs, taken from them, and to its low temperature. The first two
    views are large, and the teacher sees these alone; the others (`atrun.data.views.looks(local=8)`) are
    small parts of the image. local_size: compute them at so many pixels a side, as published (96 of 224),
    which takes a ViT with dynamic_img_size=True; None: at full size. teacher_temperature: at the first step
    and from the share `temperature_warmup` of the run on, linear between. frozen: the share of the run in
    which the head's last layer is not trained. lengths: learn the lengths of its directions too. `result`:
    the teacher's ViT. Any of timm's networks with `num_features` will do in place of a ViT.

    Source: arXiv 2104.14294, section 3 and appendix D; numbers are those of the published code's defaults.
    Departures: the teacher's temperature rises step by step, not epoch by epoch; small views are made small
    by the model, from crops of full size; positions are resampled as timm does it.
    """

    def __init__(
        self,
        vit: nn.Module,
        *,
        outputs: int = 65536,
        hidden: int = 2048,
        bottleneck: int = 256,
        student_temperature: float = 0.1,
        teacher_temperature: tuple[float, float] = (0.04, 0.04),
        temperature_warmup: float = 0.0,
        centre_momentum: float = 0.9,
        momentum: float = 0.996,
        frozen: float = 0.01,
        lengths: bool = False,
        local_size: int | None = None,
    ):
        if not min(student_temperature, *teacher_temperature) > 0:
            raise ValueError(f"temperatures {student_temperature}, {teacher_temperature}: above 0")
        super().__init__(vit, momentum)
        self.head = DinoHead(vit.num_features, hidden, bottleneck, outputs, lengths)
        self.momentum_head = _copy(self.head)
        self.student_temperature, self.teacher_temperature = student_temperature, teacher_temperature
        self.temperature_warmup, self.centre_momentum = temperature_warmup, centre_momentum
        self.frozen, self.local_size = frozen, local_size
        self.register_buffer("centre", torch.zeros(outputs))
        # What the teacher has said in the step, over all processes: the sum, and of how many views.
        self.register_buffer("said", torch.zeros(outputs))
        self.register_buffer("views_said", torch.zeros(()))

    @property
    def result(self) -> nn.Module:
        """The teacher's ViT."""
        return self.momentum_vit

    def following(self) -> list[tuple[nn.Module, nn.Module]]:
        """The student's ViT and head, and the teacher's."""
        return [(self.vit, self.momentum_vit), (self.head, self.momentum_head)]

    def share_of_momentum(self, step: int, steps: int) -> float:
        """The published code moves the teacher after the step, with the momentum of that step."""
        return (step - 1) / steps

    @torch.no_grad()
    def follow(self, step: int, steps: int) -> None:
        """As of any momentum pair; and the centre moves to the mean of what the teacher said in the step."""
        super().follow(step, steps)
        self.centre.lerp_(self.said / self.views_said, 1 - self.centre_momentum)
        self.said.zero_()
        self.views_said.zero_()

    def temperature_of_teacher(self) -> Tensor:
        """The teacher's temperature at this point of the run, a scalar."""
        first, last = self.teacher_temperature
        share = self.done / self.temperature_warmup if self.temperature_warmup else torch.ones_like(self.done)
        return first + (last - first) * share.clamp(max=1)

    def forward(self, views: Tensor) -> Tensor:
        """The loss, a scalar, of views (B, V, 3, height, width), V ≥ 2."""
        B = len(views)
        large, small = (part.transpose(0, 1).flatten(0, 1) for part in views.tensor_split([2], dim=1))
        frozen = self.done < self.frozen
        with torch.no_grad():
            teacher = _exact(self.momentum_head(features(self.momentum_vit, large), frozen))
            if self.training:
                self.said += summed(teacher.sum(0))
                self.views_said += summed(teacher.new_tensor(float(len(teacher))))
        seen = [features(self.vit, large)]
        if len(small):
            if self.local_size is not None:
                size = (self.local_size,) * 2
                small = nn.functional.interpolate(small, size, mode="bicubic", antialias=True)
            seen.append(features(self.vit, small))
        student = _exact(self.head(torch.cat(seen), frozen))
        return dino_cross_entropy(
            student.unflatten(0, (-1, B)),
            teacher.unflatten(0, (2, B)),
            self.centre,
            self.student_temperature,
            self.temperature_of_teacher(),
        )
