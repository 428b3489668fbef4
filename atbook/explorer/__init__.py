"""The experiment live in a page: models and scenes in JavaScript, and the weights written for them."""

from atbook.explorer.export import write_weights

__all__ = ["write_weights"]
