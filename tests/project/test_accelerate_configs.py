"""The launch files of configs/accelerate: what Accelerate's own launcher reads in them, and what their
comments claim."""

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils import DistributedType

from atlib import processes
from atlib.vit import create_vit
from tests.helpers import in_a_fork
from tests.launching import FOLDER, accelerate_launch, read, surroundings

# Processes and machines of every file, and what kind of run it starts.
FILES = {
    "one_cpu": (1, 1, "NO"),
    "two_processes_cpu": (2, 1, "MULTI_GPU"),
    "one_gpu": (1, 1, "NO"),
    "one_machine_8_gpus": (8, 1, "MULTI_GPU"),
    "several_machines": (64, 8, "MULTI_GPU"),
    "fsdp2_vit_large": (8, 1, "FSDP"),
    "fsdp2_vit_huge": (16, 2, "FSDP"),
}
FSDP = ("fsdp2_vit_large", "fsdp2_vit_huge")


@pytest.mark.parametrize("name", FILES)
def test_accelerate_reads_every_file(name):
    config = load_config_from_file(str(FOLDER / f"{name}.yaml"))  # refuses unknown keys
    processes, machines, kind = FILES[name]
    read_config = config.num_processes, config.num_machines, config.distributed_type
    assert read_config == (processes, machines, DistributedType(kind))
    assert config.use_cpu == (name == "one_cpu")
    file = read(name)
    assert (file.multi_gpu, file.use_fsdp) == (kind == "MULTI_GPU", kind == "FSDP")


@pytest.mark.slow
def test_two_processes_on_the_cpu_really_are_two(tmp_path):
    """The command of the file's comment; some launches that look like it start one process and say
    nothing."""
    (tmp_path / "program.py").write_text(
        "from accelerate import Accelerator\na = Accelerator()\nassert a.num_processes == 2, a.state\n"
        "open(f'{__file__[:-10]}{a.process_index}.txt', 'w').write(a.device.type)\na.end_training()\n"
    )
    program = tmp_path / "program.py"
    words = ["--main_process_port", "0", "--config_file", FOLDER / "two_processes_cpu.yaml", program]
    environment = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    done = in_a_fork(tmp_path, accelerate_launch, *map(str, words), seconds=300, **environment)
    assert done.code == 0, done.said
    assert [(tmp_path / f"{rank}.txt").read_text() for rank in range(2)] == ["cpu", "cpu"]


@pytest.fixture
def launched(monkeypatch):
    """The environment that a file's launch gives to each process; more=value changes a variable of it."""

    def launch(name, **more):
        for key, value in (surroundings(name) | more).items():
            monkeypatch.setenv(key, value)

    return launch


@pytest.mark.parametrize("name", FSDP)
def test_fsdp_divides_what_the_student_has(name, launched):
    """Accelerate's plugin, as the file sets it, finds timm's Mlp in the ViT, and holds two thirds of its
    blocks' weights in it."""
    launched(name)
    plugin = processes.fsdp_plugin()
    vit = create_vit("glyphs")
    plugin.set_auto_wrap_policy(vit)
    (divided,) = plugin.auto_wrap_policy.keywords["transformer_layer_cls"]
    assert divided is type(vit.blocks[0].mlp) and divided.__name__ == "Mlp"
    settings = plugin.fsdp_version, plugin.reshard_after_forward, plugin.activation_checkpointing
    assert settings == (2, True, False)
    policy = plugin.mixed_precision_policy
    assert (policy.param_dtype, policy.reduce_dtype, policy.output_dtype) == (None, None, None), (
        "weights and gradients travel as float32"
    )
    of_blocks, of_mlps = (
        sum(parameter.numel() for block in vit.blocks for parameter in part(block).parameters())
        for part in (lambda b: b, lambda b: b.mlp)
    )
    assert of_mlps / of_blocks == pytest.approx(2 / 3, abs=0.01)


@pytest.mark.parametrize(
    "line, value",
    [
        ("fsdp_version", "1"),
        ("fsdp_state_dict_type", "SHARDED_STATE_DICT"),
        ("fsdp_cpu_ram_efficient_loading", "true"),
        ("fsdp_activation_checkpointing", "true"),
    ],
)
def test_what_fsdp_could_not_do_here_is_refused_by_its_line(line, value, launched):
    launched("fsdp2_vit_large", **{line.upper(): value})
    with pytest.raises(ValueError, match=line):
        processes.fsdp_plugin()
