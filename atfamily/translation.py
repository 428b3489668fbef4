"""What a translator learns, and how it translates: word by word."""

import torch
from torch import Tensor, nn

from atfamily.seq2seq import BEGIN, END, PAD
from atlib._util import in_eval_mode
from atlib.attention_transfer import Transferred
from atlib.losses import note
from atlib.objectives import as_transferred
from atlib.processes import require_undivided
from atlib.recipe import Recipe


def translation_loss(model: nn.Module, sources: Tensor, targets: Tensor, recipe: Recipe) -> Tensor:
    """task_weight · cross-entropy of every word, given those before it, plus λ · transfer loss.

    sources: (B, N), targets: (B, M + 1) from `BEGIN` to `END`, as `atfamily.sentences` has them. The mean is
    over the words of the batch, padding left out, with the recipe's label smoothing (arXiv 1706.03762,
    section 5.4). Both parts are noted as in `student_loss`.
    """
    require_undivided(recipe, "the loss is a mean over words, and parts of a step have unequally many")
    output = model(sources, targets[:, :-1])
    logits, transfer_loss = as_transferred(output)
    of_task = nn.functional.cross_entropy(
        logits.flatten(0, 1),
        targets[:, 1:].flatten(),
        ignore_index=PAD,
        label_smoothing=recipe.label_smoothing,
    )
    note("task_loss", of_task)
    if isinstance(output, Transferred):
        note("transfer_loss", transfer_loss)
    return recipe.task_weight * of_task + recipe.transfer_weight * transfer_loss


@torch.no_grad()
def translate(model: nn.Module, sources: Tensor, longest: int) -> Tensor:
    """The most likely next word, again and again, until `END` or `longest` words: int64 (B, at most longest),
    `PAD` after `END`.

    model: an `EncoderDecoder` or a pair, which runs in eval mode. Every step computes all words anew.
    """
    target = sources.new_full((len(sources), 1), BEGIN)
    ended = torch.zeros(len(sources), dtype=torch.bool, device=sources.device)
    with in_eval_mode(model):
        for _ in range(longest):
            logits = as_transferred(model(sources, target)).logits[:, -1].clone()
            logits[:, [PAD, BEGIN]] = -torch.inf  # neither is a word of a translation
            word = logits.argmax(-1).masked_fill(ended, PAD)
            target = torch.cat([target, word[:, None]], 1)
            ended |= word == END
            if ended.all():
                break
    return target[:, 1:]
