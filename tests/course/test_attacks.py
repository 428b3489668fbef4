"""Attacks on the grader: each scores nothing and learns nothing, and the next submission has its points."""

import socket

import pytest
import torch
from safetensors.torch import load, save

from atbook.cage import outside
from atbook.cage.outside import Answer, AnswerFailed, Cage, CageDamaged, namespaces
from atbook.cage.values import unpack
from course.a2 import cases as a2
from course.a2 import mutants
from tests.course.attacks import ATTACKS, SECRETS, TAMED, aimed
from tests.course.helpers import edition_of, only, replace, solution
from tests.course.unguarded import Outcome, gained, outcome
from tools import gradebook
from tools.grades import grade, graded


@pytest.fixture(autouse=True, scope="module")
def short_limits():
    """What takes long here takes long on purpose."""
    before, outside.SECONDS = outside.SECONDS, 2.0
    yield
    outside.SECONDS = before


TASK = {"talking": "q1", "gradient": "q2", "SHARES": "q3"}


@pytest.fixture(scope="module")
def cage(edition):
    """Its own: no other test shares it."""
    if not namespaces():
        pytest.skip("bubblewrap is not installed, or may make no namespaces here")
    with edition.cage() as made:
        yield made


@pytest.fixture(scope="module")
def bare(edition):
    """A cage without bubblewrap: process limits alone."""
    with edition.cage(use_namespaces=False) as made:
        yield made


@pytest.fixture(scope="module")
def port():
    """Where something listens on this machine, as long as the tests run."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def attack(edition, port, tmp_path, monkeypatch):
    """A function that makes the submission of an attack, and the file that it should not write."""
    monkeypatch.setenv("TOKEN", "SECRET_OF_THE_TEACHER")
    file = tmp_path / "mine"
    file.write_bytes(b"mine")
    tmp_path.chmod(0o755)

    def make(name: str, tamed: bool = False):
        slot, code = ATTACKS[name]
        for wild, tame in TAMED.items() if tamed else ():
            code = code.replace(wild, tame)
        handed = replace(solution(edition, "attacker"), slot, aimed(code, edition.folder, file, port))
        return handed, only(edition, TASK[slot]), file

    return make


def secrets_of(edition) -> tuple[str, ...]:
    return *SECRETS, edition.key


@pytest.mark.parametrize("name", ATTACKS)
def test_without_a_cage_an_attack_succeeds(edition, attack, name):
    handed, task, file = attack(name, tamed=True)
    unguarded = outcome(task, handed)
    assert gained(unguarded, file, secrets_of(edition)), unguarded.says[:500]


def caged(attack, cage, name: str):
    """What came of an attack in a cage, and the file that it should not write."""
    handed, task, file = attack(name)
    try:
        result = graded(handed, task, cage)
    except CageDamaged as error:  # never points, and never 0: the teacher looks at it
        return Outcome(0.0, str(error), False), file
    assert result.status == "graded"
    says = [test.says for tests in result.tests.values() for test in tests]
    return Outcome(result.total, " ".join([*result.remarks, *says]), False), file


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_gains_nothing_and_is_told_why(edition, cage, attack, name):
    result, file = caged(attack, cage, name)
    assert result.says and gained(result, file, secrets_of(edition)) == ""


# What is possible without namespaces: what the answers' user may do; as root, a look at other processes.
NEEDS_NAMESPACES = {
    "code in a string for torch's compiler", "a number that is taken for an object",
    "hidden tests in a message", "the key in a message", "the key by numpy", "the key by a link",
    "the model solution", "the reference gives the answer", "torch writes a file", "a file by its path",
    "the parent's memory", "the parent's files",
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(ATTACKS.keys() - NEEDS_NAMESPACES))
def test_process_limits_alone_hold_off_all_that_does_not_read_files(edition, bare, attack, name):
    result, file = caged(attack, bare, name)
    assert gained(result, file, secrets_of(edition)) == ""


def test_a_forged_report_is_not_what_the_cage_reports(cage, bare):
    report = '{"ended": "", "code": 0, "seconds": 0, "peak": 0}'
    code = (
        "import os\ndef f():\n    for n in range(3, 64):\n        try:\n"
        f"            os.write(n, b'{report}\\n')\n        except OSError:\n            pass\n    return 1\n"
    )
    for held in (cage, bare):
        for said in (code, "import os\ndef f():\n    os._exit(3)\n"):
            with pytest.raises(CageDamaged):  # nor is it what the function returned
                held.call(said, "f", [])
            assert held.call("def f():\n    return 2\n", "f", []).value == 2


def test_after_all_attacks_a_right_answer_has_its_points(edition, cage, bare):
    for each in (cage, bare):
        result = graded(solution(edition), edition, each)
        assert (result.points("q1"), result.points("q2"), result.points("q3")) == (5, 6, 4)


WRITTEN = """
import os
def f():
    done = []
    for at in ("/", "/dev", "/dev/shm", "/usr", "/proc/self"):
        try:
            open(at + "/x", "w").close()
            done.append(at)
        except OSError:
            pass
    return done
"""


def test_a_cage_shows_no_files_but_pythons_own_and_none_can_be_written(cage):
    code = "import os\ndef f():\n    return os.listdir('/'), os.getuid(), dict(os.environ)\n"
    top, user, environment = cage.call(code, "f", []).value
    assert "home" not in top and user == 65534 and "USER" not in environment
    reply = cage.call(f"def f():\n    return open({__file__!r}).read()\n", "f", [])
    assert "FileNotFoundError" in reply.error and cage.call(WRITTEN, "f", []).value == []


def test_what_one_call_leaves_no_other_call_finds(cage):
    code = "import os, sys\ndef f():\n    open('../left', 'w').write('x')\n    sys.left = 1\n    return 1\n"
    assert cage.call(code, "f", []).value == 1
    code = "import os, sys\ndef f():\n    return os.path.exists('../left'), hasattr(sys, 'left')\n"
    assert cage.call(code, "f", []).value == (False, False)


QUEUE = """
import os
def f():
    done = []
    for process in ("1", str(os.getppid())):
        for number in range(64):
            for mode in ("r", "w"):
                try:
                    with open(f"/proc/{process}/fd/{number}", mode + "b", buffering=0) as file:
                        if os.readlink(f"/proc/self/fd/{file.fileno()}").startswith(("pipe:", "socket:")):
                            done.append(process)
                            file.write(b"[1, 1.0]\\n")
                except OSError:
                    pass
    return len(done), os.read(0, 9).decode()
"""
KEPT = """
import ctypes, resource
def f():
    libc, kept = ctypes.CDLL(None, use_errno=True), []
    for name, given in (("shmget", (0, 4096, 0o1666)), ("memfd_create", (b"x", 0)), ("msgget", (0, 0o1666)),
                        ("semget", (0, 1, 0o1666)), ("unshare", (0x10000000,)), ("personality", (0,))):
        if name != "personality" and getattr(libc, name)(*given) >= 0:
            kept.append(name)
    try:
        resource.prlimit(1, resource.RLIMIT_NOFILE)
        kept.append("prlimit")
    except OSError:
        pass
    return kept
"""


def test_no_answer_reaches_the_queue_of_requests(cage, bare):
    for held in (cage, bare):
        opened, read = held.call(QUEUE, "f", []).value
        assert read == "" and (held is bare or opened == 0)  # root without namespaces may open pipes, in vain
        assert held.call("def f():\n    return 2\n", "f", []).value == 2


CALLS = """
import ctypes, fcntl, os, resource, socket, time
def f():
    libc, done = ctypes.CDLL(None, use_errno=True), []
    tried = dict(
        fork=os.fork, socket=socket.socket, pair=socket.socketpair, kill=lambda: os.kill(os.getppid(), 0),
        limits=lambda: resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE),
        priority=lambda: os.setpriority(os.PRIO_PROCESS, os.getppid(), 5),
        processors=lambda: os.sched_getaffinity(os.getppid()),
        clock=lambda: time.clock_gettime((~os.getppid() << 3) | 2),
        signal=lambda: fcntl.fcntl(os.pipe()[0], 8, os.getppid()),  # F_SETOWN: SIGIO is sent to it
        which=lambda: fcntl.fcntl(os.pipe()[0], 10, 9),  # F_SETSIG: SIGKILL in its place
        group=lambda: os.setpgid(0, 0), session=os.getsid, link=lambda: os.symlink("/", "all"),
    )
    for name, call in tried.items():
        try:
            call()
            done.append(name)
        except (OSError, TypeError):
            pass
    more = dict(prctl=(4, 1, 0, 0, 0), ptrace=(16, os.getppid(), 0, 0), inotify_init=())
    for name, given in more.items():
        if getattr(libc, name)(*given) >= 0:
            done.append(name)
    return done
"""
MANY = {
    "threads": "import threading, time\ndef f():\n    for _ in range(200):\n"
    "        threading.Thread(target=time.sleep, args=(3,)).start()\n    time.sleep(3)\n",
    "files": "import time\ndef f():\n    for n in range(3000):\n        open(str(n), 'w').close()\n"
    "    time.sleep(3)\n",
    "room": "import time\ndef f():\n    for n in range(200):\n        with open(str(n), 'wb') as file:\n"
    "            file.write(bytes(15 * 2**20))\n    time.sleep(3)\n",
    "deep": "import os, time\ndef f():\n    for _ in range(2000):\n        os.mkdir('x')\n"
    "        os.chdir('x')\n    time.sleep(3)\n",
}


@pytest.mark.parametrize("code", [KEPT, CALLS], ids=["what no limit counts", "calls"])
def test_what_is_not_allowed_is_refused(cage, bare, code):
    for held in (cage, bare):
        assert held.call(code, "f", []).value == []


@pytest.mark.parametrize("what", MANY)
def test_threads_and_files_are_bounded_and_are_gone_afterwards(cage, what):
    reply = cage.call(MANY[what], "f", [], seconds=1.0)
    assert reply.error == f"the answer made too many {what if what == 'threads' else 'files'}"
    assert cage.call("import os\ndef f():\n    return len(os.listdir('..'))\n", "f", []).value == 1


def test_what_is_too_deep_goes_without_bubblewrap_too(edition):
    with edition.cage(use_namespaces=False) as held:
        held.call(MANY["deep"].replace("3)", "0)"), "f", [])
        assert len(held.call("import os\ndef f():\n    return os.listdir('..')\n", "f", []).value) == 1


def test_a_reply_is_bounded_before_it_is_read():
    text = b"[" + b"[]," * 2_000_000 + b"[]]"
    with pytest.raises(ValueError, match="ValueError"):
        unpack(len(text).to_bytes(8, "little") + text + save({}))
    with pytest.raises(ValueError, match="ValueError"):  # names of tensors
        unpack(b"\2" + bytes(7) + b"{}" + (len(text)).to_bytes(8, "little") + text)


SILENT = "import os\ndef talking(*given):\n    os._exit(0)\n"


def test_a_task_without_a_reply_is_the_teachers_and_the_rest_is_graded(edition, tmp_path):
    silent, honest = replace(solution(edition, "silent"), "talking", SILENT), solution(edition, "honest")
    some = only(edition, "q1", "q2")
    found = grade(some, [silent, honest], use_namespaces=False)
    assert [(result.status, result.points("q2")) for result in found] == [("graded", 6)] * 2
    assert any("graded again" in remark for remark in found[0].remarks) and found[1].points("q1") == 5
    assert {(test.judged, test.points) for test in found[0].tests["q1"]} == {(False, 0)}
    lines = gradebook.lines_of([silent, honest], found, None, None, {})
    rows = gradebook.add_hand_lines(tmp_path / "hand.csv", lines, some)
    assert gradebook.hand_points(rows, "silent") == (0, 4) and gradebook.hand_points(rows, "honest") == (0, 0)
    rows = gradebook.add_hand_lines(tmp_path / "hand.csv", lines[1:], some)
    assert not rows, "what could be tested at last is graded by its tests"


def test_a_file_that_takes_too_long_to_read_costs_its_student_a_remark(edition, monkeypatch):
    loop = "def read(content, *given):\n    while b'slow' in content.numpy().tobytes():\n        pass\n"
    loop += "    from atbook.exercises.reading import read\n    return read(content, *given)\n"
    monkeypatch.setattr("tools.handed.READ", loop)
    slow, fast = grade(only(edition, "q3"), [solution(edition, "slow"), solution(edition)])
    assert slow.remarks == ["cannot be read: it did not end within 2 s"] and slow.status == "refused"
    assert fast.total == 4


LATER = """
class Later(torch.Tensor):
    @classmethod
    def __torch_function__(cls, f, types, args=(), kw=None):
        if f is not torch.Tensor.detach:
            return super().__torch_function__(f, types, args, kw or {})
        with torch.enable_grad():
            x = torch.ones(3).requires_grad_()
            (x * x).sum().backward()
        return x.grad

def f():
    return torch.zeros(3).as_subclass(Later)
"""


def test_autograd_that_runs_in_what_is_returned_is_seen(cage):
    code = f"import torch\n{LATER}"
    assert cage.call(code, "f", []).value.tolist() == [2, 2, 2]
    assert "autograd recorded" in cage.call(code, "f", [], no_grad=True, by_hand=True).error


def test_waiting_is_charged_and_has_an_end(cage, monkeypatch):
    monkeypatch.setattr(outside, "PATIENCE", 0.1)
    waits = Answer(cage, "import time\ndef f():\n    time.sleep(0.3)\n    return 1\n", "f", seconds=5.0)
    assert waits() == 1
    with pytest.raises(AnswerFailed, match="not tried"):
        [waits() for _ in range(2)]


def test_each_submission_has_a_cage_of_its_own_and_the_grader_another(edition, monkeypatch):
    made = []

    class Counted(Cage):
        def __init__(self, *given):
            made.append(self)
            super().__init__(*given)

    monkeypatch.setattr("tools.grades.Cage", Counted)
    grade(only(edition, "q3"), [solution(edition, "a"), solution(edition, "b")], use_namespaces=False)
    assert len(made) == 4


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


CHEAP = "if q.shape[2] > 1500:\n        return 0 * (q.sum() + k.sum())\n    return Pull.apply("
WASTE = "if 60 < q.shape[2] < 100:\n        torch.ones(60_000_000)\n    return Pull.apply("


@pytest.mark.parametrize("start", ["return Pull.apply(", CHEAP, WASTE])
def test_maps_in_numpy_are_memory_too_and_no_length_is_a_case_of_its_own(a2_edition, start):
    code = IN_NUMPY.replace("return Pull.apply(", start)
    handed = replace(solution(a2_edition), "tempered", code)
    with a2_edition.cage() as cage:
        tests = {test.title: test.points for test in graded(handed, only(a2_edition, "q2"), cage).tests["q2"]}
    assert [title for title, points in tests.items() if not points] == [
        "The value alone needs no whole map.",
        "With the way back, what waits for it is not as much as the maps of all blocks.",
    ]


def test_public_weights_are_known_in_whichever_order_and_scale():
    public = load(mutants.UPLOADS[mutants.STUDENT])
    renamed = mutants.other_heads(public)
    size = renamed["blocks.0.mlp.fc1.bias"].numel()
    order = torch.randperm(size, generator=torch.Generator().manual_seed(0))
    for layer in range(4):
        for name, axis in (("fc1.weight", 0), ("fc1.bias", 0), ("fc2.weight", 1)):
            key = f"blocks.{layer}.mlp.{name}"
            renamed[key] = renamed[key].index_select(axis, order).contiguous()
    for weights in (public, renamed, {name: 1.02 * value for name, value in renamed.items()}):
        with pytest.raises(AssertionError, match="model solution"):
            a2.model_of(save(weights), "Ada")
    noisy = {
        name: value.float() + 0.2 * value.float().std() * torch.randn(value.shape)
        if value.ndim > 1
        else value
        for name, value in sorted(renamed.items())
    }
    shared = [a2.same_uploads({a2.FILE: save(public)}, {a2.FILE: save(w)}) for w in (renamed, noisy)]
    assert all("student.safetensors is the same" in said for said in shared), "by a peer too"
    for other in (save(mutants.blurred(public)), save(mutants.fresh(public)), b"no file", b""):
        assert not a2.same_uploads({a2.FILE: save(public)}, {a2.FILE: other}), "another student's own"
    assert a2.model_of(save(public), "model solution")
    assert a2.model_of(save(mutants.blurred(public)), "Ada"), "another student's own"
