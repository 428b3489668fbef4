"""The benchmark of throughput: its networks are those of the studies, its counts, and one small run."""

from pathlib import Path

import pytest
import throughput
import torch
from throughput import NETWORKS, Sizes

from atbook.lab.scales import scales
from atbook.lab.studies import CENTRAL, STUDIES
from atbook.lab.study import Place, Sources
from atbook.records import read_file
from atlib import create_vit
from atlib.pair import student_of

SIZES = Sizes.of(create_vit("glyphs"))
# What the page of costs puts on one point with a network.
RECORDED = {
    "vit": (CENTRAL, "scratch"),
    "cait": (STUDIES["class-attention"], "cait, scratch"),
    "resmlp": (STUDIES["static-routing"], "resmlp"),
    "patch-conv": (STUDIES["one-softmax"], "attention"),
    "local": (STUDIES["locality"], "local, scratch, 1000 labels"),
    "binary": (STUDIES["bits"], "nothing, one-bit maps"),
}


def shapes(model):
    return {name: tuple(weight.shape) for name, weight in student_of(model).state_dict().items()}


@pytest.mark.parametrize("name", RECORDED)
def test_a_network_is_the_one_whose_accuracy_is_recorded(name):
    study, method = RECORDED[name]
    place = Place("find", None, Path("results"), Path("work"))
    trained = study.variant(method).build(Sources(place, scales()["find"], 0))
    measured = NETWORKS[name].build(SIZES)
    assert type(measured) is type(trained) and shapes(measured) == shapes(trained)


@pytest.mark.slow
def test_a_small_run_writes_its_record(tmp_path, capsys):
    out, threads = tmp_path / "records.jsonl", torch.get_num_threads()
    try:
        throughput.main(f"--batch 2 --passes 1 --repetitions 2 --out {out}".split())
    finally:
        torch.set_num_threads(threads)
    (record,), printed = read_file(out), capsys.readouterr().out
    assert (record.experiment, record.method) == ("benchmarks", "throughput-glyphs-cpu")
    assert record.config["threads"] == 1 and "out" not in record.config
    assert list(record.results["networks"]) == list(NETWORKS)
    for name, one in record.results["networks"].items():
        assert one["title"] in printed
        assert one["images_per_second"] == pytest.approx(2 / one["seconds"])
        ratios = [timed["vit"] / timed[name] for timed in record.history]
        assert one["ratio"] == pytest.approx(sum(ratios) / 2), "the median of two is their mean"
    assert record.results["networks"]["vit"]["ratio"] == 1
