"""Which maps a student of sequences is told, by whom, what is made small; and what a translator says."""

import pytest
import torch

from atfamily.seq2seq import BEGIN, END, PAD, Maps, walk_sequences
from atfamily.sequence_transfer import OracleTransfer, SequenceTransfer
from atfamily.translation import translate, translation_loss
from atlib.losses import noted
from atlib.pair import student_of
from atlib.recipe import Recipe
from tests.helpers import random_maps
from tests.methods.test_seq2seq import HEADS, SOURCE, TARGET, TOLERANCE, small

KINDS = ("encoder", "decoder", "cross")
RIGHT = random_maps(3, 5, 6)


def right(source, rows):
    return RIGHT[:, :rows]


def pair(**how):
    return SequenceTransfer(small(1), small(2), **how).train()


def maps_of(model, name):
    layers = getattr(walk_sequences(model, SOURCE, TARGET), name)
    return {index: layer.map for index, layer in enumerate(layers)}


@pytest.mark.parametrize("name", KINDS)
def test_copied_maps_are_the_teachers_and_no_others(name):
    transfer = pair(**{name: "copy"})
    maps = Maps(**{name: maps_of(transfer.teacher, name)})
    expected = walk_sequences(transfer.student, SOURCE, TARGET, replace=maps)
    found = transfer(SOURCE, TARGET)
    torch.testing.assert_close(found.logits, expected.logits, **TOLERANCE)
    assert found.transfer_loss == 0 and transfer.needs_teacher and student_of(transfer) is transfer.student
    found.logits.sum().backward()
    for kind, layers, part in zip(
        KINDS,
        (transfer.student.encoder, transfer.student.decoder, transfer.student.decoder),
        ("attention", "attention", "cross"),
    ):
        for layer in layers:
            attention = getattr(layer, part)
            assert (attention.q.weight.grad is None) == (attention.k.weight.grad is None) == (kind == name)
            assert attention.v.weight.grad is not None
    assert all(parameter.grad is None for parameter in transfer.teacher.parameters())
    assert torch.equal(transfer.eval()(SOURCE, TARGET).logits, found.logits), "at inference too"


@pytest.mark.parametrize("name", KINDS)
def test_distilled_maps_by_hand(name):
    transfer = pair(**{name: "distill"})
    loss = transfer(SOURCE, TARGET).transfer_loss
    theirs, own = maps_of(transfer.teacher, name), maps_of(transfer.student, name)
    expected = 0.0
    for layer in (0, 1):
        rows = [
            -sum(p * q.log() for p, q in zip(theirs[layer][b, h, i], own[layer][b, h, i]) if p > 0)
            for b in range(3)
            for h in range(HEADS)
            for i, word in enumerate((SOURCE if name == "encoder" else TARGET)[b])
            if word != PAD
        ]
        expected += sum(rows) / len(rows)
    torch.testing.assert_close(loss, expected, **TOLERANCE)
    loss.backward()
    assert transfer.student.encoder[0].attention.q.weight.grad.abs().max() > 0
    alone = transfer.eval()(SOURCE, TARGET)
    assert alone.transfer_loss == 0 and not transfer.needs_teacher
    assert torch.equal(alone.logits, transfer.student(SOURCE, TARGET))


def test_the_oracle_is_told_to_all_heads_and_layers():
    student = small(2)
    transfer = OracleTransfer(right, student)
    p = dict.fromkeys((0, 1), RIGHT[:, None])
    expected = walk_sequences(student, SOURCE, TARGET, replace=Maps(cross=p)).logits
    assert torch.equal(transfer(SOURCE, TARGET).logits, expected)
    assert transfer.teachers == () and transfer.needs_teacher
    distilled = OracleTransfer(right, student, "distill")
    assert not distilled.needs_teacher and distilled(SOURCE, TARGET).transfer_loss > 0


def test_what_the_teacher_gives_to_words_that_the_student_lacks_is_left_out_of_the_loss():
    transfer, shown = pair(cross="distill"), SOURCE.clamp(min=3)  # words in place of padding
    loss = transfer(torch.stack([SOURCE, shown], 1), TARGET).transfer_loss
    theirs, own = walk_sequences(transfer.teacher, shown, TARGET).cross, maps_of(transfer.student, "cross")
    expected, there = 0.0, SOURCE != PAD
    assert not there.all()
    for layer in (0, 1):
        rows = []
        for b in range(3):
            for p, q in zip(
                theirs[layer].map[b].transpose(0, 1)[TARGET[b] != PAD].flatten(0, 1)[:, there[b]],
                own[layer][b].transpose(0, 1)[TARGET[b] != PAD].flatten(0, 1)[:, there[b]],
            ):
                rows.append(-(p / p.sum() * q.log()).sum())
        expected += sum(rows) / len(rows)
    torch.testing.assert_close(loss, expected, **TOLERANCE)


# --- Translators


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_a_translators_loss_by_hand(smoothing):
    model = pair(cross="distill")
    recipe = Recipe(label_smoothing=smoothing, task_weight=0.5, transfer_weight=2.0)
    with noted() as notes:
        found = translation_loss(model, SOURCE, TARGET, recipe)
    logits, transfer = model(SOURCE, TARGET[:, :-1])
    words = []
    for row, word in (TARGET[:, 1:] != PAD).nonzero().tolist():
        log_p = logits[row, word].log_softmax(-1)
        words.append(-(1 - smoothing) * log_p[TARGET[row, word + 1]] - smoothing * log_p.mean())
    task = sum(words) / len(words)
    torch.testing.assert_close(found, 0.5 * task + 2 * transfer, **TOLERANCE)
    torch.testing.assert_close(notes["task_loss"], task.detach(), **TOLERANCE)
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
