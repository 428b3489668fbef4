"""What Accelerate's own launcher reads in configs/accelerate, and what the files' comments claim."""

import pytest
import torch
from accelerate import Accelerator
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils import DistributedType

from atlib import processes
from atlib.recipe import Recipe
from atlib.vit import create_vit
from tests.launching import FOLDER, read, surroundings

FILES = sorted(path.stem for path in FOLDER.glob("*.yaml"))
FSDP = ("fsdp2_vit_large", "fsdp2_vit_huge")


@pytest.mark.parametrize("name", FILES)
def test_accelerate_reads_every_file(name):
    config = load_config_from_file(str(FOLDER / f"{name}.yaml"))  # refuses unknown keys
    assert config.use_cpu == (name == "one_cpu")
    kind = config.distributed_type
    file = read(name)
    assert file.multi_gpu == (kind == DistributedType.MULTI_GPU)
    assert file.use_fsdp == (kind == DistributedType.FSDP) == (name in FSDP)


@pytest.fixture
def launched(monkeypatch):
    """The environment that a file's launch gives to each process; more=value changes a variable of it."""

    def launch(name, **more):
        for key, value in (surroundings(name) | more).items():
            monkeypatch.setenv(key, value)

    return launch


@pytest.mark.parametrize("name", FSDP)
def test_fsdp_divides_what_the_student_has(name, launched):
    """Accelerate's plugin finds timm's Mlp in the ViT, and holds two thirds of its blocks' weights in it."""
    launched(name)
    plugin = processes.fsdp_plugin()
    vit = create_vit("glyphs")
    plugin.set_auto_wrap_policy(vit)
    (divided,) = plugin.auto_wrap_policy.keywords["transformer_layer_cls"]
    assert divided is type(vit.blocks[0].mlp) and divided.__name__ == "Mlp"
    policy = plugin.mixed_precision_policy
    assert policy.param_dtype is policy.reduce_dtype is None, "weights and gradients travel as float32"
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


@processes.accelerate_as_it_was()
def test_what_is_computed_is_as_the_recipe_says(launched, monkeypatch):
    """Not as the launcher does, which says "NO" where it was told no compiler: in graphs, in so many parts;
    and on a GPU, where Accelerate takes TF32 for what is compiled, in float32."""

    def on_a_gpu(**options):
        torch.backends.cuda.matmul.allow_tf32 = True
        return Accelerator(**options)

    monkeypatch.setattr(processes, "Accelerator", on_a_gpu)
    launched("one_machine_8_gpus", ACCELERATE_GRADIENT_ACCUMULATION_STEPS="4")
    for compiled, said, used in [(True, "NO", "INDUCTOR"), (True, "EAGER", "EAGER"), (False, "EAGER", "NO")]:
        monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", said)
        started = processes.start_processes(Recipe(compile=compiled, accumulate=2), cpu=True)
        assert started.state.dynamo_plugin.backend.value == used
        assert started.gradient_accumulation_steps == 2
        assert torch.get_float32_matmul_precision() == "highest"
