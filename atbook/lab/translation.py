"""The study of an encoder and a decoder: which maps help a translator, those among the words of a sentence or
those between two sentences, a teacher's or the right ones."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import nn

from atbook.lab.scales import SentenceScale
from atbook.lab.study import RIGHT, Measure, Sources, Variant, scratch, study
from atbook.lab.tuning import Ladder, Range
from atbook.records import pack_bits
from atbook.worlds.phrases import oracle
from atfamily.measures.bleu import bleu
from atfamily.sentences import Sentences
from atfamily.seq2seq import END, EncoderDecoder
from atfamily.sequence_transfer import OracleTransfer, SequenceTransfer
from atfamily.translation import translate, translation_loss
from atlib.loading import seed_for

TEACHER = "teacher"


def translated(model: nn.Module, sentences: Sentences) -> dict:
    """How a model translates sentences, word by word: the share that is right to the last word, and BLEU."""
    longest, device = sentences.targets.shape[1] - 1, next(model.parameters()).device
    outputs = [translate(model, sources.to(device), longest).cpu() for sources, _ in sentences.loader(500)]
    outputs = [nn.functional.pad(words, (0, longest - words.shape[1])) for words in outputs]
    words, meant = torch.cat(outputs), sentences.targets[:, 1:]
    right = (words == meant).all(1)
    of_words = [[[word for word in row if word > END] for row in table.tolist()] for table in (words, meant)]
    return {"accuracy": right.double().mean().item(), "bleu": bleu(*of_words), RIGHT: pack_bits(right)}


TRANSLATED = Measure("accuracy", translated)


def _teacher(sources: Sources) -> EncoderDecoder:
    torch.manual_seed(seed_for(sources.seed, "teacher"))
    return sources.scale.student.build()


def _from_teacher(how: Mapping[str, str], sources: Sources) -> SequenceTransfer:
    return SequenceTransfer(sources.model_of(TRANSLATION, TEACHER), scratch(sources), **how)


def _from_oracle(how: str, sources: Sources) -> OracleTransfer:
    return OracleTransfer(oracle, scratch(sources), how)


# Every way has a rate of its own, and what is distilled a weight too.
_RATE = Ladder("lr", (1e-3, 2e-3, 4e-3))
_RATES = (2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)
_RATE_AND_WEIGHT = Range(
    {"lr": _RATES, "transfer_weight": (0.1, 0.3, 1.0, 3.0, 10.0)}, {"lr": 2e-3, "transfer_weight": 1.0}, {}
)


_HOW = {"loss": translation_loss, "measure": TRANSLATED}


def _told(
    name: str, build: Callable[[Sources], nn.Module], trials: Sequence[Mapping] = _RATE, **options
) -> Variant:
    return Variant(name, build, None, trials=trials, **_HOW, **options)


def _by_teacher(name: str, trials: Sequence[Mapping] = _RATE, **how: str) -> Variant:
    return _told(name, partial(_from_teacher, how), trials, needs=(TEACHER,))


TRANSLATION = study(
    "translation",
    Variant(TEACHER, _teacher, None, {"steps": 2000}, ({"lr": 2e-3},), images=SentenceScale.plenty, **_HOW),
    _told("scratch", scratch),
    _told("scratch, static", scratch, student={"static": True}),
    _by_teacher("self copied", encoder="copy", decoder="copy"),
    _by_teacher("cross copied", cross="copy"),
    _by_teacher("both copied", encoder="copy", decoder="copy", cross="copy"),
    _by_teacher("cross distilled", _RATE_AND_WEIGHT, cross="distill"),
    _told("oracle copied", partial(_from_oracle, "copy")),
    _told("oracle distilled", partial(_from_oracle, "distill"), _RATE_AND_WEIGHT),
    _told("oracle of another order copied", partial(_from_oracle, "copy"), twin="order"),
)
