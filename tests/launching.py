"""The launchers as functions, and what `accelerate launch` makes of a file of configs/accelerate."""

import os

from accelerate.commands.launch import _validate_launch_command, launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env
from torch.distributed import run

from tests.helpers import ROOT

FOLDER = ROOT / "configs" / "accelerate"


def torchrun(*arguments):
    """The command `torchrun`."""
    run.main(list(arguments))


def accelerate_launch(*arguments):
    """The command `accelerate launch`."""
    launch_command(launch_command_parser().parse_args(arguments))


def read(name, *more):
    """The launcher's arguments, with the file's values in them; `more` are arguments of the command line."""
    words = ["--config_file", str(FOLDER / f"{name}.yaml"), *more, "program.py"]
    arguments = launch_command_parser().parse_args(words)
    return _validate_launch_command(arguments)[0]


def surroundings(name, *more):
    """The environment variables about Accelerate and FSDP that every process of a launch gets."""
    made = prepare_multi_gpu_env(read(name, "--main_process_port", "0", *more))
    return {
        key: value
        for key, value in made.items()
        if key.startswith(("ACCELERATE_", "FSDP_")) and os.environ.get(key) != value
    }
