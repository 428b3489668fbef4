"""The state of every global random generator, as tensors: kept in a checkpoint, and put back without unpickling anything."""

import math
import random
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor


def chance() -> dict[str, Tensor]:
    """The present state of the generators of Python, NumPy, torch and, where there is a GPU, of the current one."""
    version, words, gauss = random.getstate()
    kind, keys, place, has_gauss, cached = np.random.get_state()
    state = {"python": torch.tensor([version, *words]), "python_gauss": torch.tensor(math.nan if gauss is None else gauss, dtype=torch.float64),
             "numpy": torch.tensor([*keys.tolist(), place, has_gauss]), "numpy_gauss": torch.tensor(cached, dtype=torch.float64),
             "torch": torch.get_rng_state()}
    return state | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def restore_chance(state: Mapping[str, Tensor]) -> None:
    """Put every generator back into a state that `chance` returned."""
    version, *words = state["python"].tolist()
    gauss = state["python_gauss"].item()
    random.setstate((version, tuple(words), None if math.isnan(gauss) else gauss))
    *keys, place, has_gauss = state["numpy"].tolist()
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), place, has_gauss, state["numpy_gauss"].item()))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
