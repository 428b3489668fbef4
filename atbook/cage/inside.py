"""The process inside a cage: `python -m atbook.cage.inside SETTINGS`.

It imports what answers need, once, and never runs or reads anything of an answer itself. Requests come over a
socket that was handed in, which has no path and which no child has: its input is empty. For each request it
makes a child; the child takes limits upon itself that it cannot lift again, reads the request, runs the code
and writes what it returned, which the parent passes on unread. The parent measures the child from the
outside, ends all that is left of it, and reports.

What this file does is described in `atbook/cage/outside.py`, which starts it.
"""

import ctypes
import io
import json
import linecache
import os
import resource
import select
import signal
import socket
import sys
import tempfile
import time
from contextlib import nullcontext, redirect_stderr, redirect_stdout, suppress
from traceback import extract_tb
from types import ModuleType

SOURCE = "<your notebook>"
NOBODY = 65534
LONGEST = 400  # letters of an error
MOST_THREADS, MOST_FILES, MOST_READ = 64, 256, 2**20  # at a time


# --- What a child may not do, ever again ---

# Linux: what a child may still ask of the system. All else is refused, also what a later kernel adds.
ALLOWED = """
read readv pread64 preadv write writev pwrite64 pwritev open openat close close_range lseek stat lstat
fstat newfstatat statx access faccessat faccessat2 readlink readlinkat getcwd chdir fchdir getdents
getdents64 mkdir mkdirat rmdir unlink unlinkat rename renameat renameat2 truncate ftruncate fsync
fdatasync fadvise64 umask chmod fchmod fchmodat utimensat statfs fstatfs dup dup2 dup3 pipe pipe2 poll
ppoll select pselect6 epoll_create1 epoll_ctl epoll_wait epoll_pwait eventfd2 mmap munmap mremap mprotect
madvise brk msync mincore membarrier futex futex_waitv set_robust_list rseq sched_yield getcpu
rt_sigaction rt_sigprocmask rt_sigreturn sigaltstack restart_syscall getpid gettid getppid getuid geteuid
getgid getegid getgroups getrlimit getrusage times sysinfo uname gettimeofday time nanosleep alarm
setitimer getitimer getrandom exit exit_group
""".split()
# Those that could name another process, or have the system send it a signal: {name: (argument, values)}.
CHECKED = {
    "prlimit64": (0, (0,)),
    "sched_getaffinity": (0, (0,)),
    "clock_gettime": (0, range(12)),
    "clock_getres": (0, range(12)),
    "clock_nanosleep": (0, range(12)),
    "fcntl": (1, (*range(8), 1030)),  # copies, flags and locks of a file
    "ioctl": (1, (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)),  # whether it is a terminal, and flags
}
ALLOW, REFUSE, ABSENT = 0x7FFF0000, 0x00050001, 0x00050026  # EPERM, ENOSYS
EQUAL, MASKED = 4, 7
THREAD, OF_THREADS = 0x00010000, 0x007D0F00  # the flags of `clone` where a thread is made
SET_DUMPABLE = 4


class Comparison(ctypes.Structure):
    """libseccomp's `scmp_arg_cmp`."""

    _fields_ = [("at", ctypes.c_uint), ("how", ctypes.c_int), ("a", ctypes.c_uint64), ("b", ctypes.c_uint64)]


def libseccomp() -> ctypes.CDLL | None:
    """The library that writes filters of system calls; None where there is none."""
    try:
        library = ctypes.CDLL("libseccomp.so.2")
    except OSError:
        return None
    library.seccomp_init.restype = ctypes.c_void_p
    return library


def seal(library: ctypes.CDLL, threads: bool) -> None:
    """Give up, for good, all system calls but those that a computation needs. threads: whether it may make
    any. Raises `OSError` where the system refuses the filter."""
    rules = ctypes.c_void_p(library.seccomp_init(REFUSE))

    def add(name: str, *comparisons: tuple[int, int, int, int], action: int = ALLOW) -> None:
        number = library.seccomp_syscall_resolve_name(name.encode())
        of_call = (Comparison * len(comparisons))(*comparisons)
        if number >= 0:  # this processor has it
            library.seccomp_rule_add_array(rules, action, number, len(comparisons), of_call)

    for name in ALLOWED:
        add(name)
    for name, (at, values) in CHECKED.items():
        for value in values:
            add(name, (at, EQUAL, value, 0))
    add("tgkill", (0, EQUAL, os.getpid(), 0))  # `abort`
    add("clone3", action=ABSENT)  # then threads are made by `clone`, whose flags can be read
    if threads:
        add("clone", (0, MASKED, THREAD | (2**64 - 1) & ~OF_THREADS, THREAD))
    if library.seccomp_load(rules):
        raise OSError("the filter of system calls was refused")


def limit(settings: dict, seconds: float, threads: bool) -> None:
    """Take the limits of a child upon this process: processor time, memory, files, user, processes."""

    def at_most(kind: int, number: int) -> None:
        _, hard = resource.getrlimit(kind)
        number = number if hard == resource.RLIM_INFINITY else min(number, hard)
        resource.setrlimit(kind, (number, number))

    at_most(resource.RLIMIT_CPU, int(seconds) + 1)
    at_most(resource.RLIMIT_FSIZE, settings["file_bytes"])
    at_most(resource.RLIMIT_NOFILE, 64)
    at_most(resource.RLIMIT_CORE, 0)
    if sys.platform == "linux":  # elsewhere the limit counts what is mapped, or nothing at all
        with open("/proc/self/statm") as file:
            mapped = int(file.read().split()[0]) * resource.getpagesize()
        at_most(resource.RLIMIT_AS, mapped + settings["memory_bytes"])
    if settings["drop_user"]:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    if library := libseccomp():
        seal(library, threads)
    else:
        at_most(resource.RLIMIT_NPROC, 1)


# --- The child ---


def answered(request: dict) -> dict:
    """Run a request's code, call the function that it names, and return what came of it."""
    import torch

    from atbook.cage.values import Model, pack, unpack

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
    # What it counts is what autograd recorded in this thread, and where it must not there is no other thread.
    recorded, by_hand = torch._C._autograd._get_sequence_nr, request["by_hand"]
    space = ModuleType("__main__")  # as a notebook is, so that dataclasses and their like find their module
    sys.modules["__main__"] = space
    vars(space).update(display=Nothing(), get_ipython=Nothing())
    lines = request["code"].splitlines(keepends=True)
    linecache.cache[SOURCE] = (len(request["code"]), None, lines, SOURCE)
    exec(compile(request["code"], SOURCE, "exec"), space.__dict__)
    with torch.no_grad() if request["no_grad"] else nullcontext():
        before = recorded()
        returned = getattr(space, request["name"])(*arguments)
        if by_hand:
            returned = unpack(pack(returned))  # a tensor may be of a class that computes only now
    if by_hand and (ran := recorded() - before):
        raise RuntimeError(f"the gradient is to be written by hand, and autograd recorded {ran} operations")
    if not request["gradients"]:
        return {"returned": returned}
    if not isinstance(returned, torch.Tensor) or not returned.requires_grad:
        return {"returned": returned, "gradients": None}
    weights = request["weights"]
    total = returned.sum() if weights is None else (returned * weights).sum()
    total.backward()
    gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in wanted]
    return {"returned": returned, "gradients": gradients}


class Nothing:
    """What stands in the place of a notebook's own functions: whatever is asked of it, nothing happens."""

    def __getattr__(self, name: str) -> "Nothing":
        return self

    def __call__(self, *given, **options) -> "Nothing":
        return self


def explained(error: BaseException) -> str:
    """An error in a line, with the line of the notebook's code that made it."""
    at = [step.lineno for step in extract_tb(error.__traceback__) if step.filename == SOURCE]
    where = f" (line {at[-1]} of the answer)" if at else ""
    try:
        text = str(error)
    except Exception:
        text = "an error that has no text"
    return f"{type(error).__name__}{where}: {text}"[:LONGEST]


def child(content: bytes, settings: dict, seconds: float, threads: bool, out: int) -> None:
    """All of a child: it does not return. out: where its reply is written."""
    code = 1
    try:
        os.setpgid(0, 0)
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(nothing, number)
        os.close(settings["socket"])
        limit(settings, seconds, threads)
        from atbook.cage.values import pack, unpack

        output = io.StringIO()
        try:
            with redirect_stdout(output), redirect_stderr(output):
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


def excess(pid: int, folder: str | None, file_bytes: int) -> str:
    """What a child has more of than it may and no limit of the system counts; "" for nothing. folder: a file
    system of its own; file_bytes: of one file."""
    with suppress(OSError):
        if len(os.listdir(f"/proc/{pid}/task")) > MOST_THREADS:
            return "threads"
    if folder:
        disk = os.statvfs(folder)
        full = (disk.f_blocks - disk.f_bfree) * disk.f_frsize > 4 * file_bytes
        if full or disk.f_files - disk.f_ffree > MOST_FILES:
            return "files"
    return ""


def waited(pid: int, out: int, seconds: float, settings: dict, folder: str | None) -> tuple[dict, bytes]:
    """Wait for a child: (what is reported of it, what it wrote). It and its group are gone afterwards.

    out: the end of a socket to whose other end the child writes; it tells at once that the child has ended.
    """
    os.set_blocking(out, False)
    data, reason, deadline = bytearray(), "", time.monotonic() + settings["patience"] * seconds + 5

    def read() -> bool:
        """Take what the child has written; whether there was something."""
        with suppress(BlockingIOError, ConnectionResetError):
            data.extend(part := os.read(out, MOST_READ))
            return bool(part)
        return False

    while not (ended := os.wait4(pid, os.WNOHANG))[0]:
        if select.select([out], [], [], 0.02)[0] and not read():
            time.sleep(0.002)  # it has ended, or closed its end early
        late = "time" * (time.monotonic() > deadline) or "size" * (len(data) > settings["reply_bytes"])
        if reason := late or excess(pid, folder, settings["file_bytes"]):
            os.kill(pid, signal.SIGKILL)
            ended = os.wait4(pid, 0)
            break
    _, state, used = ended
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    while read():
        pass
    cpu = used.ru_utime + used.ru_stime
    if os.WIFSIGNALED(state) and not reason:
        number = os.WTERMSIG(state)
        out_of_time = number == signal.SIGXCPU or cpu >= seconds
        reason = "time" if out_of_time else signal.Signals(number).name
    peak = used.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    code = os.waitstatus_to_exitcode(state)
    return dict(ended=reason, code=code, seconds=round(cpu, 3), peak=peak, size=len(data)), bytes(data)


def emptied(folder: str) -> None:
    """Remove what a child left in the temporary folder, however deep: what is in a folder moves up first."""
    left = os.listdir(folder)
    while left:
        path = os.path.join(folder, left.pop())
        with suppress(OSError):  # one of another user goes with the cage
            if os.path.islink(path) or not os.path.isdir(path):
                os.unlink(path)
                continue
            os.chmod(path, 0o700)
            for name in os.listdir(path):
                left.append(os.urandom(16).hex())
                os.rename(os.path.join(path, name), os.path.join(folder, left[-1]))
            os.rmdir(path)


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
    requests = os.fdopen(settings["socket"], "rb", closefd=False)
    reports = os.fdopen(settings["socket"], "wb", closefd=False)
    reports.write(b"ready\n")
    reports.flush()
    while line := requests.readline():
        size, seconds, threads = json.loads(line)
        content = requests.read(size)
        inner = tempfile.mkdtemp(dir=folder)
        os.chmod(inner, 0o777)
        parent_end, child_end = socket.socketpair()  # which no path below /proc opens, as it does a pipe
        pid = os.fork()
        if not pid:
            parent_end.close()
            os.chdir(inner)
            tempfile.tempdir = inner
            child(content, settings, seconds, threads, child_end.fileno())
        child_end.close()
        measured, data = waited(
            pid, parent_end.fileno(), seconds, settings, folder if settings["bounded"] else None
        )
        parent_end.close()
        emptied(folder)
        reports.write(json.dumps(measured).encode() + b"\n" + data)
        reports.flush()


if __name__ == "__main__":
    main()
