"""Analyses: what a student shares with its teacher, and what it does not. One file for each question."""

from atlib.analysis.checks import check_maps
from atlib.analysis.cka import MinibatchCKA, StreamingCKA, class_token, every_token, layer_cka, linear_cka, patch_mean
from atlib.analysis.divergence import (
    PAIRINGS,
    StreamingDivergence,
    compare_layers,
    head_divergence,
    jensen_shannon,
    layer_divergence,
    same_operation,
    three_models,
)
from atlib.analysis.predictions import (
    Gain,
    Interval,
    disagreement,
    disagreement_matrix,
    ensemble_accuracy,
    ensemble_gain,
    expected_calibration_error,
    paired_bootstrap,
)
from atlib.analysis.robustness import AccuracyLine, EffectiveRobustness, effective_robustness, fit_line
from atlib.analysis.streaming import vit_of, walks
from atlib.analysis.attention_maps import LayerStatistics, attention_distance, attention_entropy, class_attention, describe_layers, prefix_share, rollout
from atlib.analysis.fourier import FourierProfile, fourier_profile, layer_profiles
from atlib.analysis.probes import ProbeResult, features, few_labels, knn_accuracy, linear_probe
from atlib.analysis.accounting import Memory, MethodCost, Numbers, method_costs, method_memory, step_memory, transferred_numbers
