"""Small things that several test files need."""

import multiprocessing
import os
import pickle
import shutil
import time
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import timm
import torch
from filelock import FileLock
from packaging.version import Version
from torch.utils._python_dispatch import TorchDispatchMode

from atlib import create_vit, walk

ROOT = Path(__file__).resolve().parents[1]
SMALL_VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 3, "num_heads": 3, "num_classes": 5}
DROPS = dict.fromkeys("drop_rate pos_drop_rate proj_drop_rate attn_drop_rate".split(), 0.2)
DROPS |= {"patch_drop_rate": 0.3, "drop_path_rate": 0.5}


def randomise(model, seed=0):
    """Give every parameter a random value at which it matters: attention is far from flat."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            kind = name.split(".")[-1]
            if kind in ("weight", "gamma") and parameter.ndim == 1:  # norms and layer scale
                parameter.uniform_(0.5, 1.5, generator=generator)
            elif kind == "weight":
                parameter.normal_(std=parameter[0].numel() ** -0.5, generator=generator)
            else:  # biases, tokens, positions
                parameter.normal_(std=0.3, generator=generator)
    return model


def small_vit(seed=0, **changes):
    """A ViT of 16 patches, depth 3, 3 heads of width 8, 5 classes, its weights random by `seed`."""
    return randomise(create_vit(SMALL_VIT | changes), seed).eval()


def tiny(seed=0, **options):
    """A ViT for the built-in world that trains in no time, freshly initialised."""
    torch.manual_seed(seed)
    return create_vit("glyphs", **({"depth": 2, "embed_dim": 16, "num_heads": 2} | options))


def random_images(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def random_maps(*shape, seed=0, dtype=torch.float64):
    """Attention maps far from even, of any shape: rows over the last axis sum to 1."""
    return (2 * random_images(*shape, seed=seed, dtype=torch.float64)).softmax(-1).to(dtype)


def shared(*parts):
    """A folder or file of the workshop's `shared/`; the test is skipped where it is not there."""
    path = ROOT.parent.joinpath("shared", *parts)
    if not path.exists():
        pytest.skip(f"needs ../shared/{'/'.join(parts)}, which is not present next to this repository")
    return path


def made_once(tmp_path_factory, name, make):
    """A folder, and what `make(folder)` returned when it filled it: the processes that share a run of the
    tests (xdist) share the folder too, the first that asks makes it, and no test may change it."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        folder = tmp_path_factory.mktemp(name)
        return folder, make(folder)
    folder = tmp_path_factory.getbasetemp().parent / f"shared-{name}"
    returned = folder.with_suffix(".pickle")
    with FileLock(folder.with_suffix(".lock")):
        if not returned.exists():
            shutil.rmtree(folder, ignore_errors=True)  # of an attempt that failed
            folder.mkdir()
            returned.write_bytes(pickle.dumps(make(folder)))
    return folder, pickle.loads(returned.read_bytes())


# torch, timm and the library take seconds to import: one process imports them, all others are forked from it.
PRELOADED = "pytest hypothesis tests.helpers tests.stopped_runs tests.divided atbook.lab.study".split()
PRELOADED += ["torch.distributed.run", "accelerate.commands.launch"]


def forkserver():
    """The kind of processes that are forked from one that has imported everything and computed nothing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    ensure_running()  # else the first to use it, `run_each` for one, starts it with less
    return context


class Ended(NamedTuple):
    """How a process ended (-9: killed), what it printed, and what its function returned."""

    code: int | None
    said: str
    returned: Any


def in_a_fork(folder, function, *arguments, seconds=600, **environment):
    """Call a function in a process of its own, with one thread and some more environment variables, and wait
    for its end. Two files about it are left in `folder`."""
    return ended(*start(folder, function, *arguments, **environment), seconds)


def start(folder, function, *arguments, **environment):
    """The same without the wait: the process, and the files, to be given to `ended`."""
    files = folder / "said.txt", folder / "returned.pickle"
    process = forkserver().Process(target=_forked, args=(*files, environment, function, arguments))
    process.start()
    return process, *files


def ended(process, said, returned, seconds=600):
    process.join(seconds)
    if process.is_alive():
        process.kill()
        process.join()
    result = pickle.loads(returned.read_bytes()) if returned.exists() else None
    return Ended(process.exitcode, said.read_text(), result)


def _forked(said, returned, environment, function, arguments):
    with open(said, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ |= environment
    torch.set_num_threads(1)
    returned.write_bytes(pickle.dumps(function(*arguments)))


def set_fused(vit, fused):
    for block in vit.blocks:
        block.attn.fused_attn = fused
    return vit


def assert_same_logits(vit, images, tolerance=1e-5):
    """`walk` computes what the model computes."""
    torch.manual_seed(1)
    expected = vit(images)
    torch.manual_seed(1)
    logits = walk(vit, images).logits
    assert logits.shape == expected.shape
    assert expected.std() > 0.05, "logits this flat would agree whatever is computed"
    assert (logits - expected).abs().max() <= tolerance


# For PyTorch's counter, which leaves out the in-place form of baddbmm; the map-free loss uses it.
IN_PLACE = {torch.ops.aten.baddbmm_: lambda x, left, right, **_: 2 * left[0] * left[1] * left[2] * right[2]}


class Adapted(torch.nn.Linear):
    """A projection with an adapter, which reading its weight would leave out."""

    def forward(self, x):
        return super().forward(x) + 0.3 * x.sum(-1, keepdim=True)


class Seer(TorchDispatchMode):
    """Sees every tensor that any operation makes, and the names of the operations."""

    def __init__(self):
        super().__init__()
        self.shapes, self.names = set(), []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        self.names.append(str(operation))
        self.shapes |= {
            tuple(tensor.shape)
            for tensor in (result if isinstance(result, tuple | list) else [result])
            if isinstance(tensor, torch.Tensor)
        }
        return result

    def maps(self, N, heads=1):
        """The shapes that could hold the maps of that many heads."""
        return {s for s in self.shapes if s[-2:] == (N, N) or torch.Size(s).numel() >= heads * N * N}


class Bomb(torch.nn.Module):
    """Takes the place of a module that must not be run."""

    def __init__(self, name):
        super().__init__()
        self.name = name

    def forward(self, *arguments):
        raise AssertionError(f"{self.name} was run")


def mine(vit, after):
    """Put bombs into everything that runs after layer `after` has its q, k, v."""
    rest = "attn.attn_drop attn.norm attn.proj attn.proj_drop ls1 drop_path1 norm2 mlp ls2 drop_path2"
    paths = ["norm", "fc_norm", "head_drop", "head"]
    paths += [f"blocks.{i}.{part}" for i in range(max(after, 0), len(vit.blocks)) for part in rest.split()]
    for index in range(after + 1, len(vit.blocks)):
        paths += [f"blocks.{index}.{part}" for part in ("norm1", "attn.qkv", "attn.q_norm", "attn.k_norm")]
    for path in paths:
        parent, _, part = path.rpartition(".")
        setattr(vit.get_submodule(parent), part, Bomb(path))
    return vit


def same(left, right):
    """Whether two state dicts hold the same names and, bit for bit, the same values."""
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def without_head(state):
    """A state dict but for its classifier."""
    return {name: value for name, value in state.items() if not name.startswith("head.")}


def state_of(module):
    """A copy of a module's weights."""
    return {name: value.clone() for name, value in module.state_dict().items()}


def mark(folder, name):
    """Something to run in another process: leaves a file that says how many threads it had."""
    if name == "bad":
        raise ValueError("a bad one")
    (folder / name).write_text(str(torch.get_num_threads()))


def wait(folder, seconds):
    """Something that takes long in another process: leaves a file with its number for a name."""
    (folder / str(os.getpid())).touch()
    time.sleep(seconds)


OLD_TIMM = Version(timm.__version__) < Version("1.0.31")  # gets some things wrong itself
since_torch_11 = pytest.mark.skipif(
    Version(torch.__version__) < Version("2.11"), reason="torch compiles a pair in one graph since 2.11"
)
since_timm_31 = pytest.mark.skipif(OLD_TIMM, reason="timm itself does it right since 1.0.31")


def until(done):
    """Whether it is done within some time."""
    end = time.monotonic() + 120
    while not (found := done()) and time.monotonic() < end:
        time.sleep(0.05)
    return found


def alive(process):
    """Runs still: one that has ended but that nobody has asked after is a zombie."""
    try:
        return "State:\tZ" not in open(f"/proc/{process}/status").read()
    except OSError:
        return False
