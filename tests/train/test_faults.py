"""A run that is killed with `kill -9`, also while it writes a checkpoint, ends with the bits of one that was
left alone.

Three kills in the ordinary suite, as many as ATLIB_KILLS says where it is set: `make faults` sets 20.
"""

import json
import os
import subprocess
import sys

import pytest

from tests.helpers import ROOT

KILLS = int(os.environ.get("ATLIB_KILLS", "3"))


@pytest.mark.slow
def test_killed_at_random_moments_a_run_ends_with_the_same_bits(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "tests.kills", str(tmp_path / "runs"), str(KILLS)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=60 + 30 * KILLS,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    tally = json.loads(done.stdout.splitlines()[-1])
    print(tally)
    assert tally["same"] and tally["kills"] >= KILLS
    assert tally["while saving"] >= KILLS // 4, "kills must also come while a checkpoint is being written"
    assert tally["damaged"] == 0, "what has a checkpoint's name is whole at every moment"
    assert tally["left"] == ["step-00000039", "step-00000040"], "nothing half-written is left behind"
