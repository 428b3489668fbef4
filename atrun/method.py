"""The methods by which a ViT is trained."""

from enum import StrEnum

from atlib._util import require_known


def _one_of(doc: str, *kinds: str | property) -> property:
    """Whether a method is one of these, or has one of these properties."""

    def holds(method: str) -> bool:
        return any(method == kind if isinstance(kind, str) else kind.fget(method) for kind in kinds)

    return property(holds, doc=doc)


class Method(StrEnum):
    """A method; a member is its name, `Method.COPY == "copy"`, in config.json and records too."""

    SCRATCH = "scratch"
    FINE_TUNE = "fine-tune"  # starts from the teacher's weights
    COPY = "copy"
    DISTILL = "distill"
    FEATURES = "features"  # distils the residual stream: what attention transfer is compared with
    LOGITS = "logits"  # distils the predictions of a teacher that knows the classes
    HARD_LOGITS = "hard-logits"  # likewise, its most likely class
    DISTILLATION_TOKEN = "distillation-token"  # likewise, by a token of the student's beside its class token
    MEAN_MAPS = "mean-maps"  # copies the teacher's mean map of some training images, the same for all
    # make a teacher, without labels
    MAE = "mae"
    MOCO = "moco"
    DINO = "dino"
    SIMMIM = "simmim"
    # likewise, with a teacher of their own
    DMAE = "dmae"
    ATTNDISTILL = "attndistill"
    # without labels, by the transfer loss alone
    DISTILL_UNLABELLED = "distill-unlabelled"
    FEATURES_UNLABELLED = "features-unlabelled"

    def __repr__(self) -> str:  # in messages, where it is a value among others
        return repr(self.value)

    is_unlabelled = _one_of("Whether it distils without labels.", DISTILL_UNLABELLED, FEATURES_UNLABELLED)
    contrasts = _one_of("Whether it compares views of images.", MOCO, DINO)
    hides_patches = _one_of("Whether it shows a part of an image.", MAE, DMAE, SIMMIM)
    has_pretext = _one_of("Whether it makes a task of images.", contrasts, hides_patches, ATTNDISTILL)
    pretrains = _one_of("Whether it makes a teacher, without labels.", has_pretext, is_unlabelled)
    transfers = _one_of("Whether it transfers attention, by a `Plan`.", COPY, DISTILL, DISTILL_UNLABELLED)
    distils_features = _one_of("Whether it distils the residual stream.", FEATURES, FEATURES_UNLABELLED)
    reads_logits = _one_of("Whether its teacher says classes.", LOGITS, HARD_LOGITS, DISTILLATION_TOKEN)
    keeps_weights_apart = _one_of(
        "Whether something of a teacher reaches a student with weights of its own.",
        *(transfers, distils_features, reads_logits, MEAN_MAPS),
    )
    has_transfer_loss = _one_of(
        "Whether the teacher speaks through a loss, with the recipe's `transfer_weight`.",
        *(DISTILL, DISTILL_UNLABELLED, distils_features, reads_logits, DMAE, ATTNDISTILL),
    )
    needs_teacher = _one_of(
        "Whether a run must have a teacher; no other run has one.",
        *(keeps_weights_apart, FINE_TUNE, DMAE, ATTNDISTILL),
    )

    @property
    def how(self) -> str | None:
        """Of a method that transfers attention: "copy" or "distill", as its `Plan` says."""
        return self.value.removesuffix("-unlabelled") if self.transfers else None


# Those whose recipe needs no name of a model: `atrun.generic` derives it.
DERIVED = tuple(
    method
    for method in Method
    if method.is_unlabelled or not method.pretrains and method is not Method.MEAN_MAPS
)


def method_of_run(name: str) -> Method:
    """The method of that name. Raises `ValueError` where there is none."""
    require_known("method", name, list(Method))
    return Method(name)
