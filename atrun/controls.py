"""`python -m atlib controls RUN`: does the student of a run follow its teacher's maps, or read them?"""

import argparse
from pathlib import Path

from atfamily.measures.controls import controls, controls_table, switched
from atlib.pair import Pair
from atrun.build import build, held_out, outputs_for, training_images
from atrun.classes import require_classes
from atrun.config import read_config
from atrun.runner import device, load_result, weights_of


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    parser.add_argument("folder", type=Path, metavar="RUN", help="a finished run of copy, or of distill")
    train = "train a student under each control, by the run's recipe (default: switch the maps of the run's)"
    parser.add_argument("--train", action="store_true", help=train)
    parser.add_argument("--seeds", type=int, default=3, help="with --train: students a row (default: 3)")
    rates = "with --train: learning rates to choose from"
    parser.add_argument("--rates", type=float, nargs="+", default=(), help=rates)
    parser.add_argument("--validation", metavar="SPLIT", help="with --rates: where they are chosen")
    parser.set_defaults(run=controls_command)


def controls_command(arguments: argparse.Namespace) -> int:
    config = read_config(arguments.folder)
    if not config.method.transfers:
        raise ValueError(f"{arguments.folder} is a run of {config.method}: controls are of copy or distill")
    images, tested_on = training_images(config), held_out(config)
    if not arguments.train:
        require_classes(weights_of(arguments.folder), tested_on)
        pair = load_result(weights_of(arguments.folder))
        if not isinstance(pair, Pair):
            raise ValueError(f"{arguments.folder} keeps no teacher: give --train")
        print(controls_table(switched(pair.to(device()), tested_on, images)))
        return 0
    outputs = outputs_for(config, images)
    built = build(config, outputs, getattr(images, "normalisation", None), arguments.folder)
    chosen_on = None if arguments.validation is None else held_out(config, arguments.validation)
    how = {"plan": built.model.plan, "rates": arguments.rates, "validation": chosen_on}
    of = built.model.teacher, built.student.build_classifier, images, tested_on, config.recipe
    print(controls_table(controls(*of, seeds=arguments.seeds, **how)))
    return 0
