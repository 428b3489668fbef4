"""The study of translators: what each is told, how it is measured, and that a run leaves its record."""

import pickle
from dataclasses import replace

import pytest
import torch

from atbook.lab import commands
from atbook.lab import study as runner
from atbook.lab.scales import SentenceScale, Translator, scales
from atbook.lab.study import Place, Run, Sources, built_on, run_study
from atbook.lab.translation import TRANSLATION, translated
from atbook.lab.tuning import Ladder, Range
from atbook.records import read_file, unpack_bits
from atbook.worlds.phrases import Language, generate_phrases, oracle, phrase_sentences
from atfamily.seq2seq import BEGIN, END, PAD, EncoderDecoder, StaticMixing
from atfamily.sequence_transfer import How, OracleTransfer, SequenceTransfer
from atfamily.translation import translation_loss
from atlib.checkpoint import save_weights
from atlib.pair import student_of
from atlib.train import recipe as recipes
from tests.helpers import randomise, same

TOY = SentenceScale(
    "phrases",
    Translator("phrases", {"width": 16, "hidden": 16}),
    (),
    None,
    replace(recipes.STUDENT, steps=2, batch_size=4),
    {},
    labels=8,
    makes_teachers=False,
    unlabelled=12,
    held_out_sizes={"validation": 4, "test": 6},
)
TOLD = {
    "self copied": How("copy", "copy", None),
    "cross copied": How(None, None, "copy"),
    "both copied": How("copy", "copy", "copy"),
    "cross distilled": How(None, None, "distill"),
    "oracle copied": How(None, None, "copy"),
    "oracle distilled": How(None, None, "distill"),
    "oracle of another order copied": How(None, None, "copy"),
}


@pytest.fixture(autouse=True)
def toy_scale(monkeypatch):
    monkeypatch.setattr(runner, "scales", lambda data=None: {"phrases": TOY})


@pytest.fixture
def place(tmp_path):
    return Place("phrases", None, tmp_path / "results", tmp_path / "work")


def test_what_each_is_told(place):
    teacher = randomise(TOY.student.build(), 1)
    save_weights(built_on(TRANSLATION, place, "teacher", 0).weights, teacher)
    fresh = TRANSLATION.variant("scratch").build(Sources(place, TOY, 0)).state_dict()
    for variant in TRANSLATION.variants:
        student = Translator("phrases", {**TOY.student.overrides, **variant.student})
        model = variant.build(Sources(place, replace(TOY, student=student), 0))
        assert variant.loss is translation_loss and variant.measure.figure == "accuracy"
        if variant.name in TOLD:
            assert model.how == TOLD[variant.name]
            assert isinstance(model, OracleTransfer if "oracle" in variant.name else SequenceTransfer)
            assert (variant.needs == ("teacher",)) == isinstance(model, SequenceTransfer)
            if isinstance(model, SequenceTransfer):
                assert same(model.teacher.state_dict(), teacher.state_dict())
        else:
            assert type(model) is EncoderDecoder
        is_static = isinstance(student_of(model).encoder[0].attention, StaticMixing)
        assert is_static == (variant.name == "scratch, static")
        assert is_static or same(student_of(model).state_dict(), fresh) == (variant.name != "teacher")
        assert variant.twin == ("order" if "another" in variant.name else None)


def test_all_but_the_teacher_search_in_the_same_way(place):
    scale = scales()["phrases"]
    budgets = {v.base(scale, place).steps for v in TRANSLATION.variants if v.name != "teacher"}
    assert budgets == {scale.training.steps}
    for variant in TRANSLATION.variants:
        if "distilled" in variant.name:
            assert isinstance(variant.trials, Range)
        elif variant.name != "teacher":
            assert isinstance(variant.trials, Ladder)
        assert pickle.loads(pickle.dumps(Run(TRANSLATION, place, variant.name, 0))).method == variant.name
    assert commands.EXPERIMENTS["translation"] is TRANSLATION and TRANSLATION.only == ("phrases",)


def test_the_teacher_learns_other_sentences_than_students():
    scale = scales()["phrases"]
    many, few = scale.plenty(0), scale.labelled(0)
    assert (len(many), len(few)) == (20_000, 1000)
    assert not torch.equal(many.sources[:1000], few.sources)
    assert torch.equal(TOY.labelled(3).sources, phrase_sentences(generate_phrases("train", 8, 3)).sources)
    other = TOY.labelled(3, twin="order").sources
    drawn = generate_phrases("train", 8, 3, other_order=True)
    assert torch.equal(other[:, 1], torch.from_numpy(drawn.source))
    with pytest.raises(ValueError, match="'routing'.*'order'"):
        TOY.labelled(0, twin="routing")


def test_a_model_that_knows_everything_is_right(monkeypatch):
    """And one that is wrong in one word of half of the sentences is right in the others."""
    drawn = generate_phrases("test", 40)
    sentences = phrase_sentences(drawn)
    answers = dict(zip(map(tuple, drawn.source.tolist()), drawn.target.tolist()))

    class Knows(torch.nn.Linear):
        wrong = 0

        def forward(self, sources, target):
            logits = torch.zeros(*target.shape, Language().target_words)
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


def test_with_the_right_map_only_the_dictionary_is_left():
    """Every word of the target can be read at the place that the map shows."""
    drawn = generate_phrases("test", 30)
    source, told = torch.from_numpy(drawn.source), oracle(torch.from_numpy(drawn.source), 11)
    shown = source.gather(1, told.argmax(-1))
    meanings = {}
    for word, said in zip(shown.flatten().tolist(), drawn.target[:, 1:].flatten().tolist()):
        if said != PAD:
            assert meanings.setdefault(word, said) == said


METHODS = ("teacher", "cross copied", "oracle of another order copied")


def test_a_small_study_leaves_its_records(place, monkeypatch):
    few = replace(
        TRANSLATION,
        variants=tuple(
            replace(TRANSLATION.variant(name), changes={}, trials=({"lr": 1e-3},)) for name in METHODS
        ),
    )
    monkeypatch.setattr("atbook.lab.translation.TRANSLATION", few)
    records = run_study(few, place, 1)
    assert [record.method for record in records] == list(METHODS)
    for record in records:
        assert set(record.results) == {"test_accuracy", "test_bleu", "test_right"}
        assert 0 <= record.results["test_bleu"] <= 1 and len(unpack_bits(record.results["test_right"])) == 6
        assert record.config["recipe"]["student"] == "EncoderDecoder"
        assert "teacher" not in record.config["recipe"]
    assert run_study(few, place, 1) == records == read_file(place.records("translation"))
