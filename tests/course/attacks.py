"""Answers to A1 that reach for points or secrets: {what it does: (the answer that it replaces, its code)}."""

from tests.helpers import ROOT

# Hidden tests, by the path that they really have: a path that is nowhere would attack nothing.
CASES = ROOT / "course" / "a1" / "cases.py"

JUNK = "    return q, k\n"
TALKING = "def talking(q, k, v, mix):\n"
GRADIENT = "def gradient(q, k, v, grad, *rest):\n"
FORWARD = (
    "z = q @ k.mT / q.shape[-1] ** 0.5",
    "o = torch.cat([torch.zeros_like(z[..., :1]), z], -1).softmax(-1)[..., 1:] @ v",
)


def talking(body: str, before: str = "") -> tuple[str, str]:
    """An attack in the place of the first task's answer."""
    return "talking", f"{before}{TALKING}    {body}\n{JUNK}"


def gradient(*lines: str) -> tuple[str, str]:
    """An attack in the place of the second task's answer."""
    return "gradient", GRADIENT + "".join(f"    {line}\n" for line in lines)


ATTACKS = {
    # --- tried before the cage: six had all points ---
    "code in a string for torch's compiler": talking(
        "raise ValueError(str(torch.CompilationUnit('def f():\\n    return torch.from_file(\"edition.json\",'"
        " 'False, 900, dtype=torch.uint8)').f()))"
    ),
    "numpy's tests start a shell": talking(
        "np.test(extra_argv=['--co', '-p', 'os'])", "import numpy as np\n"
    ),
    "a number that is taken for an object": talking(
        "ctypes.cast(id(print), ctypes.py_object).value(open('edition.json').read())", "import ctypes\n"
    ),
    "another variant": talking("hidden.EDITION['variants']['q1'] = 'b'", "from course import hidden\n"),
    "torch writes a file": talking("torch._C.PyTorchFileWriter('results.json').write_record('a', b'x', 1)"),
    "autograd's nodes one by one": gradient(
        "with torch.enable_grad():",
        "    q = q.clone().requires_grad_()",
        *(f"    {line}" for line in FORWARD),
        "return o.grad_fn(grad)",
    ),
    # --- autograd where the gradient is to be written by hand ---
    "backward": gradient("q = q.clone().requires_grad_()", *FORWARD, "o.backward(grad)", "return q.grad"),
    "torch.func": gradient(
        "f = lambda q: ((q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v * grad).sum()",
        "return torch.func.grad(f)(q)",
    ),
    "autograd by names that are put together": gradient(
        "with getattr(torch, 'enable' + '_grad')():",
        "    q = getattr(q.clone(), 'requires' + '_grad_')()",
        "    z = q @ k.mT / q.shape[-1] ** 0.5",
        "    o = torch.cat([torch.zeros_like(z[..., :1]), z], -1).softmax(-1)[..., 1:] @ v",
        "    getattr((o * grad).sum(), 'back' + 'ward')()",
        "return q.grad",
    ),
    # --- the tests, the key, what is expected ---
    "torch is changed": talking("torch.isclose = torch.allclose = lambda *a, **k: True"),
    "the comparison is changed": talking("hidden.same = lambda *a, **k: None", "import hidden\n"),
    "a loop changes math": talking("math.isclose = lambda *a, **k: True", "import math\n"),
    "the caller's frame": talking(
        "f = sys._getframe()\n    while f:\n        if 'want' in f.f_locals:\n"
        "            return f.f_locals['want'], q\n        f = f.f_back",
        "import sys\n",
    ),
    "all objects in memory": talking(
        "raise ValueError(str([o for o in gc.get_objects() if isinstance(o, dict) and 'want' in o]))",
        "import gc\n",
    ),
    "hidden tests in a message": talking(f"raise ValueError(open({str(CASES)!r}).read())"),
    "the key in a message": talking("raise ValueError(open('edition.json').read())"),
    "the key by numpy": talking("np.genfromtxt('edition.json', dtype=str)", "import numpy as np\n"),
    "the grader itself": talking("tools.grades.graded = None", "import tools.grades\n"),
    "the parent's memory": talking("open(f'/proc/{os.getppid()}/mem', 'rb').read(100)", "import os\n"),
    "the parent's files": talking("os.listdir(f'/proc/{os.getppid()}/fd')", "import os\n"),
    # --- the process, the machine ---
    "the process ends": talking("os._exit(0)", "import os\n"),
    "an exit that no error handler catches": talking("raise SystemExit(0)"),
    "an exit of the cell": (
        "talking",
        f"exit = None\nimport sys\nx = sys.exit(0)\ntalking = x\n{TALKING}{JUNK}",
    ),
    "a shell": talking("subprocess.run(['sh', '-c', 'id'], check=True)", "import subprocess\n"),
    "a shell by os": talking("assert os.system('id') == 0", "import os\n"),
    "processes without end": talking("while True:\n        os.fork()", "import os\n"),
    "the parent is ended": talking("os.kill(os.getppid(), 9)", "import os\n"),
    "everything is ended": talking("os.kill(-1, 9)", "import os\n"),
    "the network": talking("socket.create_connection(('127.0.0.1', 22), 1)", "import socket\n"),
    "limits are lifted": talking(
        "resource.setrlimit(resource.RLIMIT_CPU, (10**6, 10**6))", "import resource\n"
    ),
    "all memory": talking("torch.ones(10**11)"),
    "all memory, bit by bit": talking("x = []\n    while True:\n        x.append(torch.ones(10**7))"),
    "the disk": talking("open('x', 'wb').write(bytes(10**8))"),
    # --- what is returned ---
    "a result of another process": talking(
        "os.write(1, b'{\"returned\": 1}')\n    os.write(3, b'{\"ready\": true}\\n')", "import os\n"
    ),
    "a forged report": talking(
        '[os.write(n, b\'{"ended": "", "code": 0, "seconds": 0, "peak": 0}\\n\') for n in range(3, 40)]',
        "import os\n",
    ),
    "equal to everything": (
        "talking",
        "class Same(torch.Tensor):\n    @classmethod\n"
        "    def __torch_function__(cls, f, types, args=(), kw=None):\n"
        f"        return True\n{TALKING}    return q.as_subclass(Same), k.as_subclass(Same)\n",
    ),
    "code in a pickle": (
        "talking",
        "class Code:\n    def __reduce__(self):\n        return print, ('run by the grader',)\n"
        f"{TALKING}    return Code(), Code()\n",
    ),
    "more than can be read": talking("return 'x' * 10**8, q"),
    "a nest without end": talking("x = []\n    x.append(x)\n    return x, q"),
    "nan": talking("return q @ k.mT * float('nan'), q @ k.mT * float('nan')"),
    # --- what is typed in ---
    "numbers that are computed by a command": (
        "SHARES",
        'SHARES = get_ipython().getoutput("cat edition.json")',
    ),
    "numbers that are equal to everything": (
        "SHARES",
        "class Any(float):\n    def __sub__(self, other):\n        return 0.0\nSHARES = [[Any()] * 4] * 4",
    ),
    "numbers that are nan": ("SHARES", "SHARES = [[1e999 - 1e999] * 4] * 4"),
    "numbers without end": ("SHARES", "SHARES = [[1e999] * 4] * 4"),
}

# What each of the first task's attacks is after is in none of these.
SECRETS = ("def talk_inputs", '"variants"', "run by the grader", "uid=")
