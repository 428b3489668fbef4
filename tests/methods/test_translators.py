"""A translator's loss word by word, and its translations step by step."""

import pytest
import torch

from atfamily.seq2seq import BEGIN, END, PAD
from atfamily.sequence_transfer import SequenceTransfer
from atfamily.translation import translate, translation_loss
from atlib.losses import noted
from atlib.recipe import Recipe
from tests.methods.test_seq2seq import SOURCE, TARGET, small


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_loss_by_hand(smoothing):
    model = SequenceTransfer(small(1), small(2), cross="distill").train()
    recipe = Recipe(label_smoothing=smoothing, task_weight=0.5, transfer_weight=2.0)
    with noted() as notes:
        found = translation_loss(model, SOURCE, TARGET, recipe)
    logits, transfer = model(SOURCE, TARGET[:, :-1])
    words = []
    for row, word in (TARGET[:, 1:] != PAD).nonzero().tolist():
        log_p = logits[row, word].log_softmax(-1)
        words.append(-(1 - smoothing) * log_p[TARGET[row, word + 1]] - smoothing * log_p.mean())
    task = sum(words) / len(words)
    torch.testing.assert_close(found, 0.5 * task + 2 * transfer, rtol=0, atol=1e-12)
    torch.testing.assert_close(notes["task_loss"], task.detach(), rtol=0, atol=1e-12)
    assert notes["transfer_loss"] == transfer > 0


def test_translations_are_the_likeliest_words_one_after_another():
    model = small(5).train()
    found = translate(model, SOURCE, 6)
    assert model.training and found.shape[1] <= 6
    model.eval()
    for row in range(3):
        said = [BEGIN]
        while len(said) <= found.shape[1] and said[-1] != END:
            logits = model(SOURCE[row : row + 1], torch.tensor([said]))[0, -1]
            logits[[PAD, BEGIN]] = -1e9
            said.append(logits.argmax().item())
        assert found[row].tolist() == said[1:] + [PAD] * (found.shape[1] - len(said) + 1)
