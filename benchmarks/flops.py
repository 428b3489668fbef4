"""The fewest FLOPs a training step can do, under the name by which the benchmarks know them: see `atlib.analysis.accounting`."""

from atlib.analysis.accounting import Shape, copy, distill, feature_distillation, fine_tuning, query_copy, shape_of, teacher

__all__ = ["Shape", "copy", "distill", "feature_distillation", "fine_tuning", "query_copy", "shape_of", "teacher"]
