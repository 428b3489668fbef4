"""The outside of a cage: `Cage` holds a process in which somebody else's code runs, `Answer` is one of its
functions, called as if it were here.

bubblewrap, where it is there and may make namespaces, shows the process no files but Python's own and a
temporary folder, no network, and no other process. With it or without, every call runs in a child of its own
with limits of processor time, memory, files and output, which can start no process (`inside.py`). `missing`
says what a system lacks of this.
"""

import json
import os
import selectors
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from atbook.cage.inside import libseccomp
from atbook.cage.values import pack, unpack

MEGABYTE = 2**20
MEMORY, FILES, REPLY = (
    2048 * MEGABYTE,
    16 * MEGABYTE,
    64 * MEGABYTE,
)  # bytes that a call may use, write, return
CRASHES = {
    "SIGSEGV",
    "SIGABRT",
    "SIGBUS",
    "SIGFPE",
    "SIGILL",
    "SIGSYS",
    "SIGXFSZ",
}  # what only its own code does
SECONDS = 10.0  # of a processor that a call may take
PATIENCE = 6.0  # how many times as long a call may take on a clock: a busy machine is no fault of an answer
ROOT = Path(__file__).resolve().parents[2]
# The same code as out here, whichever is installed.
INSIDE = "import sys; sys.path.insert(0, sys.argv.pop(1)); from atbook.cage.inside import main; main()"
START = 300.0  # seconds that a cage may take to be ready, on a very busy machine


class Reply(NamedTuple):
    """What came of a call."""

    # What was returned; None where something went wrong.
    value: Any
    # What went wrong, in words; "" where nothing did.
    error: str
    # Seconds of a processor; of one that waits, a part of what a clock says, so that waiting has an end too.
    seconds: float
    # The most memory that the process had at a time, in bytes.
    peak: int


class CageDamaged(RuntimeError):
    """No reply came, or none that can be read: it says nothing of the answer, which is to be run again."""


class AnswerFailed(AssertionError):
    """A call that returned nothing: the answer raised an error, or went over a limit."""


# --- What a system has ---


@lru_cache
def namespaces() -> bool:
    """Whether bubblewrap is here and may make namespaces."""
    if not shutil.which("bwrap"):
        return False
    try:
        command = ["bwrap", "--unshare-all", "--ro-bind", "/", "/", "--proc", "/proc", "true"]
        return subprocess.run(command, capture_output=True, timeout=60).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def missing() -> str:
    """What the cage of this system lacks, in a sentence; "" where it lacks nothing."""
    without = sys.platform == "linux" and not libseccomp()
    calls = (
        "libseccomp (libseccomp.so.2) is not installed: answers may make any system call. " if without else ""
    )
    if namespaces():
        return calls.strip()
    why = "bubblewrap may make no namespaces here" if shutil.which("bwrap") else "bubblewrap is not installed"
    if _drops_user(()):
        lacks = "answers can read what every user of this machine can"
    else:
        lacks = (
            "answers run as the user that you are, and can read and write your files, the edition's key too"
        )
    if sys.platform != "linux":
        lacks += ", reach the network, and take memory without a limit"
    holds = "The limits of time, output and processes hold. Grade where there is nothing to read."
    return f"{calls}{why}: {lacks}. {holds}"


def _drops_user(folders: Sequence[Path]) -> bool:
    """Whether answers run as a user of their own without namespaces: only root can give up what it is, and
    only where Python is not root's alone."""
    return os.geteuid() == 0 and _readable_by_all(_needed(folders))


def _needed(folders: Sequence[Path] = ()) -> list[Path]:
    """The folders that a cage's process has to read."""
    packages = [find_spec(name).origin for name in ("atlib", "atfamily", "atrun", "atbook")]
    needed = {
        Path(sys.prefix),
        Path(sys.base_prefix),
        *(Path(origin).parent for origin in packages if origin),
    }
    needed |= {Path(entry) for entry in sys.path if entry.endswith("site-packages")}
    paths = sorted({path.resolve() for path in [*needed, *folders] if path.is_dir()})
    return [path for path in paths if not any(other in path.parents for other in paths)]


def _readable_by_all(paths: Sequence[Path]) -> bool:
    """Whether every user may enter some folders."""
    return all(folder.stat().st_mode & 0o001 for path in paths for folder in (path, *path.parents))


@lru_cache
def _bounds_its_files() -> bool:
    """Whether this bubblewrap can bound a temporary folder (0.7)."""
    said = subprocess.run(["bwrap", "--help"], capture_output=True, text=True, timeout=60)
    return "--size" in said.stdout + said.stderr


def _bubblewrap(folders: Sequence[Path]) -> list[str]:
    """The command before a command, which is then the first process there, and sees only some folders."""
    command = [
        shutil.which("bwrap"),
        "--unshare-all",
        "--die-with-parent",
        "--new-session",
        "--cap-drop",
        "ALL",
    ]
    command += ["--as-pid-1"]
    command += ["--uid", "65534", "--gid", "65534", "--hostname", "cage", "--clearenv"]
    for name in ("usr", "lib", "lib64", "lib32", "bin", "etc/ld.so.cache", "etc/alternatives"):
        path = Path("/", name)
        if path.is_symlink():
            command += ["--symlink", os.readlink(path), str(path)]
        elif path.exists():
            command += ["--ro-bind", str(path), str(path)]
    size = ["--size", str(4 * FILES)] if _bounds_its_files() else []
    command += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
    for folder in _needed(folders):  # some may lie in /tmp: what is emptied after each call is another folder
        command += ["--ro-bind", str(folder), str(folder)]
    command += [*size, "--tmpfs", "/tmp/cage"]
    for name, value in _environment("/tmp/cage").items():
        command += ["--setenv", name, value]
    read_only = (part for path in ("/dev", "/tmp", "/") for part in ("--remount-ro", path))
    return [*command, *read_only, "--chdir", "/tmp/cage"]


def _environment(temporary: str) -> dict[str, str]:
    """The environment of a cage's process: one thread, and nothing of the teacher's own."""
    threads = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
    plain = {"TMPDIR": temporary, "HOME": temporary, "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}
    return plain | dict.fromkeys(threads, "1") | {"OBJC_DISABLE_INITIALIZE_FORK_SAFETY": "YES"}


# --- A cage ---


class Cage:
    """A process for other people's code, which has imported what that code needs.

    imports: the names of modules that it imports at the start, so that calls need not. folders: those that
    code may read, beside Python's own. use_namespaces: whether to use bubblewrap where it is there.
    """

    def __init__(
        self,
        imports: Sequence[str] = ("torch", "numpy"),
        folders: Sequence[Path] = (),
        use_namespaces: bool = True,
    ):
        self._imports, self._folders = list(imports), list(folders)
        self._caged = use_namespaces and namespaces()
        self._process: subprocess.Popen | None = None

    def __enter__(self) -> "Cage":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _start(self) -> None:
        self._temporary = TemporaryDirectory(prefix="cage-")
        folder = Path(self._temporary.name).resolve()
        folder.chmod(0o755)
        own = folder / "own"
        own.mkdir(mode=0o777)
        own.chmod(0o777)
        # sockets, which cannot be opened by a path below /proc, as pipes can
        pairs = [socket.socketpair() for _ in range(3)]
        self._requests, self._data, self._reports = (ours for ours, _ in pairs)
        theirs = [other for _, other in pairs]
        settings = {
            "imports": self._imports,
            **{name: end.fileno() for name, end in zip(("requests", "data", "report"), theirs)},
            "memory_bytes": MEMORY,
            "file_bytes": FILES,
            "patience": PATIENCE,
            "bounded": self._caged,
            "drop_user": not self._caged and _drops_user(self._folders),
        }
        python = (
            Path(sys.executable).parent.resolve() / Path(sys.executable).name
        )  # an environment may be a link
        command = [str(python), "-I", "-c", INSIDE, str(ROOT), json.dumps(settings)]
        if self._caged:
            command = _bubblewrap(self._folders) + command
        self._errors = open(folder / "errors", "w+b")  # noqa: SIM115
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            pass_fds=[end.fileno() for end in theirs],
            cwd=own,
            env=_environment(str(own)),
            start_new_session=True,
        )
        for end in theirs:
            end.close()
        self._report, self._line = self._reports.fileno(), b""
        self._requests.settimeout(START)
        for end in (self._data, self._reports):
            end.setblocking(False)
        if self._wait(START)[0] is None:
            self._errors.seek(0)
            said = self._errors.read()[-2000:].decode(errors="replace").strip()
            self.close()
            raise RuntimeError(f"the cage's process did not start: {said or 'it said nothing'}")

    def close(self) -> None:
        """End the cage's process and all that it started."""
        if self._process is None:
            return
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, 9)
        self._process.wait()
        for file in (self._requests, self._data, self._reports, self._errors):
            file.close()
        self._process = None
        self._temporary.cleanup()

    def _wait(self, seconds: float) -> tuple[dict | None, bytes]:
        """The next report of the cage's process, and what its child wrote; no report where it ended, wrote
        too much, or took too long."""
        out, data, deadline = self._data.fileno(), bytearray(), time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self._report, selectors.EVENT_READ)
            selector.register(out, selectors.EVENT_READ)
            while b"\n" not in self._line:
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready or len(data) > REPLY:
                    return None, bytes(data)
                for key, _ in ready:
                    part = os.read(key.fd, 2**16)
                    if key.fd == self._report:
                        if not part:
                            return None, bytes(data)
                        self._line += part
                    elif part:
                        data += part
                    else:
                        selector.unregister(out)
        line, _, self._line = self._line.partition(b"\n")
        while len(data) <= REPLY:  # what was written before the child ended
            try:
                part = os.read(out, 2**16)
            except (BlockingIOError, ConnectionResetError):
                break
            if not part:
                break
            data += part
        return json.loads(line), bytes(data)

    def call(
        self,
        code: str,
        name: str,
        arguments: Sequence,
        gradients: Sequence[int] = (),
        weights=None,
        no_grad: bool = False,
        by_hand: bool = False,
        seconds: float = SECONDS,
    ) -> Reply:
        """Run some code, and call a function of it.

        gradients: the places of arguments by which the sum of what is returned is differentiated; the value
        is then {"returned", "gradients"}. weights: of that sum. no_grad: whether autograd is off. by_hand:
        whether it is an error that autograd runs nevertheless. seconds: of a processor. Raises `CageDamaged`
        where no reply came that can be read, `RuntimeError` where the cage does not start.
        """
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._start()
        start = time.monotonic()
        content = dict(code=code, name=name, arguments=list(arguments), gradients=list(gradients))
        request = pack(content | dict(weights=weights, no_grad=no_grad, by_hand=by_hand))
        try:
            self._requests.sendall(
                json.dumps([len(request), seconds, not by_hand]).encode() + b"\n" + request
            )
            measured, data = self._wait(PATIENCE * seconds + 60)
        except (OSError, ValueError):  # it ended, or reported what is no report
            measured, data = None, b""
        charged = (time.monotonic() - start) / PATIENCE
        if measured is not None:
            charged = max(charged, measured["seconds"])
        if measured is None or len(data) > REPLY:
            self.close()  # the next call begins anew
            if len(data) > REPLY:
                return Reply(None, f"the answer returned more than {REPLY // MEGABYTE} MB", seconds, 0)
            raise CageDamaged("the cage's process ended or did not report")
        used = charged, measured["peak"]
        if measured["ended"] == "time":
            return Reply(None, f"the answer did not end within {seconds:g} s", *used)
        if measured["ended"] in ("threads", "files"):
            return Reply(None, f"the answer made too many {measured['ended']}", *used)
        if measured["ended"] in CRASHES:
            return Reply(None, f"the answer ended its own process ({measured['ended']})", *used)
        if measured["ended"] or measured["code"] or not data:  # by whom is not known
            raise CageDamaged("the answer's process ended and returned nothing")
        try:
            value = unpack(data)
        except ValueError as error:
            raise CageDamaged(f"what came back cannot be read: {error}") from error
        if isinstance(value, dict) and set(value) == {"error"}:
            return Reply(None, cleaned(str(value["error"])), *used)
        if not isinstance(value, dict) or "returned" not in value:
            raise CageDamaged("what came back is no reply")
        return Reply(value if gradients else value["returned"], "", *used)


def cleaned(text: str, longest: int = 400) -> str:
    """A text that can be written anywhere: on one line, without half letters and control letters."""
    whole = text[:longest].encode(errors="replace").decode()
    return " ".join("".join(letter if letter.isprintable() else " " for letter in whole).split())


class Answer:
    """A function of a student, which runs in a cage. Calls share some seconds of a processor; when they are
    used up, or one call did not end, the others fail at once. by_hand: whether autograd must not run.

    Raises `AnswerFailed` where a call returns nothing.
    """

    def __init__(self, cage: Cage, code: str, name: str, seconds: float = 60.0, by_hand: bool = False):
        self._cage, self._code, self._name, self._by_hand = cage, code, name, by_hand
        self._left = seconds

    def __call__(self, *arguments):
        return self._call(arguments).value

    def gradients(self, arguments: Sequence, of: Sequence[int], weights=None) -> tuple[Any, list | None]:
        """What is returned, and the gradients of its weighted sum by some arguments, a list of all; None
        where no gradient reaches them."""
        value = self._call(arguments, gradients=of, weights=weights).value
        return value["returned"], value["gradients"]

    def measured(self, arguments: Sequence, of: Sequence[int] = (), no_grad: bool = False):
        """(What is returned, its gradients by the arguments `of` or None, the most memory that the process
        has during the call, in bytes)."""
        reply = self._call(arguments, gradients=of, no_grad=no_grad)
        if of:
            return reply.value["returned"], reply.value["gradients"], reply.peak
        return reply.value, None, reply.peak

    def _call(self, arguments: Sequence, no_grad: bool = False, **options) -> Reply:
        if self._left <= 0:
            raise AnswerFailed("not tried: the time for this task was used up before")
        reply = self._cage.call(
            self._code,
            self._name,
            arguments,
            no_grad=no_grad or self._by_hand,
            by_hand=self._by_hand,
            seconds=min(SECONDS, self._left),
            **options,
        )
        self._left = 0.0 if "did not end" in reply.error else self._left - reply.seconds
        if reply.error:
            raise AnswerFailed(reply.error)
        return reply
