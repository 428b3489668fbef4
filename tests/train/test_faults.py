"""A run that is killed with `kill -9`, also while it writes a checkpoint, ends with the bits of one that was
left alone.

Three kills in the ordinary suite, as many as ATLIB_KILLS says where it is set: `make faults` sets 20.
"""

import os

import pytest

from tests.helpers import in_a_fork
from tests.kills import killed

KILLS = int(os.environ.get("ATLIB_KILLS", "3"))


@pytest.mark.slow
def test_killed_at_random_moments_a_run_ends_with_the_same_bits(tmp_path):
    done = in_a_fork(tmp_path, killed, tmp_path / "runs", KILLS, seconds=60 + 30 * KILLS)
    assert done.code == 0, done.said[-3000:]
    tally = done.returned
    print(tally)
    assert tally["same"] and tally["kills"] >= KILLS
    assert tally["while saving"] >= KILLS // 4, "kills must also come while a checkpoint is being written"
    assert tally["damaged"] == 0, "what has a checkpoint's name is whole at every moment"
    assert tally["left"] == ["step-00000018", "step-00000020"], "nothing half-written is left behind"
