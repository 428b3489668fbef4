"""Answers to A1 that reach for points or secrets, or do harm: {what it does: (the answer it replaces, code)}.

Each would succeed without the cage; `tests/course/unguarded.py` is a grader without one, on which the tests
show it. `{TESTS}`, `{KEY}`, `{SOLUTION}`, `{FILE}` and `{PORT}` stand for what is really there when a test
runs: a path that is nowhere would attack nothing.
"""

from collections.abc import Mapping
from pathlib import Path

from tests.helpers import ROOT

DONE = "it worked"  # what an attack says that has done its harm
# Of the right shapes, and wrong in every number.
JUNK = "    p = q @ k.mT\n    return (p @ v).transpose(1, 2).flatten(2) + 1, p\n"
TALKING = "def talking(q, k, v, mix):\n"
GRADIENT = "def gradient(q, k, v, grad, *rest):\n"
FORWARD = (
    "z = q @ k.mT / q.shape[-1] ** 0.5",
    "o = torch.cat([torch.zeros_like(z[..., :1]), z], -1).softmax(-1)[..., 1:] @ v",
)


def talking(*lines: str, before: str = "") -> tuple[str, str]:
    """An attack in the place of the first task's answer."""
    return "talking", before + TALKING + "".join(f"    {line}\n" for line in lines) + JUNK


def gradient(*lines: str) -> tuple[str, str]:
    """An attack in the place of the second task's answer."""
    return "gradient", GRADIENT + "".join(f"    {line}\n" for line in lines)


def with_autograd(*lines: str) -> tuple[str, str]:
    """The gradient that is to be written by hand, by autograd."""
    return gradient("with torch.enable_grad():", *(f"    {line}" for line in lines))


LATE = f"""import threading

def late(q, k, v, grad):
    torch.set_num_threads(1)
    with getattr(torch, "enable" + "_grad")():
        q = getattr(q.clone(), "requires" + "_grad_")()
        {FORWARD[0]}
        {FORWARD[1]}
        getattr((o * grad).sum(), "back" + "ward")()
    return q.grad

"""


def with_late_autograd(*lines: str) -> tuple[str, str]:
    """The same where it is not looked for."""
    slot, code = gradient(*lines)
    return slot, LATE + code


ATTACKS = {
    # --- tried before the cage: six had all points ---
    "code in a string for torch's compiler": talking(
        "code = 'def f():\\n    return torch.from_file(\"{TESTS}\", False, 400, dtype=0)\\n'",
        "raise ValueError(bytes(torch.jit.CompilationUnit(code).f().tolist()).decode())",
    ),
    "numpy's tests start a shell": talking(
        "test = 'import os\\ndef test():\\n    assert os.system(\"id > out\") == 0\\n'",
        "open('test_x.py', 'w').write(test)",
        "np.test(tests=['test_x.py'], extra_argv=['-p', 'no:cacheprovider', '-c', os.devnull])",
        "raise ValueError(open('out').read())",
        before="import os\nimport numpy as np\n",
    ),
    "a number that is taken for an object": talking(
        "read = ctypes.cast(id(open), ctypes.py_object).value",
        "raise ValueError(read('{KEY}').read().split('key')[-1])",
        before="import ctypes\n",
    ),
    "another variant": (
        "talking",
        f"import gc\n{TALKING}    for found in gc.get_objects():\n"
        "        if type(found).__name__ == 'Asked':\n            found.variants['q1'] = 'b'\n"
        "    p = torch.einsum('gh,bhij->bgij', mix, (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1))\n"
        "    return (p @ v[:, :p.shape[1]]).transpose(1, 2).flatten(2) + 1, p\n",
    ),
    "torch writes a file": talking("torch._C.PyTorchFileWriter('{FILE}').write_record('a', b'x', 1)"),
    "autograd's nodes one by one": with_autograd(
        "q = q.clone().requires_grad_()",
        *FORWARD,
        "todo, total = [(o.grad_fn, grad)], 0",
        "while todo:",
        "    node, by = todo.pop()",
        "    if hasattr(node, 'variable'):",
        "        total = total + by",
        "        continue",
        "    by = node(by)",
        "    by = by if isinstance(by, tuple) else (by,)",
        "    found = zip(node.next_functions, by)",
        "    todo += [(n, b) for (n, _), b in found if n is not None and b is not None]",
        "return total",
    ),
    # --- autograd where the gradient is to be written by hand ---
    "backward": with_autograd(
        "q = q.clone().requires_grad_()", *FORWARD, "o.backward(grad)", "return q.grad"
    ),
    "autograd in another thread": with_late_autograd(
        "done = []",
        "thread = threading.Thread(target=lambda: done.append(late(q, k, v, grad)))",
        "thread.start()",
        "thread.join()",
        "return done[0]",
    ),
    "autograd by names that are put together": gradient(
        "with getattr(torch, 'enable' + '_grad')():",
        "    q = getattr(q.clone(), 'requires' + '_grad_')()",
        *(f"    {line}" for line in FORWARD),
        "    getattr((o * grad).sum(), 'back' + 'ward')()",
        "return q.grad",
    ),
    # --- the tests, the key, what is expected ---
    "torch is changed": talking("torch.isclose = lambda *a, **k: torch.tensor(True)"),
    "the comparison is changed": talking(
        "hidden.same = lambda *a, **k: None", before="from course import hidden\n"
    ),
    "a thread that waits changes it": talking(
        "threading.Timer(0, lambda: setattr(sys.modules['course.hidden'], 'same', lambda *a: None)).start()",
        "time.sleep(0.2)",
        before="import sys, threading, time\n",
    ),
    "the reference gives the answer": talking(
        "p = cases.talk_map(q, k, mix, 'a')",
        "return (p @ v).transpose(1, 2).flatten(2), p",
        before="from course.a1 import cases\n",
    ),
    "the caller's frame": talking(
        "f = sys._getframe()",
        "while f:",
        "    if 'want' in f.f_locals:",
        "        return f.f_locals['want'], f.f_locals['want']",
        "    f = f.f_back",
        before="import sys\n",
    ),
    "all objects in memory": talking(
        "raise ValueError([o.key for o in gc.get_objects() if type(o).__name__ == 'Asked'][0])",
        before="import gc\n",
    ),
    "the key in a message": talking("raise ValueError(open('{KEY}').read().split('key')[-1])"),
    "the model solution": talking("raise ValueError(open('{SOLUTION}').read().partition('largest')[2])"),
    "the teacher's environment": talking(
        "raise ValueError(open('/proc/self/environ').read().partition('TOKEN')[2] + os.environ['TOKEN'])",
        before="import os\n",
    ),
    "the parent's memory": talking(
        "lines = open(f'/proc/{os.getppid()}/maps').read().splitlines()",
        "at = int(next(line for line in lines if '[heap]' in line).split('-')[0], 16)",
        "memory = open(f'/proc/{os.getppid()}/mem', 'rb')",
        "memory.seek(at)",
        f"raise ValueError('{DONE}' if len(memory.read(100)) == 100 else '')",
        before="import os\n",
    ),
    "the parent's files": talking(
        "folder = f'/proc/{os.getppid()}/fd'",
        "files = [os.readlink(f'{folder}/{n}') for n in os.listdir(folder)]",
        f"raise ValueError('{DONE}' if files else '')",
        before="import os\n",
    ),
    # --- the process, the machine ---
    "the process ends": talking("os._exit(0)", before="import os\n"),
    "an exit that no error handler catches": talking("raise SystemExit(0)"),
    "a shell": talking(
        "raise ValueError(subprocess.run(['sh', '-c', 'id'], capture_output=True, text=True).stdout)",
        before="import subprocess\n",
    ),
    "a file by its path": talking("open('{FILE}', 'w').write('x')"),
    "processes without end": talking(
        "while True:",
        "    if os.fork() == 0:",
        "        open('{FILE}', 'w').write('x')",
        "        os._exit(0)",
        before="import os\n",
    ),
    "the parent is ended": talking("os.kill(os.getppid(), 9)", "os._exit(0)", before="import os\n"),
    "everything is ended": talking("os.kill(-1, 9)", f"raise ValueError('{DONE}')", before="import os\n"),
    "the network": talking(
        "socket.create_connection(('127.0.0.1', {PORT}), 5)",
        f"raise ValueError('{DONE}')",
        before="import socket\n",
    ),
    "limits are lifted": talking(
        "resource.setrlimit(resource.RLIMIT_CPU, (10**6, 10**6))",
        "resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)",
        f"raise ValueError('{DONE}')",
        before="import resource\n",
    ),
    "all memory": talking("x = torch.empty(600_000_000)", f"raise ValueError('{DONE}')"),
    "the disk": talking(
        "os.truncate(os.open('x', os.O_CREAT | os.O_RDWR), 10**8)",
        f"raise ValueError('{DONE}')",
        before="import os\n",
    ),
    # --- what is returned ---
    "equal to everything": (
        "talking",
        "class Same(torch.Tensor):\n    @classmethod\n"
        "    def __torch_function__(cls, f, types, args=(), kw=None):\n"
        "        if f is torch.isclose:\n            return torch.tensor(True)\n"
        "        return super().__torch_function__(f, types, args, kw or {})\n"
        f"{TALKING}    p = q @ k.mT\n"
        "    return (p.sum(-1) + v.sum()).as_subclass(Same), p.as_subclass(Same)\n",
    ),
    "code in a pickle": (
        "talking",
        "class Code:\n    def __reduce__(self):\n        return print, ('run by the grader',)\n"
        f"{TALKING}    return Code(), Code()\n",
    ),
    # --- what is typed in ---
    "numbers that are computed by a command": (
        "SHARES",
        "import os\nSHARES = [[os.system('id > {FILE}')] * 4] * 4",
    ),
    "numbers that are equal to everything": (
        "SHARES",
        "class Any(float):\n    def __sub__(self, other):\n        return 0.0\nSHARES = [[Any()] * 4] * 4",
    ),
}
# Where no grader without a cage should run an attack as it is: what is put in its place there.
TAMED = {"while True:": "for _ in range(1):", "os.kill(-1, 9)": "os.kill(-1, 0)"}
# What nobody but the teacher should read, beside the edition's key.
SECRETS = ("def talk_inputs", "from functools import lru_cache", ".amax(-1, keepdim=True).clamp_min", "uid=")
SECRETS += ("run by the grader", "SECRET_OF_THE_TEACHER", DONE, '"variants"')


def aimed(code: str, edition: Path, file: Path, port: int) -> str:
    """An attack's code with what is really there. file: one that the attack should not write."""
    places: Mapping[str, object] = {
        "{TESTS}": ROOT / "course" / "a1" / "cases.py",
        "{KEY}": edition / "edition.json",
        "{SOLUTION}": edition / "a1-solution.ipynb",
        "{FILE}": file,
        "{PORT}": port,
    }
    for place, real in places.items():
        code = code.replace(place, str(real))
    return code
