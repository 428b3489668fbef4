"""The methods by which a ViT is trained."""

from enum import StrEnum

from atlib._util import require_known


def _one_of(*methods: str) -> property:
    return property(lambda self: self in methods)


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

    # a distillation without its labels
    is_unlabelled = _one_of("distill-unlabelled", "features-unlabelled")
    # makes a teacher with the help of another one
    is_taught_unlabelled = _one_of("dmae", "attndistill", "distill-unlabelled", "features-unlabelled")
    # compares views of images
    contrasts = _one_of("moco", "dino")
    # transfers attention, by a `Plan` that says so too
    transfers = _one_of("copy", "distill", "distill-unlabelled")
    # has a teacher that says classes
    reads_logits = _one_of("logits", "hard-logits", "distillation-token")

    @property
    def pretrains(self) -> bool:
        """Whether it makes a teacher, without labels."""
        return self in (Method.MAE, Method.SIMMIM) or self.contrasts or self.is_taught_unlabelled

    @property
    def how(self) -> str | None:
        """Of a method that transfers attention: "copy" or "distill", as its `Plan` says."""
        return self.value.removesuffix("-unlabelled") if self.transfers else None

    @property
    def keeps_weights_apart(self) -> bool:
        """Whether something of a teacher reaches a student with weights of its own."""
        return self.transfers or self in (Method.FEATURES, Method.MEAN_MAPS) or self.reads_logits

    @property
    def has_transfer_loss(self) -> bool:
        """Whether the teacher speaks through a loss, with the recipe's `transfer_weight`."""
        return self in (Method.DISTILL, Method.FEATURES) or self.reads_logits or self.is_taught_unlabelled

    @property
    def needs_teacher(self) -> bool:
        """Whether a run must have a teacher; no other run has one."""
        return self.keeps_weights_apart or self is Method.FINE_TUNE or self.is_taught_unlabelled


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
