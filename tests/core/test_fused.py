"""The Triton kernels of the map-free loss where there is no GPU: interpreted (in a process of its own),
compiled for two architectures, and traced into one graph."""

import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from atlib import map_free
from atlib.attention import Seen
from atlib.map_free import by_blocks, by_fused_attention
from tests.helpers import ROOT

triton = pytest.importorskip("triton", reason="Triton is not installed: PyTorch brings it on Linux only")
fused = pytest.importorskip("atlib.fused")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402


def test_interpreted():
    """`interpreted_fused.py`, started anew, because Triton asks once whether to interpret."""
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/core/interpreted_fused.py"],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert ran.returncode == 0, ran.stdout[-5000:]


# --- compiled, without a GPU


ARCHITECTURES = 80, 90
# (N, student's width, teacher's, type, whether something is added): what is common, and each limit of a rule
COMMON = [
    (50, 64, 64, "bfloat16", False), (197, 64, 64, "bfloat16", False), (785, 64, 64, "bfloat16", False),
    (128, 128, 64, "bfloat16", False), (257, 64, 64, "bfloat16", True), (197, 32, 32, "bfloat16", True),
    (100, 64, 64, "bfloat16", True), (64, 128, 128, "bfloat16", True), (197, 128, 72, "bfloat16", True),
    (17, 64, 64, "float32", True), (50, 32, 32, "tf32", True), (197, 64, 64, "float32", True),
    (197, 128, 128, "float32", True), (197, 128, 128, "tf32", True),
]  # fmt: skip


def launches(monkeypatch, N, width, width_t, dtype, is_added, architecture):
    """[(kernel, its arguments by name)] of a step with these tensors: what `atlib.fused` would start."""
    started = []

    def note(kernel):
        def start(*arguments, **options):
            started.append((kernel, dict(zip(kernel.arg_names, arguments)) | options))

        return {(B * H * blocks,): start for B, H in [(2, 3)] for blocks in range(1, 1000)}

    monkeypatch.setattr(fused, "wrap_triton", note)
    monkeypatch.setattr(fused, "_has_wgmma", lambda _: architecture == 90)
    if dtype == "tf32":
        monkeypatch.setattr(fused, "_precision", lambda: "tf32")
        dtype = "float32"
    options = {"dtype": getattr(torch, dtype), "device": "meta"}
    q, k, q_t, k_t = (torch.empty(2, 3, N, d, **options) for d in [width] * 2 + [width_t] * 2)
    bias = torch.empty(3, N, N, device="meta") if is_added else None
    student = Seen(q.requires_grad_(), k.requires_grad_(), None, 0.1, bias=bias)
    fused.by_kernel(student, Seen(q_t, k_t, None, 0.1, bias=bias)).backward()
    return started


TYPES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}


def compiled(kernel, arguments, architecture, number="fp32"):
    """The compiled kernel; arguments specialised as at a launch: 1, and what 16 divides."""
    options = {name: arguments.pop(name) for name in ("num_warps", "num_stages")}
    signature, constants, attributes = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        value = arguments[name]
        if kernel.params[index].is_constexpr or value is None or (isinstance(value, int) and value == 1):
            signature[name], constants[index,] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name], attributes[index,] = TYPES[value.dtype], [["tt.divisibility", 16]]
        else:
            signature[name] = number if isinstance(value, float) else "i32"
            if isinstance(value, int) and value % 16 == 0:
                attributes[index,] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)


def resources(kernel, folder):
    """Registers a thread, bytes of stack a thread, which is what was spilled, and of shared memory."""
    tool = triton.knobs.nvidia.cuobjdump.path
    (folder / "kernel.cubin").write_bytes(kernel.asm["cubin"])
    told = subprocess.run(
        [tool, "--dump-resource-usage", folder / "kernel.cubin"], capture_output=True, text=True, check=True
    ).stdout
    registers, stack = (int(re.search(rf"{name}:(\d+)", told)[1]) for name in ("REG", "STACK"))
    return registers, stack, kernel.metadata.shared


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids="sm_{}".format)
@pytest.mark.parametrize("shape", COMMON, ids=str)
def test_compiled_without_spills(monkeypatch, tmp_path, shape, architecture):
    """No register is spilled, and shared memory stays under the 100 kB that consumer cards have."""
    try:
        tools = triton.knobs.nvidia.ptxas.path, triton.knobs.nvidia.cuobjdump.path
    except RuntimeError as missing:
        pytest.skip(f"no ptxas or cuobjdump here: {missing}")
    assert all(tools)
    started = launches(monkeypatch, *shape, architecture)
    assert [kernel.__name__ for kernel, _ in started] in (["_short"], ["_forward", "_backward", "_backward"])
    for kernel, arguments in started:
        registers, stack, shared = resources(compiled(kernel, arguments, architecture), tmp_path)
        print(f"{kernel.__name__} {shape} sm_{architecture}: {registers} registers, {stack} B, {shared} B")
        assert stack == 0 and shared <= 100_000, (kernel.__name__, registers, stack, shared)


@pytest.mark.parametrize("N", [197, 785])
def test_nothing_is_computed_in_float64(monkeypatch, N):
    """torch.compile gives numbers to kernels in float64: they are cast, and no score is."""
    for kernel, arguments in launches(monkeypatch, N, 64, 64, "bfloat16", False, 90):
        assert compiled(kernel, arguments, 90, number="fp64").asm["ptx"].count("f64") < 10


# --- traced


@pytest.fixture
def no_card(monkeypatch):
    """Tensors that say they lie on a CUDA device, and a driver that says which: what a compiler asks."""
    driver = SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 90, 32))
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    yield
    torch.compiler.reset()


def layers(N=197, d=64, dtype=torch.bfloat16, device="cuda", **options):
    q, k, q_t, k_t = (torch.empty(2, 3, N, d, dtype=dtype, device=device) for _ in range(4))
    return Seen(q.requires_grad_(), k.requires_grad_(), None, 0.1, **options), Seen(q_t, k_t, None, 0.1)


@pytest.mark.parametrize("N, number", [(197, (1, 0)), (785, (1, 2))])
def test_compilers_see_the_kernels_and_what_they_write(no_card, N, number):
    """Forward and backward as one graph each: kernels in it, and of their arguments only the results are
    taken for written; else the compiler would copy q and k."""
    from torch._dynamo.backends.common import aot_autograd

    graphs = []

    def record(graph, _):
        (output,) = (node.args[0] for node in graph.graph.nodes if node.op == "output")
        graphs.append(graph)
        return lambda *_: [None if node is None else torch.empty_like(node.meta["val"]) for node in output]

    backend = aot_autograd(fw_compiler=record, bw_compiler=record)
    torch.compile(lambda *pair: fused.by_kernel(*pair), fullgraph=True, backend=backend)(
        *layers(N, device="meta")
    ).backward()
    nodes_of = [graph.graph.nodes for graph in graphs]
    kernels = [[node for node in nodes if "triton_kernel_wrapper" in str(node.target)] for nodes in nodes_of]
    assert tuple(map(len, kernels)) == number
    written = {name for nodes in kernels for node in nodes for name in node.kwargs["tensors_to_clone"]}
    assert written == ({"loss", "grad_q", "grad_k"} if N == 197 else {"loss", "lse", "lse_t", "grad"})


def test_who_goes_which_way(no_card, monkeypatch):
    bias = torch.zeros(197, 197)
    with FakeTensorMode(allow_non_fake_inputs=True):
        way = lambda *pair: map_free._way(*pair)  # noqa: E731
        assert way(*layers()) is fused.by_kernel
        assert way(*layers(bias=bias)) is fused.by_kernel
        for of_image in ({"mask": bias.expand(2, 1, 197, 197)}, {"bias": bias.expand(2, 3, 197, 197)}):
            student, teacher = layers(**of_image)
            assert way(student, teacher) is way(teacher, student) is by_fused_attention
        assert way(*layers(bias=bias.requires_grad_())) is by_blocks
        assert way(*layers(dtype=torch.float64)) is by_blocks
        assert way(*layers(d=160)) is by_fused_attention
        assert way(*layers(device="cpu")) is by_blocks
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
        assert way(*layers()) is by_fused_attention


def test_a_head_that_32_bits_cannot_count_is_laid_out_anew():
    """Tokens far apart, as where they come before images: the kernels count within a head in 32 bits."""
    for stride, kept in ((2**26, True), (2**27, False)):
        q = torch.empty_strided((1, 1, 17, 8), (8, 8, stride, 1), device="meta")
        for x in fused._laid_out(q, q, q, q):
            assert (x is q) is kept and (kept or x.stride(2) == 8)
