"""Attention transfer between Transformers of sequences: a student is handed the maps of a teacher that reads
the same sentence, or cross-attention that is known to be right."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from atfamily.seq2seq import PAD, EncoderDecoder, Maps, walk_sequences
from atlib._util import require_known
from atlib.attention import Seen, forbid
from atlib.attention_transfer import Transferred
from atlib.losses import map_cross_entropy
from atlib.pair import Pair
from atlib.plan import HOW

# (source, int64 (B, N); rows M) -> the right cross-attention, (B, M, N), whose row m is of what comes after
# the m-th word of the target
Oracle = Callable[[Tensor, int], Tensor]


class How(NamedTuple):
    """How the maps of each kind of attention are told: "copy", "distill", or None for not at all."""

    encoder: str | None = None
    decoder: str | None = None
    cross: str | None = None


class ToldMaps(Pair):
    """A Transformer that is told maps, of the kinds and in the way that `how` says.

    Copied, they stand in place of the student's own, at inference too. The transfer loss is that of what is
    distilled: the cross-entropy from the told map to the student's, the mean over batch, heads and the rows
    of words, summed over layers and kinds. In eval mode it is 0.

    A source may come in two, (B, 2, N): the student reads the first, and the maps are those of the second.
    """

    not_walkable = "it translates sequences: walk its .student with atfamily.seq2seq.walk_sequences"

    def __init__(self, student: EncoderDecoder, *teachers: EncoderDecoder, how: How):
        for name, word in how._asdict().items():
            if word is not None:
                require_known(name, word, HOW)
        if not any(how):
            raise ValueError("nothing is told: give 'copy' or 'distill' to encoder, decoder or cross")
        super().__init__(student, *teachers)
        self.how = how

    @property
    def needs_teacher(self) -> bool:
        """Whether a map is copied, so that the student works at inference only with what tells it."""
        return "copy" in self.how

    @abstractmethod
    def told(self, source: Tensor, target: Tensor) -> Maps:
        """The maps that the student is told, of all kinds that `how` names, as constants."""

    def forward(self, source: Tensor, target: Tensor) -> Transferred:
        """Student logits (B, M, words) and the unweighted transfer loss for source (B, N), or (B, 2, N), and
        target (B, M)."""
        source, shown = source.unbind(1) if source.ndim == 3 else (source, source)
        if not (self.training or self.needs_teacher):
            logits = self.student(source, target)
            return Transferred(logits, logits.new_zeros(()))
        given = self.told(shown, target)
        replace = Maps(*(maps if how == "copy" else {} for how, maps in zip(self.how, given)))
        seen = walk_sequences(self.student, source, target, replace=replace)
        loss = seen.logits.new_zeros(())
        if self.training:
            for name, how in self.how._asdict().items():
                if how == "distill":
                    words = (source if name == "encoder" else target) != PAD
                    loss = loss + _distilled(getattr(seen, name), getattr(given, name), words)
        return Transferred(seen.logits, loss)


def _distilled(layers: Sequence[Seen], given: Mapping[int, Tensor], words: Tensor) -> Tensor:
    """The cross-entropy of some layers' maps (B, H, queries, keys), over the queries that are words (B,
    queries)."""
    total = 0.0
    for index, p in given.items():
        log_p = layers[index].scores.log_softmax(-1)
        if (p * (layers[index].mask < 0)).any():  # another sentence's words, where the student has padding
            p = forbid(p, layers[index].mask)
        p = p.to(log_p.dtype).expand_as(log_p)
        total = total + map_cross_entropy(log_p.transpose(1, 2)[words], p.transpose(1, 2)[words])
    return total


class SequenceTransfer(ToldMaps):
    """A Transformer that takes from another one, of the same layers and heads, where words look: in the
    encoder, in the decoder, or from the decoder into the encoder (`cross`), each copied or distilled.

    """

    def __init__(
        self,
        teacher: EncoderDecoder,
        student: EncoderDecoder,
        *,
        encoder: str | None = None,
        decoder: str | None = None,
        cross: str | None = None,
    ):
        sizes = [
            (len(model.encoder), len(model.decoder), model.heads, model.static)
            for model in (teacher, student)
        ]
        if sizes[0] != sizes[1]:
            raise ValueError(f"(layers, layers, heads, static): teacher {sizes[0]}, student {sizes[1]}")
        super().__init__(student, teacher, how=How(encoder, decoder, cross))

    def told(self, source: Tensor, target: Tensor) -> Maps:
        """See `ToldMaps`."""
        with self.frozen_teachers():
            seen = walk_sequences(self.teacher, source, target)
        # clones outlive inference mode, which autograd needs
        return Maps(
            *(
                {index: layer.map.clone() for index, layer in enumerate(getattr(seen, name))} if how else {}
                for name, how in self.how._asdict().items()
            )
        )


class OracleTransfer(ToldMaps):
    """A Transformer that is told the right cross-attention, in all heads of all layers of its decoder: no
    teacher is needed. how: "copy" or "distill". Distilled, it is the training with known alignments of Chen
    et al. 2016 (arXiv 1607.01628), for all heads and layers."""

    def __init__(self, oracle: Oracle, student: EncoderDecoder, how: str = "copy"):
        super().__init__(student, how=How(cross=how))
        self.oracle = oracle

    def told(self, source: Tensor, target: Tensor) -> Maps:
        """See `ToldMaps`."""
        with torch.no_grad():
            p = self.oracle(source, target.shape[1])[:, None]
        return Maps(cross=dict.fromkeys(range(len(self.student.decoder)), p))
