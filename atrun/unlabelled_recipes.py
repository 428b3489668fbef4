"""Recipes that begin without labels: MAE's, MAE-Lite's, MoCo-v3's and DINO's, what is fine-tuned after them,
and AttnDistill."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from atlib.train.recipe import Recipe
from atrun.data.transforms import Augmentation
from atrun.method import Method
from atrun.published import ERASED, LAST_BATCH, POOLED, TUNED, Published

_MAE = "github.com/facebookresearch/mae at efb2a80, PRETRAIN.md, main_pretrain.py and models_mae.py"
_LITE = "arXiv 2205.14443; github.com/wangsr126/mae-lite at f3090d4"
_CROPPED = Augmentation(scale=(0.2, 1.0))
# MAE's pre-training, which MAE-Lite and AttnDistill keep: MAE's table 8
_PRETRAINED = {
    "warmup_epochs": 40,
    "batch_size": 4096,
    "base_lr": 1.5e-4,
    "betas": (0.9, 0.95),
    "weight_decay": 0.05,
    "label_smoothing": 0.0,
    "clip": None,
}
_OUR_MAE = (
    "Ours differs from the published auto-encoder in three points: positions are learned, not fixed sines;"
    " the decoder is not shown the class token; first weights are timm's."
)


def _decoder(width: int, depth: int, heads: int) -> dict:
    return {"mask_ratio": 0.75, "decoder_width": width, "decoder_depth": depth, "decoder_heads": heads}


def _mae_pretrain(size: str, *, name: str) -> Published:
    return Published(
        name,
        f"arXiv 2111.06377, table 8; {_MAE}",
        model=f"vit_{size}_patch16_224",
        method=Method.MAE,
        augmentation=_CROPPED,
        recipe=Recipe(**_PRETRAINED, epochs=800),
        pretext=_decoder(512, 8, 16),
        oddities=(
            "800 epochs are the command's and those of the paper's ablations; its best results have 1,600.",
            (
                "Table 8 names a random resized crop alone. The code's takes at least a fifth of the area,"
                " not timm's 8 %, and is mirrored half of the time."
            ),
            _OUR_MAE,
            LAST_BATCH,
        ),
    )


# --- ViT-Tiny of MAE-Lite: twelve heads in place of three ---

_LITE_TEACHER = (
    "It starts from what `mae-lite-pretrain` ends with: the run must name those weights as its teacher."
)
_TINY = {"model": "vit_tiny_patch16_224"}
_TWELVE = {"num_heads": 12}
_MIXED_PRECISION = "The published commands compute in mixed precision (`--amp`), this recipe does not."
_INTERPOLATION = (
    "Without RandAugment the code leaves the interpolation of its crops at timm's `random`, bilinear or"
    " bicubic by chance; here it is bicubic."
)
_NO_JITTER = "The code names a colour jitter of {}, which timm leaves out where there is RandAugment."
_MODEL_BY_CODE = (
    "The fine-tuned model averages its patches (`global_pool`), as MAE's does; ImageNet's are evaluated at a"
    " crop of 0.875."
)
_IMPROVED = {"label_smoothing": 0.0, "mixup": 0.2, "cutmix": 0.0}
_IMPROVED_AUGMENTATION = Augmentation(rand_augment="rand-m10-mstd0.5-inc1")


def _lite_pretrain(*, name: str) -> Published:
    return Published(
        name,
        f"{_LITE}, README.md, Pre-Training, mae_lite_exp.py and models_mae.py",
        **_TINY,
        options=_TWELVE,
        method=Method.MAE,
        augmentation=Augmentation(),
        recipe=Recipe(**_PRETRAINED, epochs=400),
        pretext=_decoder(96, 1, 3),
        oddities=(
            "Its crops take 8 % of the area and more, MAE's at least a fifth.",
            _INTERPOLATION,
            _OUR_MAE,
            _MIXED_PRECISION,
            LAST_BATCH,
        ),
    )


def _lite_distilled(*, name: str) -> Published:
    pretrained = _lite_pretrain(name=name)
    return replace(
        pretrained,
        source=f"{_LITE}, section 5, DISTILL.md and mae_lite_distill_exp.py",
        method=Method.DMAE,
        teacher="vit_base_patch16_224.mae",
        recipe=replace(pretrained.recipe, transfer_weight=1.0),
        oddities=(
            (
                "Distilled are the scaled logits of layer 12 before the softmax, by mean squared error,"
                " through a mixing of heads without bias (1 x 1) that is there although both models have"
                " twelve; weight 1."
            ),
            "The paper's equation writes softmax where its code takes logits: the code is followed.",
            "The teacher sees the same visible patches.",
            *pretrained.oddities,
        ),
    )


def _lite_fine_tune(*, name: str) -> Published:
    return Published(
        name,
        f"{_LITE}, README.md, Fine-Tuning on ImageNet, finetuning_exp.py (the improved recipe)",
        **_TINY,
        options=_TWELVE | POOLED,
        method=Method.FINE_TUNE,
        augmentation=_IMPROVED_AUGMENTATION,
        recipe=Recipe(
            epochs=300, batch_size=1024, base_lr=1e-3, min_lr=1e-6, layer_decay=0.85, **(TUNED | _IMPROVED)
        ),
        oddities=(_LITE_TEACHER, _NO_JITTER.format(0.3), _MODEL_BY_CODE, _MIXED_PRECISION, LAST_BATCH),
    )


def _lite_fine_tune_original(*, name: str) -> Published:
    tuned = _lite_fine_tune(name=name)
    return replace(
        tuned,
        source=f"{_LITE}, finetuning_mae_exp.py (MAE's own recipe)",
        drop_path=0.1,
        augmentation=ERASED,
        recipe=Recipe(epochs=100, batch_size=1024, base_lr=1e-3, min_lr=1e-6, layer_decay=0.85, **TUNED),
        oddities=(
            (
                "No command is printed for it: 100 epochs are the file's default, the batch is that of the"
                " other."
            ),
            tuned.oddities[0],
            _NO_JITTER.format(0.4),
            *tuned.oddities[2:],
        ),
    )


def _lite_scratch(*, name: str) -> Published:
    tuned = _lite_fine_tune(name=name)
    return replace(
        tuned,
        source=f"{_LITE}, section 2, table 1, and finetuning_exp.py without weights to start from",
        method=Method.SCRATCH,
        oddities=(
            (
                "Layer decay slows the first layers, though a model of random weights has nothing to protect."
                " So does the released file, which without weights starts from nothing; the paper's appendix,"
                " which may say otherwise, could not be read."
            ),
            *tuned.oddities[1:],
        ),
    )


def _lite_scratch_original(*, name: str) -> Published:
    return Published(
        name,
        "arXiv 2205.14443, section 2, table 1, with the recipe of DeiT (arXiv 2012.12877, table 9)",
        **_TINY,
        options=_TWELVE,
        method=Method.SCRATCH,
        drop_path=0.1,
        augmentation=ERASED,
        recipe=Recipe(**TUNED, epochs=300, batch_size=1024, base_lr=2.5e-4, min_lr=1e-5, repeats=3),
        oddities=(
            (
                "`deit-tiny` with twelve heads of 16 numbers in place of three of 64. The paper reports it;"
                " no code of its authors for it was found, so the values are those of DeiT's code."
            ),
            LAST_BATCH,
        ),
    )


def _lite_cifar100(*, name: str) -> Published:
    return Published(
        name,
        f"{_LITE}, TRANSFER.md, transfer.sh and finetuning_transfer_exp.py",
        **_TINY,
        options=_TWELVE | POOLED,
        method=Method.FINE_TUNE,
        augmentation=Augmentation(),
        recipe=Recipe(
            epochs=50,
            warmup_epochs=10,
            batch_size=512,
            base_lr=0.1 * 256 / 512,
            min_lr=1e-6,
            optimizer="sgd",
            weight_decay=0.0,
            layer_decay=0.75,
            label_smoothing=0.0,
            clip=1.0,
        ),
        oddities=(
            "SGD with Nesterov's momentum of 0.9, which are timm's values too.",
            (
                "CIFAR-100 is enlarged from 32 to 224 pixels; train on all of its 50,000 images with"
                " `--training_split train+validation`. Commands for the other sets are not printed: they"
                " differ in epochs, warm-up, rate and layer decay."
            ),
            _LITE_TEACHER,
            _MIXED_PRECISION,
            LAST_BATCH,
        ),
    )


# --- Contrast: MoCo-v3, also as MAE-Lite has it, and DINO ---

_HALF = "The published commands compute in mixed precision, this recipe does not."
_POSITIONS = "Positions are learned here; the published ViTs have fixed sines."
_FIRST_STEPS = "The published rate begins at 0 in the first step, here at the first part of the warm-up."


def _moco(model: str, options: Mapping, *, name: str) -> Published:
    return Published(
        name,
        "arXiv 2104.02057, section 5; github.com/facebookresearch/moco-v3 at c349e6e, CONFIG.md, main_moco.py"
        " and moco/builder.py",
        model=model,
        options=options,
        method=Method.MOCO,
        augmentation=Augmentation(interpolation="bilinear"),
        recipe=Recipe(
            epochs=300,
            warmup_epochs=40,
            batch_size=4096,
            base_lr=1.5e-4,
            weight_decay=0.1,
            label_smoothing=0.0,
            clip=None,
        ),
        pretext={
            "hidden_width": 4096,
            "momentum": 0.99,
            "projection_width": 256,
            "contrast_temperature": 0.2,
        },
        oddities=(
            "The commands for ViTs name no least crop, so that it is the code's 8 %; ResNets have a fifth.",
            "The patch projection is drawn and never trained, which keeps training stable.",
            _POSITIONS,
            _FIRST_STEPS,
            _HALF,
            LAST_BATCH,
        ),
    )


def _lite_moco(*, name: str) -> Published:
    moco = _moco(name=name, **_TINY, options=_TWELVE)
    return replace(
        moco,
        source=f"{_LITE} (here at a5d1a74), section 2, MOCOV3.md, mocov3.py and mocov3_exp.py",
        recipe=replace(moco.recipe, epochs=400, batch_size=1024),
        pretext={**moco.pretext, "freeze_patches": False},
        oddities=("The patch projection is trained, unlike MoCo-v3's own.", *moco.oddities[2:]),
    )


_DINO = (
    "github.com/facebookresearch/dino at 7c446df, README.md, main_dino.py, utils.py and vision_transformer.py"
)


def _dino(
    size: str, lengths: bool, batch_size: int, epochs: int, temperature: float, *, name: str
) -> Published:
    warmup = 30 / epochs if temperature > 0.04 else 0.0
    return Published(
        name,
        f"arXiv 2104.14294, section 3.2; {_DINO}",
        model=f"vit_{size}_patch16_224",
        options={"dynamic_img_size": True},
        method=Method.DINO,
        drop_path=0.1,
        augmentation=Augmentation(scale=(0.4, 1.0)),
        recipe=Recipe(
            epochs=epochs,
            warmup_epochs=10,
            batch_size=batch_size,
            base_lr=5e-4,
            min_lr=1e-6,
            weight_decay=0.04,
            weight_decay_end=0.4,
            label_smoothing=0.0,
            clip=3.0,
        ),
        pretext={
            "hidden_width": 2048,
            "momentum": 0.996,
            "outputs": 65536,
            "bottleneck_width": 256,
            "teacher_temperature": (0.04, temperature),
            "temperature_warmup": warmup,
            "frozen": 1 / epochs,
            "lengths": lengths,
            "local_views": 8,
            "local_scale": (0.05, 0.4),
            "local_size": 96,
        },
        oddities=(
            "The published code cuts the gradient of each weight to a norm of 3, here that of all together.",
            "Its teacher's temperature rises epoch by epoch, here step by step.",
            "Its small views are cut at 96 pixels, here at 224 and then made small.",
            _FIRST_STEPS,
            _HALF,
            LAST_BATCH,
        ),
    )


# --- AttnDistill: AdamW as MAE's, no labels ---


def _attndistill(model: str, epochs: int, row: str, *of_its_size: str, name: str) -> Published:
    return Published(
        name,
        f"arXiv 2210.00944, supplement, tables 7 ({row}) and 8; weights of the losses: mugs_teacher.sh of"
        " github.com/wangkai930418/attndistill at 21ad7c9",
        model=model,
        method=Method.ATTNDISTILL,
        augmentation=_CROPPED,
        recipe=Recipe(**_PRETRAINED, epochs=epochs, task_weight=0.0, transfer_weight=1.0),
        pretext={"attention_weight": 0.1, "attention_temperature": 10.0, "projector_layers": 4},
        oddities=(
            (
                "Table 8 names a random resized crop alone; the code's is MAE's: at least a fifth of the"
                " area, mirrored half of the time."
            ),
            *of_its_size,
            LAST_BATCH,
        ),
    )


_MUGS = (
    "It names no teacher, the run must: the paper's are Mugs and DINO models. timm has DINO's, such as"
    " `vit_small_patch16_224.dino`, but not Mugs': name their file."
)
_SUBSET = (
    "Trained on an ImageNet-Subset of the authors' choice, with an MAE ViT-S/16 of their own as teacher; both"
    " have fixed sines as positions, here they are learned."
)

PRETRAINING: Mapping[str, Callable[..., Published]] = {
    "mae-pretrain-vit-base": partial(_mae_pretrain, "base"),
    "mae-pretrain-vit-large": partial(_mae_pretrain, "large"),
    "mae-lite-pretrain": _lite_pretrain,
    "mae-lite-moco-v3": _lite_moco,
    "moco-v3-vit-small": partial(_moco, "vit_small_patch16_224", {"num_heads": 12}),
    "moco-v3-vit-base": partial(_moco, "vit_base_patch16_224", {}),
    "dino-vit-small": partial(_dino, "small", False, 512, 100, 0.04),
    "dino-vit-small-boosted": partial(_dino, "small", True, 1024, 300, 0.07),
    "dino-vit-base": partial(_dino, "base", False, 1024, 100, 0.04),
    "mae-lite-distilled-pretrain": _lite_distilled,
    "attndistill-vit-tiny": partial(
        _attndistill, "vit_tiny_patch16_224", 500, "ViT-T/16, ImageNet-1K", _MUGS
    ),
    "attndistill-vit-small": partial(
        _attndistill, "vit_small_patch16_224", 800, "ViT-S/16, ImageNet-1K", _MUGS
    ),
    "attndistill-vit-tiny-subset": partial(
        _attndistill, "vit_tiny_patch16_224", 3200, "ViT-T/16, ImageNet-Subset", _SUBSET
    ),
}
AFTER_PRETRAINING: Mapping[str, Callable[..., Published]] = {
    "mae-lite-fine-tune": _lite_fine_tune,
    "mae-lite-fine-tune-original": _lite_fine_tune_original,
    "mae-lite-scratch": _lite_scratch,
    "mae-lite-scratch-original": _lite_scratch_original,
    "mae-lite-cifar100": _lite_cifar100,
}
