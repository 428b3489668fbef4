"""Attacks on the grader: each scores nothing and learns nothing, and the next submission has its points."""

import json

import pytest
import torch
from safetensors.torch import load, save

from atbook.cage import outside
from atbook.cage.outside import Cage, namespaces
from course.a2 import cases as a2
from course.a2 import mutants
from tests.course.attacks import ATTACKS, SECRETS
from tests.course.helpers import edition_of, only, replace, solution
from tools.grades import graded


@pytest.fixture(autouse=True, scope="module")
def short_limits():
    """What takes long here takes long on purpose."""
    before, outside.SECONDS = outside.SECONDS, 2.0
    yield
    outside.SECONDS = before


TASK = {"talking": "q1", "gradient": "q2", "SHARES": "q3"}


@pytest.fixture(scope="module")
def edition(tmp_path_factory):
    return edition_of(tmp_path_factory.mktemp("edition"), "a1", "a")


@pytest.fixture(scope="module")
def cage(edition):
    if not namespaces():
        pytest.skip("bubblewrap is not installed, or may make no namespaces here")
    with edition.cage() as made:
        yield made


@pytest.fixture(scope="module")
def bare(edition):
    """A cage without bubblewrap: process limits alone."""
    with edition.cage(use_namespaces=False) as made:
        yield made


def said(edition, cage, name: str) -> tuple[float, str]:
    """The points of an attack's task, and all that its student and its teacher read."""
    slot, code = ATTACKS[name]
    handed = replace(solution(edition, "attacker"), slot, code)
    result = graded(handed, only(edition, TASK[slot]), cage)
    assert result.status == "graded"
    says = [test.says for tests in result.tests.values() for test in tests]
    return result.total, " ".join([*result.remarks, *says])


def test_there_are_enough_of_them():
    assert len(ATTACKS) + 3 >= 30


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_gets_nothing_and_is_told_why(edition, cage, name):
    points, says = said(edition, cage, name)
    assert points == 0 and says
    key = json.loads((edition.folder / "edition.json").read_text())["key"]
    assert not any(secret in says for secret in (*SECRETS, key))


# Without namespaces files can be read; points, processes, memory and the network are as safe.
BARE = [
    "autograd's nodes one by one",
    "the process ends",
    "a shell",
    "processes without end",
    "everything is ended",
    "the network",
    "limits are lifted",
    "all memory",
    "the disk",
    "a forged report",
]


@pytest.mark.parametrize("name", BARE)
def test_process_limits_alone_leave_an_attack_without_points(edition, bare, name):
    assert said(edition, bare, name)[0] == 0


def test_after_all_attacks_a_right_answer_has_its_points(edition, cage, bare):
    for each in (cage, bare):
        result = graded(solution(edition), edition, each)
        assert (result.points("q1"), result.points("q2"), result.points("q3")) == (5, 6, 4)


def test_a_cage_shows_no_files_but_pythons_own(cage):
    code = "import os\ndef f():\n    return os.listdir('/'), os.getuid(), dict(os.environ)\n"
    top, user, environment = cage.call(code, "f", []).value
    assert "home" not in top and user == 65534 and "USER" not in environment
    reply = cage.call(f"def f():\n    return open({__file__!r}).read()\n", "f", [])
    assert "FileNotFoundError" in reply.error


def test_what_one_call_leaves_no_other_call_finds(cage):
    code = "import os, sys\ndef f():\n    open('/tmp/left', 'w').write('x')\n    sys.left = 1\n    return 1\n"
    assert cage.call(code, "f", []).value == 1
    code = "import os, sys\ndef f():\n    return os.path.exists('/tmp/left'), hasattr(sys, 'left')\n"
    assert cage.call(code, "f", []).value == (False, False)


# --- A2: memory, and weights that are public ---

IN_NUMPY = """
import numpy as np

class Pull(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, q_t, k_t, scale, scale_t, tau, block):
        def softmax(z):
            e = np.exp(z - z.max(-1, keepdims=True))
            return e / e.sum(-1, keepdims=True)
        a, b, c, d = (x.detach().numpy() for x in (q, k, q_t, k_t))
        p = softmax(scale * a @ b.swapaxes(-1, -2))
        t = softmax(scale_t * c @ d.swapaxes(-1, -2) / tau)
        number = q.shape[0] * q.shape[1] * q.shape[2]
        by_z = torch.from_numpy(p - t)
        ctx.save_for_backward(by_z @ k * (scale / number), by_z.mT @ q * (scale / number))
        return torch.tensor(-(t * np.log(p)).sum() / number)

    @staticmethod
    def backward(ctx, above):
        by_q, by_k = ctx.saved_tensors
        return above * by_q, above * by_k, *(None,) * 6

def tempered(q, k, q_t, k_t, scale, scale_t, tau, block):
    return Pull.apply(q, k, q_t, k_t, scale, scale_t, tau, block)
"""


@pytest.fixture(scope="module")
def a2_edition(tmp_path_factory):
    return edition_of(tmp_path_factory.mktemp("a2"), "a2", "a")


def test_maps_in_numpy_are_memory_too(a2_edition):
    handed = replace(solution(a2_edition), "tempered", IN_NUMPY)
    with a2_edition.cage() as cage:
        tests = {test.title: test.points for test in graded(handed, only(a2_edition, "q2"), cage).tests["q2"]}
    assert [title for title, points in tests.items() if not points] == [
        "The value alone needs no whole map.",
        "With the way back, what waits for it is not as much as the maps of all blocks.",
    ]


def test_public_weights_are_known_in_whichever_order_and_scale():
    public = load(mutants.UPLOADS[mutants.STUDENT])
    renamed = mutants.other_heads(public)
    order = torch.randperm(
        renamed["blocks.0.mlp.fc1.bias"].numel(), generator=torch.Generator().manual_seed(0)
    )
    for layer in range(4):
        for name, axis in (("fc1.weight", 0), ("fc1.bias", 0), ("fc2.weight", 1)):
            key = f"blocks.{layer}.mlp.{name}"
            renamed[key] = renamed[key].index_select(axis, order).contiguous()
    for weights in (public, renamed, {name: 1.02 * value for name, value in renamed.items()}):
        with pytest.raises(AssertionError, match="model solution"):
            a2.model_of(save(weights), "Ada")
    assert a2.model_of(save(public), "model solution")
    assert a2.model_of(save(mutants.blurred(public)), "Ada"), "another student's own"


def test_a_cage_that_cannot_start_says_so():
    with Cage(["no_such_module"]) as cage, pytest.raises(RuntimeError, match="no_such_module"):
        cage.call("", "f", [])
