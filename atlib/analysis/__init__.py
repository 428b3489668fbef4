"""Analyses: what a student shares with its teacher, and what it does not. One file for each question."""

from atlib.analysis.accounting import method_costs, method_memory, step_memory, transferred_numbers
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
from atlib.analysis.fourier import fourier_profile, layer_profiles
from atlib.analysis.predictions import (
    disagreement,
    ensemble_accuracy,
    ensemble_gain,
    expected_calibration_error,
    paired_bootstrap,
)
from atlib.analysis.probes import features, knn_accuracy, linear_probe, mlp_probe
from atlib.analysis.robustness import effective_robustness, fit_line
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
    "disagreement",
    "effective_robustness",
    "ensemble_accuracy",
    "ensemble_gain",
    "every_token",
    "expected_calibration_error",
    "features",
    "fit_line",
    "fourier_profile",
    "head_divergence",
    "jensen_shannon",
    "knn_accuracy",
    "layer_cka",
    "layer_profiles",
    "linear_cka",
    "linear_probe",
    "method_costs",
    "method_memory",
    "mlp_probe",
    "paired_bootstrap",
    "patch_mean",
    "prefix_share",
    "rollout",
    "rollouts",
    "same_operation",
    "step_memory",
    "three_models",
    "transferred_numbers",
    "walks",
]
