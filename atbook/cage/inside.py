"""The process inside a cage: `python -m atbook.cage.inside SETTINGS`.

It imports what answers need, once, and never runs or reads anything of an answer itself. Requests come over a
socket that was handed in, which has no path and which no child has: its input is empty. For each request it
makes a child; the child takes limits upon itself that it cannot lift again, reads the request, runs the code
and writes what it returned. The parent measures the child from the outside, ends all that is left of it, and
reports.

What this file does is described in `atbook/cage/outside.py`, which starts it.
"""

import ctypes
import io
import json
import linecache
import os
import platform
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
from contextlib import nullcontext, redirect_stderr, redirect_stdout, suppress
from traceback import extract_tb
from types import ModuleType

SOURCE = "<your notebook>"
NOBODY = 65534
LONGEST = 400  # letters of an error


# --- What a child may not do, ever again ---

# Linux: numbers of system calls that start programs or processes, reach other processes or the network, keep
# memory that no limit counts (System V's, message queues, memfd), mount, or change namespaces and keys.
KEEPING = {
    "x86_64": {29, 30, 31, 64, 65, 66, 68, 69, 70, 71, 240, 241, 319, 155, 161, 165, 166, 272, 308, 248, 249}
    | {250, 323, 206, 141, 203, 144, 314, 256, 279, 312},
    "aarch64": {194, 195, 196, 190, 191, 193, 186, 187, 188, 189, 180, 181, 279, 41, 51, 40, 39, 97, 268, 217}
    | {218, 219, 282, 0, 140, 122, 119, 274, 238, 239, 272},
}
REFUSED = {
    "x86_64": (0xC000003E, {41, 57, 58, 59, 62, 101, 200, 298, 310, 311, 321, 322, 424, 425, 434, 438}, 56),
    "aarch64": (0xC00000B7, {198, 129, 117, 130, 241, 270, 271, 280, 221, 281, 424, 425, 434, 438}, 220),
}
LIMITS = {"x86_64": 302, "aarch64": 261}  # `prlimit64`, whose first argument may name another process
CLONE3, THREAD = 435, 0x00010000
SET_NO_NEW_PRIVILEGES, SET_SECCOMP, SET_DUMPABLE, FILTER = 38, 22, 4, 2


def seal() -> bool:
    """Give up, for good, all system calls that start or reach processes or the network (seccomp); threads
    remain. Returns False where the system has no such thing, and nothing was given up."""
    known = REFUSED.get(platform.machine())
    if sys.platform != "linux" or known is None:
        return False
    architecture, numbers, clone = known
    load, equal, at_least, any_bit, end = 0x20, 0x15, 0x35, 0x45, 0x06
    refuse, absent, allow = 0x00050001, 0x00050026, 0x7FFF0000  # EPERM, ENOSYS
    program = [(load, 0, 0, 4), (equal, 1, 0, architecture), (end, 0, 0, refuse), (load, 0, 0, 0)]
    program += [(at_least, 0, 1, 0x40000000), (end, 0, 0, refuse)]  # another way to name the same calls
    for number in sorted(numbers | KEEPING[platform.machine()]):
        program += [(equal, 0, 1, number), (end, 0, 0, refuse)]
    program += [(equal, 0, 3, LIMITS[platform.machine()]), (load, 0, 0, 16), (equal, 1, 0, 0)]
    program += [(end, 0, 0, refuse), (load, 0, 0, 0)]
    program += [(equal, 0, 1, CLONE3), (end, 0, 0, absent)]  # then threads are made by `clone`
    program += [(equal, 0, 3, clone), (load, 0, 0, 16), (any_bit, 1, 0, THREAD), (end, 0, 0, refuse)]
    program += [(end, 0, 0, allow)]

    class Step(ctypes.Structure):
        _fields_ = [
            ("code", ctypes.c_uint16),
            ("true", ctypes.c_uint8),
            ("false", ctypes.c_uint8),
            ("number", ctypes.c_uint32),
        ]

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_uint16), ("steps", ctypes.POINTER(Step))]

    steps = (Step * len(program))(*(Step(*line) for line in program))
    whole = Program(len(program), steps)
    control = ctypes.CDLL(None, use_errno=True).prctl
    if control(SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0):
        return False
    return control(SET_SECCOMP, FILTER, ctypes.byref(whole), 0, 0) == 0


def limit(settings: dict, seconds: float) -> None:
    """Take the limits of a child upon this process: processor time, memory, files, user, processes."""

    def at_most(kind: str, number: int) -> None:
        if hasattr(resource, kind):
            of = getattr(resource, kind)
            _, hard = resource.getrlimit(of)
            number = number if hard == resource.RLIM_INFINITY else min(number, hard)
            resource.setrlimit(of, (number, number))

    at_most("RLIMIT_CPU", int(seconds) + 1)
    at_most("RLIMIT_FSIZE", settings["file_bytes"])
    at_most("RLIMIT_NOFILE", 64)
    at_most("RLIMIT_CORE", 0)
    if sys.platform == "linux":  # elsewhere the limit counts what is mapped, or nothing at all
        with open("/proc/self/statm") as file:
            mapped = int(file.read().split()[0]) * resource.getpagesize()
        at_most("RLIMIT_AS", mapped + settings["memory_bytes"])
    if settings["drop_user"]:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    if not seal():
        at_most("RLIMIT_NPROC", 1)


# --- The child ---


def answered(request: dict) -> dict:
    """Run a request's code, call the function that it names, and return what came of it."""
    import torch

    from atbook.cage.values import Model

    def made(value):
        if isinstance(value, Model):
            from timm.models.vision_transformer import VisionTransformer

            model = VisionTransformer(**value.options).double().eval()
            model.load_state_dict(value.weights)
            return model
        return type(value)(made(part) for part in value) if isinstance(value, (list, tuple)) else value

    def leaves(value) -> list:
        return [*value.parameters()] if isinstance(value, torch.nn.Module) else [value]

    arguments = [made(value) for value in request["arguments"]]
    wanted = [leaf for at in request["gradients"] for leaf in leaves(arguments[at])]
    for leaf in wanted:
        leaf.requires_grad_()
    space = ModuleType("__main__")  # as a notebook is, so that dataclasses and their like find their module
    sys.modules["__main__"] = space
    lines = request["code"].splitlines(keepends=True)
    linecache.cache[SOURCE] = (len(request["code"]), None, lines, SOURCE)
    exec(compile(request["code"], SOURCE, "exec"), space.__dict__)
    with torch.no_grad() if request["no_grad"] else nullcontext(), Backward(request["by_hand"]) as backward:
        returned = getattr(space, request["name"])(*arguments)
    if backward.ran:
        raise RuntimeError(f"the gradient is to be written by hand, and autograd ran ({backward.ran})")
    if not request["gradients"]:
        return {"returned": returned}
    if not isinstance(returned, torch.Tensor) or not returned.requires_grad:
        return {"returned": returned, "gradients": None}
    weights = request["weights"]
    total = returned.sum() if weights is None else (returned * weights).sum()
    total.backward()
    gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in wanted]
    return {"returned": returned, "gradients": gradients}


class Backward:
    """Notices within it whether autograd goes a step back, however it is called.

    on: whether to look; it takes time.
    """

    def __init__(self, on: bool):
        #: The first step back that was taken; "" where none was.
        self.ran, self._profile = "", None
        if on:
            from torch.autograd.profiler import profile

            self._profile = profile(use_kineto=False)

    def __enter__(self) -> "Backward":
        if self._profile:
            self._profile.__enter__()
        return self

    def __exit__(self, *error) -> None:
        if self._profile:
            self._profile.__exit__(*error)
            names = (event.name for event in self._profile.function_events)
            self.ran = next((name.split()[-1] for name in names if "Backward" in name), "")


def explained(error: BaseException) -> str:
    """An error in a line, with the line of the notebook's code that made it."""
    at = [step.lineno for step in extract_tb(error.__traceback__) if step.filename == SOURCE]
    where = f" (line {at[-1]} of the answer)" if at else ""
    try:
        text = str(error)
    except Exception:
        text = "an error that has no text"
    return f"{type(error).__name__}{where}: {text}"[:LONGEST]


def child(content: bytes, settings: dict, seconds: float) -> None:
    """All of a child: it does not return."""
    code = 1
    try:
        os.setpgid(0, 0)
        out = settings["data"]
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(nothing, number)
        os.close(settings["report"])
        os.close(settings["requests"])
        limit(settings, seconds)
        from atbook.cage.values import pack, unpack

        said = io.StringIO()
        try:
            with redirect_stdout(said), redirect_stderr(said):
                reply = pack(answered(unpack(content)))
        except MemoryError:
            reply = pack({"error": "MemoryError: the answer needs more memory than it may have"})
        except BaseException as error:  # whatever an answer raises is what came of it
            reply = pack({"error": explained(error)})
        with open(out, "wb") as file:
            file.write(reply)
        code = 0
    finally:
        os._exit(code)


# --- Its parent ---


def waited(pid: int, alive: int, seconds: float, wall: float):
    """Wait for a child: (its state, what it used, why it was ended). It and its group are gone afterwards.

    alive: the end of a pipe whose other end the child holds; it tells at once that the child has ended. A
    child that closes its end early is asked for now and then instead.
    """
    deadline, reason = time.monotonic() + wall, ""
    select.select([alive], [], [], wall)
    while True:
        done, state, used = os.wait4(pid, os.WNOHANG)
        if done:
            break
        if time.monotonic() > deadline:
            reason = "time"
            os.kill(pid, signal.SIGKILL)
            _, state, used = os.wait4(pid, 0)
            break
        time.sleep(0.002)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    if os.WIFSIGNALED(state) and not reason:
        number = os.WTERMSIG(state)
        out_of_time = number == signal.SIGXCPU or used.ru_utime + used.ru_stime >= seconds
        reason = "time" if out_of_time else signal.Signals(number).name
    return state, used, reason


def emptied(folder: str) -> None:
    """Remove what a child left in the temporary folder."""
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        with suppress(OSError):  # one of another user goes with the cage
            shutil.rmtree(path) if os.path.isdir(path) and not os.path.islink(path) else os.unlink(path)


def main() -> None:
    """Serve requests until there are no more."""
    settings = json.loads(sys.argv[1])
    for name in settings["imports"]:
        __import__(name)
    import torch

    torch.set_num_threads(1)
    folder = tempfile.gettempdir()
    if sys.platform == "linux":
        # A child of the same user must not write on this process's own files.
        ctypes.CDLL(None).prctl(SET_DUMPABLE, 0, 0, 0, 0)
    report = os.fdopen(settings["report"], "w", buffering=1)
    report.write(json.dumps({"ready": True}) + "\n")
    requests = os.fdopen(settings["requests"], "rb", closefd=False)
    while line := requests.readline():
        size, seconds = json.loads(line)
        content = requests.read(size)
        inner = tempfile.mkdtemp(dir=folder)
        os.chmod(inner, 0o777)
        alive, held = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(alive)
            os.chdir(inner)
            tempfile.tempdir = inner
            child(content, settings, seconds)
        os.close(held)
        state, used, reason = waited(pid, alive, seconds, settings["patience"] * seconds + 5)
        os.close(alive)
        emptied(folder)
        unit = 1 if sys.platform == "darwin" else 1024
        measured = {
            "ended": reason,
            "code": os.waitstatus_to_exitcode(state),
            "seconds": round(used.ru_utime + used.ru_stime, 3),
            "peak": used.ru_maxrss * unit,
        }
        report.write(json.dumps(measured) + "\n")


if __name__ == "__main__":
    main()
