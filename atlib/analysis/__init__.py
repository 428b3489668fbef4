"""Maps and features of students and teachers, described and compared."""

from atlib.analysis.attention_maps import (
    attention_distance,
    attention_entropy,
    class_attention,
    describe_layers,
    prefix_share,
    rollout,
    rollouts,
)
from atlib.analysis.cka import (
    MinibatchCKA,
    StreamingCKA,
    class_token,
    every_token,
    layer_cka,
    linear_cka,
    patch_mean,
)
from atlib.analysis.divergence import (
    PAIRINGS,
    StreamingDivergence,
    compare_layers,
    head_divergence,
    jensen_shannon,
    same_operation,
    three_models,
)
from atlib.analysis.streaming import walks

__all__ = [
    "MinibatchCKA",
    "PAIRINGS",
    "StreamingCKA",
    "StreamingDivergence",
    "attention_distance",
    "attention_entropy",
    "class_attention",
    "class_token",
    "compare_layers",
    "describe_layers",
    "every_token",
    "head_divergence",
    "jensen_shannon",
    "layer_cka",
    "linear_cka",
    "patch_mean",
    "prefix_share",
    "rollout",
    "rollouts",
    "same_operation",
    "three_models",
    "walks",
]
