"""The study of translators: what each is told, how it is measured, and that a run leaves its record."""

from dataclasses import replace

import torch

from atbook.lab import study as runner
from atbook.lab.scales import Translator, scales
from atbook.lab.study import Place, run_study
from atbook.lab.translation import TRANSLATION, translated
from atbook.records import read_file, unpack_bits
from atbook.worlds.phrases import TARGET_WORDS, generate_phrases, phrase_sentences
from atfamily.seq2seq import BEGIN, END, PAD

REAL = scales()["phrases"]
TOY = replace(
    REAL,
    student=Translator("phrases", {"width": 16, "hidden": 16}),
    training=replace(REAL.training, steps=2, batch_size=4),
    labels=8,
    unlabelled=12,
    held_out_sizes={"validation": 4, "test": 6},
)


def test_a_model_that_knows_everything_is_right():
    """And one that is wrong in one word of half of the sentences is right in the others."""
    drawn = generate_phrases("test", 40)
    sentences = phrase_sentences(drawn)
    answers = dict(zip(map(tuple, drawn.source.tolist()), drawn.target.tolist()))

    class Knows(torch.nn.Linear):
        wrong = 0

        def forward(self, sources, target):
            logits = torch.zeros(*target.shape, TARGET_WORDS)
            for row, source in enumerate(sources.tolist()):
                said = answers[tuple(source)]
                for place in range(target.shape[1]):
                    word = said[place + 1] if place + 1 < len(said) else PAD
                    if place == 1 and self.wrong and row % 2:
                        word = 3 if word != 3 else 4
                    logits[row, place, word] = 1
            return logits

    model = Knows(1, 1)
    figures = translated(model, sentences)
    assert figures["accuracy"] == figures["bleu"] == 1 and unpack_bits(figures["right"]).all()
    model.wrong = 1
    figures = translated(model, sentences)
    assert figures["accuracy"] == 0.5 and 0.5 < figures["bleu"] < 1
    assert unpack_bits(figures["right"]).tolist() == [True, False] * 20
    assert (sentences.targets[:, 0] == BEGIN).all() and (drawn.source == END).sum() == 40


METHODS = ("teacher", "cross copied", "oracle of another order copied")


def test_a_small_study_leaves_its_records(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "scales", lambda data=None: {"phrases": TOY})
    place = Place("phrases", None, tmp_path / "results", tmp_path / "work")
    variants = [replace(TRANSLATION.variant(name), changes={}, trials=({"lr": 1e-3},)) for name in METHODS]
    few = replace(TRANSLATION, variants=tuple(variants))
    monkeypatch.setattr("atbook.lab.translation.TRANSLATION", few)
    records = run_study(few, place, 1)
    assert [record.method for record in records] == list(METHODS)
    for record in records:
        assert set(record.results) == {"test_accuracy", "test_bleu", "test_right"}
        assert len(unpack_bits(record.results["test_right"])) == 6
    assert run_study(few, place, 1) == records == read_file(place.records("translation"))
