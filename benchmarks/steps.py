"""How much a walk and a transfer step cost, as ratios within one run: `python benchmarks/steps.py [--model
NAME] [--rounds N]`.

Each round times every item once, in turn, so that a machine that slows down slows all of them; the figures
are medians over rounds of the ratio to the plain model's own time in the same round.
"""

import argparse
import statistics

import torch
from timing import seconds

from atlib import AttentionTransfer, Plan, create_vit, walk


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="vit_small_patch16_224")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    vit, student = (create_vit(options.model, num_classes=100).to(device).train() for _ in range(2))
    images = torch.randn(options.batch, 3, *vit.patch_embed.img_size, device=device)
    labels = torch.randint(100, (options.batch,), device=device)
    teacher = create_vit(options.model, num_classes=0).to(device)
    depth = len(vit.blocks)
    pairs = {
        "copy step": AttentionTransfer(teacher, student, Plan(how="copy")),
        "distill step, 3/4 of the layers": AttentionTransfer(
            teacher, student, Plan(how="distill", layers=range(3 * depth // 4))
        ),
    }

    def step(model, logits_of) -> None:
        model.zero_grad(set_to_none=True)
        output = logits_of()
        loss = torch.nn.functional.cross_entropy(output[0], labels) + output[1]
        loss.backward()

    def forward(compute) -> None:
        with torch.no_grad():
            compute()

    items = {
        "forward of the model": lambda: forward(lambda: vit(images)),
        "walk, forward": lambda: forward(lambda: walk(vit, images)),
        "fine-tuning step": lambda: step(vit, lambda: (vit(images), 0.0)),
        "the same through walk": lambda: step(vit, lambda: (walk(vit, images).logits, 0.0)),
    }
    items |= {name: lambda pair=pair: step(pair, lambda: pair(images)) for name, pair in pairs.items()}
    reference = {name: "forward of the model" if "forward" in name else "fine-tuning step" for name in items}

    for action in items.values():
        action()  # warm-up
    rounds = [{name: seconds(action) for name, action in items.items()} for _ in range(options.rounds)]
    print(
        f"{options.model}, batch {options.batch}, {device}, {torch.get_num_threads()} threads, torch"
        f" {torch.__version__}, {options.rounds} rounds"
    )
    for name in items:
        ratios = [seconds[name] / seconds[reference[name]] for seconds in rounds]
        print(
            f"{name:34} {statistics.median(seconds[name] for seconds in rounds):8.3f} s  "
            f" {statistics.median(ratios):5.2f} x {reference[name]} ({min(ratios):.2f} to {max(ratios):.2f})"
        )


if __name__ == "__main__":
    main()
