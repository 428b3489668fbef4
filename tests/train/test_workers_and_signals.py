"""A SIGTERM to a whole process group leaves the workers that decode images to a run that is to save."""

import multiprocessing
import os
import time

import pytest
import torch

from atrun.data.decoding import Made
from atrun.data.photos import Decoded


def made_slowly(what):
    time.sleep(0.02)
    return Made(torch.zeros(len(what), 3, 4, 4), torch.zeros(len(what), dtype=torch.long), list(what), {})


@pytest.mark.slow
def test_workers_are_in_groups_of_their_own():
    shares = [([index], 1.0) for index in range(12)]
    batches = Decoded((), None, "raise").deliver(made_slowly, shares, workers=2)
    got = [next(batches).indices for _ in range(2)]  # one from each worker: both have started
    workers = multiprocessing.active_children()
    assert len(workers) == 2 and all(os.getpgid(worker.pid) != os.getpgid(0) for worker in workers)
    got += [batch.indices for batch in batches]
    assert got == [[index] for index in range(12)]
