"""The outside of a cage: `Cage` holds a process in which somebody else's code runs, `Answer` is one of its
functions, called as if it were here.

bubblewrap, where it is there and may make namespaces, shows the process no files but Python's own and a
temporary folder, no network, and no other process. With it or without, every call runs in a child of its own
with limits of processor time, memory, files and output, which can start no process (`inside.py`). `missing`
says what a system lacks of this.
"""

import json
import os
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
# Bytes that a call may use, write and return.
MEMORY, FILES, REPLY = 2048 * MEGABYTE, 16 * MEGABYTE, 64 * MEGABYTE
# How only a process's own code ends it.
CRASHES = {"SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGSYS", "SIGXFSZ"}
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
    try:
        command = ["bwrap", "--unshare-all", "--ro-bind", "/", "/", "--proc", "/proc", "true"]
        return subprocess.run(command, capture_output=True, timeout=60).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def missing() -> str:
    """What the cage of this system lacks, in a sentence; "" where it lacks nothing."""
    lacks = []
    if sys.platform == "linux" and not libseccomp():
        lacks.append("libseccomp (libseccomp.so.2) is not installed: answers may make any system call.")
    if not namespaces():
        why = (
            "bubblewrap may make no namespaces here"
            if shutil.which("bwrap")
            else "bubblewrap is not installed"
        )
        if _drops_user(()):
            can = "can read what every user of this machine can"
        else:
            can = "run as the user that you are, and can read and write your files, the edition's key too"
        if sys.platform != "linux":
            can += ", reach the network, and take memory without a limit"
        holds = "The limits of time, output and processes hold. Grade where there is nothing to read."
        lacks.append(f"{why}: answers {can}. {holds}")
    return " ".join(lacks)


def _drops_user(folders: Sequence[Path]) -> bool:
    """Whether answers run as a user of their own without namespaces: only root can give up what it is, and
    only where Python is not root's alone."""
    readable = (part for path in _needed(folders) for part in (path, *path.parents))
    return os.geteuid() == 0 and all(part.stat().st_mode & 0o001 for part in readable)


def _needed(folders: Sequence[Path]) -> list[Path]:
    """The folders that a cage's process has to read."""
    origins = [find_spec(name).origin for name in ("atlib", "atfamily", "atrun", "atbook")]
    needed = [sys.prefix, sys.base_prefix, *(path for path in sys.path if path.endswith("site-packages"))]
    needed += [Path(origin).parent for origin in origins if origin]
    paths = sorted({Path(path).resolve() for path in (*needed, *folders) if Path(path).is_dir()})
    return [path for path in paths if not any(other in path.parents for other in paths)]


BARE = """--unshare-all --die-with-parent --new-session --as-pid-1 --cap-drop ALL --uid 65534 --gid 65534
--hostname cage --clearenv --proc /proc --dev /dev --tmpfs /tmp""".split()


def _bubblewrap(folders: Sequence[Path]) -> list[str]:
    """The command before a command, which is then the first process there, and sees only some folders."""
    command = [shutil.which("bwrap"), *BARE]
    for name in ("usr", "lib", "lib64", "lib32", "bin", "etc/ld.so.cache", "etc/alternatives"):
        path = Path("/", name)
        if path.is_symlink():
            command += ["--symlink", os.readlink(path), str(path)]
        elif path.exists():
            command += ["--ro-bind", str(path), str(path)]
    for folder in _needed(folders):  # some may lie in /tmp: what is emptied after each call is another folder
        command += ["--ro-bind", str(folder), str(folder)]
    command += ["--tmpfs", "/tmp/cage"]
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
        workspace = folder / "own"
        workspace.mkdir()
        workspace.chmod(0o777)
        self._socket, other = socket.socketpair()
        settings = {
            "imports": self._imports,
            "socket": other.fileno(),
            "memory_bytes": MEMORY,
            "file_bytes": FILES,
            "reply_bytes": REPLY,
            "patience": PATIENCE,
            "bounded": self._caged,
            "drop_user": not self._caged and _drops_user(self._folders),
        }
        python = Path(sys.executable).parent.resolve() / Path(sys.executable).name  # its folder may be a link
        command = [str(python), "-I", "-c", INSIDE, str(ROOT), json.dumps(settings)]
        with open(folder / "errors", "w+b") as errors:
            self._process = subprocess.Popen(
                [*(_bubblewrap(self._folders) if self._caged else ()), *command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                pass_fds=[other.fileno()],
                cwd=workspace,
                env=_environment(str(workspace)),
                start_new_session=True,
            )
            other.close()
            self._socket.settimeout(START)
            self._reports = self._socket.makefile("rb")
            with suppress(OSError):
                if self._reports.readline():
                    return
            errors.seek(0)
            message = errors.read()[-2000:].decode(errors="replace").strip()
        self.close()
        raise RuntimeError(f"the cage's process did not start: {message or 'it said nothing'}")

    def close(self) -> None:
        """End the cage's process and all that it started."""
        if self._process is None:
            return
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, 9)
        self._process.wait()
        self._reports.close()
        self._socket.close()
        self._process = None
        self._temporary.cleanup()

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
        self._socket.settimeout(PATIENCE * seconds + 60)
        try:
            self._socket.sendall(json.dumps([len(request), seconds, not by_hand]).encode() + b"\n" + request)
            measured = json.loads(self._reports.readline())
            data = self._reports.read(measured["size"])
        except (OSError, ValueError) as error:  # it ended, or reported what is no report
            self.close()  # the next call begins anew
            raise CageDamaged("the cage's process ended or did not report") from error
        ended = measured["ended"]
        used = max((time.monotonic() - start) / PATIENCE, measured["seconds"]), measured["peak"]
        if ended == "time":
            return Reply(None, f"the answer did not end within {seconds:g} s", *used)
        if ended == "size":
            return Reply(None, f"the answer returned more than {REPLY // MEGABYTE} MB", *used)
        if ended in ("threads", "files"):
            return Reply(None, f"the answer made too many {ended}", *used)
        if ended in CRASHES:
            return Reply(None, f"the answer ended its own process ({ended})", *used)
        if ended or measured["code"] or not data:  # by whom is not known
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

    def beside(self, code: str, name: str) -> "Answer":
        """A function of the grader's own in the same cage, to compare with."""
        return Answer(self._cage, code, name)

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
