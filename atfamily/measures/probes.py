"""How good features are without training the network further: nearest neighbours, a linear classifier."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from atfamily.measures.checks import check_features, check_labels
from atlib.analysis import vit_of, walks
from atlib.data import Images

TEMPERATURE = 0.07  # of the votes of neighbours: Wu et al. 2018 (arXiv 1805.01978)
BLOCK = 2**24  # similarities at a time, 64 MB


class ProbeResult(NamedTuple):
    """test_accuracy: at `lr`, the rate best in validation; validation_accuracies: {rate: accuracy} of all."""

    test_accuracy: float
    lr: float
    validation_accuracies: dict[float, float]


def features(model: nn.Module, images: Images, layer: int | None = None, batch_size: int = 500) -> Tensor:
    """What a model's head would read, for all images in order: (n, D) on the CPU, float32.

    The tokens after the last block (or after block `layer`) pass the model's final norm and are pooled as the
    model itself pools, to the class token or a mean. model: a ViT or an `AttentionTransfer`, whose student is
    probed, with its teacher where the plan copies. Eval mode, no gradients.
    """
    vit = vit_of(model)
    layer = len(vit.blocks) - 1 if layer is None else layer
    with torch.no_grad():
        last = (vit.norm(seen.stream[layer]) for (seen,) in walks([model], images, batch_size))
        return torch.cat([vit.forward_head(tokens, pre_logits=True).float().cpu() for tokens in last])


def knn_accuracy(
    train_x: Tensor, train_y: Tensor, test_x: Tensor, test_y: Tensor, ks: Sequence[int] = (1, 5, 10, 20, 50)
) -> dict[int, float]:
    """Accuracy of a vote of the k most similar training images, for every k: {k: accuracy}.

    x: features (n, D); y: labels (n,). Similarity s is the cosine, a neighbour's vote exp(s / 0.07). Test
    images are taken a block at a time. Source: Wu et al. 2018 (arXiv 1805.01978), as used by DINO (arXiv
    2104.14294).
    """
    train_y, test_y = _check_sets(train=(train_x, train_y), test=(test_x, test_y))
    if min(ks) < 1:  # no vote at all would be one for class 0
        raise ValueError(f"ks={list(ks)}: at least 1 neighbour votes")
    train_x, test_x = (nn.functional.normalize(x.float(), dim=1) for x in (train_x, test_x))
    right = dict.fromkeys(ks, 0)
    for x, y in zip(*(tensor.split(max(1, BLOCK // len(train_x))) for tensor in (test_x, test_y))):
        similarity, nearest = (x @ train_x.T).topk(max(ks), dim=1)  # most similar first
        for k in ks:
            votes = x.new_zeros(len(x), int(train_y.max()) + 1)
            votes.scatter_add_(1, train_y[nearest[:, :k]], (similarity[:, :k] / TEMPERATURE).exp())
            right[k] += (votes.argmax(1) == y).sum().item()
    return {k: count / len(test_y) for k, count in right.items()}


def linear_probe(
    train_x: Tensor,
    train_y: Tensor,
    validation_x: Tensor,
    validation_y: Tensor,
    test_x: Tensor,
    test_y: Tensor,
    lrs: Sequence[float] = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0),
    steps: int = 1000,
    batch_size: int = 256,
    seed: int = 0,
    adaptive: bool = False,
) -> ProbeResult:
    """Train a linear classifier on features (n, D) with labels (n,), at the learning rate that validation
    prefers.

    Features are standardised by the training set's mean and standard deviation. SGD with momentum 0.9 and a
    cosine schedule, weights from 0, no weight decay; all rates see the same batches, drawn by `seed`. Of
    equal validation accuracies the smaller rate wins; the test set is looked at for that rate alone.

    adaptive: by LARS (arXiv 1708.03888; timm's), as the probes of MAE (arXiv 2111.06377, appendix A.1) and
    AttnDistill (arXiv 2210.00944, table 9); rates are then larger, and weights start near 0 (standard
    deviation 0.01), where they have a norm.
    """
    train_y, validation_y, test_y = _check_sets(
        train=(train_x, train_y), validation=(validation_x, validation_y), test=(test_x, test_y)
    )
    mean, deviation = train_x.float().mean(0), train_x.float().std(0)
    deviation = deviation.where(deviation > 0, 1)  # a constant feature says nothing, and stays 0
    train_x, validation_x, test_x = ((x.float() - mean) / deviation for x in (train_x, validation_x, test_x))

    lrs = sorted(lrs)
    sizes = train_x.shape[1], int(train_y.max()) + 1
    # usual weights would be drawn from the global generator
    probes = [nn.utils.skip_init(nn.Linear, *sizes, device=train_x.device) for _ in lrs]
    for weights in (part for probe in probes for part in probe.parameters()):
        nn.init.zeros_(weights)
    generator = torch.Generator().manual_seed(seed)
    if adaptive:
        from timm.optim import Lars  # other probes do not need it

        first = 0.01 * torch.randn(probes[0].weight.shape, generator=torch.Generator().manual_seed(seed))
        for probe in probes:
            probe.weight.data.copy_(first)
        groups = [
            {"params": [part], "lr": lr, "always_adapt": part.ndim > 1}
            for probe, lr in zip(probes, lrs)
            for part in (probe.weight, probe.bias)
        ]
        optimizer = Lars(groups, momentum=0.9)
    else:
        groups = [{"params": probe.parameters(), "lr": lr} for probe, lr in zip(probes, lrs)]
        optimizer = torch.optim.SGD(groups, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    order = torch.empty(0, dtype=torch.long)
    for _ in range(steps):
        if len(order) == 0:
            order = torch.randperm(len(train_x), generator=generator)
        batch, order = order[:batch_size].to(train_x.device), order[batch_size:]
        optimizer.zero_grad()
        # Each has its own gradient.
        sum(nn.functional.cross_entropy(probe(train_x[batch]), train_y[batch]) for probe in probes).backward()
        optimizer.step()
        scheduler.step()
    accuracies = {lr: _accuracy(probe, validation_x, validation_y) for lr, probe in zip(lrs, probes)}
    best = max(accuracies, key=accuracies.get)
    return ProbeResult(_accuracy(probes[lrs.index(best)], test_x, test_y), best, accuracies)


def mlp_probe(
    train_x: Tensor,
    train_y: Tensor,
    test_x: Tensor,
    test_y: Tensor,
    width: int = 128,
    steps: int = 800,
    batch_size: int = 256,
    seed: int = 0,
) -> float:
    """Test accuracy of a network with one hidden layer on features (n, D) with labels (n,): what a linear
    probe cannot read because it lies in how features go together.

    Features are standardised as in `linear_probe`; AdamW at lr 3e-3 with weight decay 0.3 and a cosine
    schedule.
    """
    train_y, test_y = _check_sets(train=(train_x, train_y), test=(test_x, test_y))
    mean, deviation = train_x.mean(0), train_x.std(0)
    deviation = deviation.where(deviation > 0, 1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = nn.Sequential(
            nn.Linear(train_x.shape[1], width), nn.GELU(), nn.Linear(width, int(train_y.max()) + 1)
        )
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3, weight_decay=0.3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        batch = torch.randint(len(train_x), (batch_size,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(net((train_x[batch] - mean) / deviation), train_y[batch]).backward()
        optimizer.step()
        scheduler.step()
    return _accuracy(net, (test_x - mean) / deviation, test_y)


@torch.no_grad()
def _accuracy(probe: nn.Module, x: Tensor, y: Tensor) -> float:
    logits = probe(x)
    right = (logits.argmax(1) == y) & logits.isfinite().all(1)  # a probe that diverged is right about nothing
    return right.double().mean().item()


def _check_sets(**sets: tuple[Tensor, Tensor]) -> list[Tensor]:
    """The labels of all sets as int64, each {name: (features, labels)}; the training set knows all labels."""
    train_y = sets["train"][1]
    for name, (x, y) in sets.items():
        check_features(x, f"{name}_x", rows=1)
        check_labels(y, len(x), name=f"{name}_y")
        unknown = sorted(set(y.tolist()) - set(train_y.tolist()))
        if unknown:
            raise ValueError(f"{name}_y has labels that train_y never shows: {unknown[:5]}")
    if len(train_y.unique()) == 1:
        raise ValueError(f"all training images have the label {train_y[0].item()}: a single class is no task")
    return [y.long() for _, y in sets.values()]
