"""Kernels that start at once: forks of a process that has imported the slow libraries; for tools/execute.py.

A kernel of the book takes about five seconds to import torch, timm and matplotlib, and the book has some
fifty of them. The fork server is Python's own (`multiprocessing`): a process of one thread, which imports and
then does nothing but fork. What a notebook imports it still imports by name, so one that lacks an import
fails. Linux alone: elsewhere a fork of a process with these libraries is not safe, and kernels start as ever.
"""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import EntryPoint
from multiprocessing import forkserver, parent_process

from jupyter_client.provisioning import KernelProvisionerFactory, LocalProvisioner

# What most notebooks import. Not matplotlib's back end: it looks for its kernel when it is imported. The
# last is of the build: multiprocessing imports the module that was started in each process that it starts.
IMPORTED = [
    "ipykernel.ipkernel",
    "ipykernel.kernelapp",
    "atbook.plot",
    "atbook.exercises",
    "atbook.lab.findings",
    "tools.execute",
]
BACK_END = "module://matplotlib_inline.backend_inline"


@contextmanager
def kernels(environment: dict[str, str]) -> Iterator[None]:
    """Within this, all kernels that jupyter_client starts are forked, from a server with this environment."""
    if sys.platform != "linux":
        yield
        return
    factory = KernelProvisionerFactory.instance()
    factory.provisioners["forked"] = EntryPoint("forked", f"{__name__}:Forked", factory.GROUP_NAME)
    usual, before = factory.default_provisioner_name, dict(os.environ)
    multiprocessing.set_forkserver_preload(IMPORTED)
    os.environ.update(environment)
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
    factory.default_provisioner_name = "forked"
    try:
        yield
    finally:
        factory.default_provisioner_name = usual


def _be_a_kernel(arguments: list[str], folder: str, environment: dict[str, str]) -> None:
    """Turn this process into what `python -m ipykernel_launcher ARGUMENTS` would be in that folder."""
    import matplotlib
    from ipykernel.kernelapp import launch_new_instance

    os.setsid()  # what ends the kernel ends what the notebook has started, too
    # The server lives as long as its children, so a child has to see by itself that the build was killed.
    threading.Thread(target=lambda: (parent_process().join(), os._exit(1)), daemon=True).start()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment | {"JPY_PARENT_PID": str(os.getppid())})
    # What matplotlib reads when it is imported, which here was earlier and elsewhere: the settings of this
    # folder (the slides have some), and ipykernel's choice of where figures go.
    matplotlib.rc_file(matplotlib.matplotlib_fname())
    matplotlib.rcParams["backend"] = BACK_END
    # Nothing of the build's own, by which a notebook could import what no reader has.
    for name in [name for name in sys.modules if name.split(".")[0] == __name__.split(".")[0]]:
        del sys.modules[name]
    sys.path[:] = [
        path for path in sys.path if path.startswith((sys.prefix, sys.base_prefix, "__editable__"))
    ]
    sys.argv = ["ipykernel_launcher", *arguments, f"--IPKernelApp.parent_handle={os.getppid()}"]
    launch_new_instance()


class _Kernel:
    """A forked process with those methods of `subprocess.Popen` that a provisioner calls."""

    stdin = stdout = stderr = None

    def __init__(self, process: multiprocessing.Process) -> None:
        self.process, self.pid = process, process.pid

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self) -> int:
        self.process.join()
        return self.process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def terminate(self) -> None:
        self.process.terminate()

    def kill(self) -> None:
        self.process.kill()


class Forked(LocalProvisioner):
    """Starts a kernel by a fork; everything else is jupyter_client's."""

    async def launch_kernel(self, cmd, **options):
        arguments = cmd[cmd.index("ipykernel_launcher") + 1 :]
        process = multiprocessing.get_context("forkserver").Process(
            target=_be_a_kernel, args=(arguments, str(options["cwd"]), dict(options["env"]))
        )
        process.start()
        self.process, self.pid, self.pgid = _Kernel(process), process.pid, process.pid
        self.cwd = options["cwd"]
        return self.connection_info
