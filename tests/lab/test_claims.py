"""Claims and verdicts: the rule on hand-written records, what each claim reads, and the committed records
recomputed the long way."""

import json
import math
from pathlib import Path

import pytest

from atlib.lab import evidence
from atlib.lab.claims import CLAIMS, NOTEBOOKS, claims_table
from atlib.lab.evidence import VERDICTS, higher, lower, no_better, no_worse, of
from atlib.record import Record

ROOT = Path(__file__).resolve().parents[2]


def write(results, study, method, by_seed, scale="built-in", kind="run", trial=None):
    """Lines of a file of records, written without atlib: {seed: results}."""
    path = results / study / f"{scale}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    for seed, values in by_seed.items():
        values = values if isinstance(values, dict) else {"test_accuracy": values}
        fields = {
            "schema": 1,
            "experiment": study,
            "method": method,
            "seed": seed,
            "config": {},
            "results": values,
            "history": [],
            "seconds": 1.0,
            "peak_memory_mb": 1.0,
            "about": {
                name: "x"
                for name in ("python", "torch", "timm", "atlib", "device", "threads", "commit", "date")
            },
            "kind": kind,
            "trial": trial,
        }
        with open(path, "a") as file:
            file.write(json.dumps(fields) + "\n")


def claim_of(chapter, start):
    (found,) = [claim for claim in CLAIMS if claim.chapter == chapter and claim.says.startswith(start)]
    return found


# --- The rule


@pytest.mark.parametrize(
    "a, verdict",
    [
        ([0.51, 0.52, 0.53], "holds"),
        ([0.49, 0.48, 0.47], "does not hold"),
        ([0.90, 0.90, 0.49], "undecided"),
        ([0.51, 0.52, 0.50], "undecided"),
        ([0.90, 0.90], "not tested"),
        ([], "not tested"),
    ],
)
def test_sign_in_all_of_at_least_three_seeds_decides(tmp_path, a, verdict):
    write(tmp_path, "s", "a", dict(enumerate(a)))
    write(tmp_path, "s", "b", dict.fromkeys(range(5), 0.50))
    assert higher(of("s", "a"), of("s", "b")).evidence(tmp_path).verdict == verdict
    opposite = {"holds": "does not hold", "does not hold": "holds"}.get(verdict, verdict)
    assert lower(of("s", "a"), of("s", "b")).evidence(tmp_path).verdict == opposite


@pytest.mark.parametrize(
    "a, verdict",
    [
        ([0.495, 0.60, 0.491], "holds"),
        ([0.485, 0.40, 0.489], "does not hold"),
        ([0.495, 0.60, 0.485], "undecided"),
    ],
)
def test_no_worse_leaves_a_margin_of_one_point(tmp_path, a, verdict):
    write(tmp_path, "s", "a", dict(enumerate(a)))
    write(tmp_path, "s", "b", dict.fromkeys(range(5), 0.50))
    assert no_worse(of("s", "a"), of("s", "b")).evidence(tmp_path).verdict == verdict
    assert no_better(of("s", "b"), of("s", "a")).evidence(tmp_path).verdict == verdict


def test_figures_are_mean_and_deviation_of_differences_within_seeds(tmp_path):
    write(tmp_path, "s", "a", {0: 0.50, 1: 0.72, 3: 0.92, 7: 0.1})
    write(tmp_path, "s", "b", {3: 0.90, 0: 0.54, 1: 0.70, 2: 0.0})  # seeds 2 and 7 have no partner
    found = higher(of("s", "a"), of("s", "b"))
    assert found.differences(tmp_path) == pytest.approx([-0.04, 0.02, 0.02])
    # mean 0; deviations -4, 2, 2 points: sqrt(24 / 2)
    assert found.evidence(tmp_path).figures in (
        f"a − b {zero} ± {math.sqrt(12):.1f} points, 2 of 3 seeds" for zero in ("+0.0", "−0.0")
    )


def test_tuning_teachers_other_scales_and_names_that_begin_alike_are_left_out(tmp_path):
    write(tmp_path, "s", "a", {0: 0.5})
    write(tmp_path, "s", "a again", {1: 0.5})
    write(tmp_path, "s", "a", {2: 0.5}, kind="trial", trial=0)
    write(tmp_path, "s", "a", {5: 0.5}, kind="teacher")
    write(tmp_path, "s", "a", {3: 0.5}, scale="elsewhere")
    write(tmp_path, "s", "a", {4: {"pretraining_loss": 0.5}})
    assert of("s", "a").numbers(tmp_path, "built-in") == {0: 0.5}


def test_parts_are_taken_together(tmp_path):
    parts = {name: evidence.Evidence(name[0], name) for name in VERDICTS}
    holds, fails, undecided, untested = parts.values()
    assert evidence.together([holds, holds]) == ("h; h", "holds")
    assert evidence.together([holds, undecided]).verdict == "undecided"
    assert evidence.together([undecided, untested, holds]).verdict == "not tested"
    assert evidence.together([untested, fails, holds]).verdict == "does not hold"


# --- What the claims read


def test_ensemble_is_compared_with_the_better_of_the_two_in_each_seed(tmp_path):
    # the student's, the fine-tuned model's, their ensemble's
    scores = [(0.80, 0.90, 0.91), (0.95, 0.90, 0.94), (0.70, 0.80, 0.82)]
    for method in ("copy", "distill"):
        write(
            tmp_path,
            "comparison",
            method,
            {n: {"test_accuracy": a, "ensemble": {"fine-tune": e}} for n, (a, _, e) in enumerate(scores)},
        )
    write(tmp_path, "comparison", "fine-tune", {n: f for n, (_, f, _) in enumerate(scores)})
    found = claim_of("14", "A student of maps").built_in(tmp_path)
    assert found.verdict == "undecided"  # +1, -1 and +2 points
    assert found.figures.count("+0.7 ± 1.5 points, 2 of 3 seeds") == 2


def test_cka_is_read_on_the_diagonal_and_averaged_over_layers(tmp_path):
    def table(*diagonal):
        return {
            "cka to fine-tune": [
                [value if i == j else 9.0 for j in range(len(diagonal))] for i, value in enumerate(diagonal)
            ]
        }

    for method in ("copy", "distill"):
        write(tmp_path, "comparison", method, dict.fromkeys(range(3), table(0.2, 0.6)))
    write(tmp_path, "comparison", "fine-tune again", dict.fromkeys(range(3), table(0.9, 0.7)))
    found = claim_of("13", "Are a student's features less").built_in(tmp_path)
    told = "fine-tune again −0.400 ± 0.000 CKA, 3 of 3 seeds"
    assert found == (f"copy − {told}; distill − {told}", "holds")


def test_effective_robustness_is_the_distance_from_the_line_of_each_set(tmp_path):
    """A pool on two lines, logit(shifted) = logit(test accuracy) - 1 and - 3: a model's distance from them
    has a closed form."""

    def on_line(x, down):
        return 1 / (1 + math.exp(down - math.log(x / (1 - x))))

    def result(x, a=0.0, b=0.0):
        return {
            "test_accuracy": x,
            "unshifted": 0.0,
            "noise@1": on_line(x, 1) + a,
            "noise@5": on_line(x, 3) + b,
            "filtered": 0.0,
        }

    for n, x in enumerate((0.3, 0.5, 0.7, 0.9)):
        write(tmp_path, "shifts-pool", f"model {n}", {0: result(x)})
    for method, beyond in (("copy", (0.05, 0.01)), ("distill", (0.03, -0.01)), ("fine-tune", (0.02, 0.02))):
        write(
            tmp_path, "shifts", method, {seed: result(x, *beyond) for seed, x in enumerate((0.4, 0.6, 0.8))}
        )
    assert evidence.beyond_expectation("copy").numbers(tmp_path, "built-in") == pytest.approx(
        {0: 0.03, 1: 0.03, 2: 0.03}
    )
    figures, verdict = claim_of("16", "Is it also behind in effective").built_in(tmp_path)
    assert verdict == "does not hold"
    assert (
        figures
        == "copy − fine-tune +1.0 ± 0.0 points, 0 of 3 seeds; distill − fine-tune −1.0 ± 0.0 points, 3 of 3"
        " seeds"
    )


def test_real_images_are_used_when_there_are_enough_seeds_of_them(tmp_path):
    claim = claim_of("05", "A student with copied maps")

    def run(scale, copy, seeds):
        (tmp_path / "transfer" / f"{scale}.jsonl").unlink(missing_ok=True)
        write(tmp_path, "transfer", "copy", dict.fromkeys(range(seeds), copy), scale)
        write(tmp_path, "transfer", "scratch", dict.fromkeys(range(seeds), 0.5), scale)
        return claim.real(tmp_path)

    assert claim.real(tmp_path) == ("no run", "not tested")
    assert run("pacs", 0.6, 2).verdict == "not tested"
    assert run("pacs", 0.6, 3) == ("PACS: copy − scratch +10.0 ± 0.0 points, 3 of 3 seeds", "holds")
    assert run("cifar10-cpu", 0.45, 3).verdict == "does not hold"
    assert run("cifar10", 0.4, 3).figures.count("; ") == 2
    assert claim.built_in(tmp_path).verdict == "not tested"


def test_shifts_of_real_images_are_other_domains_or_corruptions(tmp_path):
    claim = claim_of("16", "Under shifted test images")
    for method, value in (("copy", 0.3), ("distill", 0.3), ("fine-tune", 0.5)):
        domains = {
            f"test_{name}_accuracy": value + more
            for name, more in (("art_painting", 0), ("cartoon", 0.1), ("sketch", -0.1))
        }
        write(tmp_path, "transfer", method, dict.fromkeys(range(3), domains), "pacs")
    told = "−20.0 ± 0.0 points, 3 of 3 seeds"
    assert claim.real(tmp_path) == (f"PACS: copy − fine-tune {told}; distill − fine-tune {told}", "holds")
    for method, value in (("copy", 0.8), ("distill", 0.3), ("fine-tune", 0.5)):
        write(
            tmp_path,
            "corruptions",
            method,
            {seed: {"test_accuracy": 0.9, "fog@1": value, "fog@5": value} for seed in range(3)},
            "cifar10",
        )
    assert claim.real(tmp_path).verdict == "does not hold"


def test_every_side_names_a_method_that_its_study_or_examination_runs(monkeypatch):
    """A misspelt method would be "not tested" for ever: what the claims look for is compared with what is
    run."""
    from atlib.lab.evals import EXAMINATIONS
    from atlib.lab.scales import METHODS
    from atlib.lab.studies import STUDIES

    known = {name: {variant.name for variant in study.variants} for name, study in STUDIES.items()}
    known |= {"transfer": set(METHODS)} | {name: {*each.methods} for name, each in EXAMINATIONS.items()}
    asked = set()

    class Asked(str):
        """The method of every record: it remembers what it is compared with, and is whatever is asked for."""

        def __eq__(self, other):
            return asked.add((self.study, other)) or False

        __hash__ = str.__hash__

    real = evidence.read_records

    def records(study, scale, results):
        if study == "shifts-pool":  # all of it is read, before anything else is
            return real(study, scale, results=results)
        method = Asked()
        method.study = study
        return [Record(study, method, 0, {}, {}, [], 0.0, 0.0, {})]

    monkeypatch.setattr(evidence, "read_records", records)
    for claim in CLAIMS:
        claim.built_in(ROOT / "results"), claim.real(ROOT / "results")
    assert len(asked) > 50
    assert asked <= {(study, method) for study, methods in known.items() for method in methods}


# --- The table and the page


def test_table_has_a_row_for_every_claim_and_links_to_notebooks(tmp_path):
    head, line, *rows = claims_table(results=tmp_path).splitlines()
    assert len(rows) == len(CLAIMS) and {row.count(" | ") for row in (head, line, *rows)} == {4}
    for claim, row in zip(CLAIMS, rows):
        assert row.startswith(
            f"| [{claim.chapter}](../notebooks/{NOTEBOOKS[claim.chapter]}.md) | {claim.says} |"
            f" {claim.paper} | "
        )
        assert row.count("**not tested**") == 2


def test_one_chapter_needs_no_column_of_chapters(tmp_path):
    head, _, *rows = claims_table("05", results=tmp_path).splitlines()
    assert head == "| claim | paper | built-in | real images |"
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows] == [
        claim.says for claim in CLAIMS if claim.chapter == "05"
    ]
    assert len(claims_table("05", "06", results=tmp_path).splitlines()) == 2 + len(
        [claim for claim in CLAIMS if claim.chapter in ("05", "06")]
    )


@pytest.mark.parametrize("chapter", ["12", "5", "99"])
def test_unknown_chapters_are_refused_by_name(chapter):
    with pytest.raises(ValueError, match=f"'{chapter}'"):
        claims_table("05", chapter)


def test_every_chapter_is_a_notebook_with_claims_and_none_is_made_twice():
    assert len({claim.says for claim in CLAIMS}) == len(CLAIMS)
    assert {claim.chapter for claim in CLAIMS} == set(NOTEBOOKS)
    for chapter, name in NOTEBOOKS.items():
        assert name.startswith(chapter) and (ROOT / "notebooks" / f"{name}.md").exists()


# --- The book's own records


def percent(study, method, seed):
    for line in (ROOT / "results" / study / "built-in.jsonl").read_text().splitlines():
        record = json.loads(line)
        if (record["kind"], record["method"], record["seed"]) == ("run", method, seed):
            return 100 * record["results"]["test_accuracy"]


@pytest.mark.parametrize(
    "claim, study, a, b, above",
    [
        (("05", "A student with copied maps"), "transfer", "copy", "scratch", 0),
        (("06", "A student of distilled maps"), "transfer", "distill", "fine-tune", -1),
    ],
)
def test_verdicts_of_committed_records_the_long_way(claim, study, a, b, above):
    differences = [percent(study, a, seed) - percent(study, b, seed) for seed in range(5)]
    middle = sum(differences) / 5
    deviation = math.sqrt(sum((each - middle) ** 2 for each in differences) / 4)
    true = sum(difference > above for difference in differences)
    figures, verdict = claim_of(*claim).built_in(ROOT / "results")
    numbers = f"{middle:+.1f} ± {deviation:.1f} points".replace("-", "−")
    assert figures == f"{a} − {b} {numbers}, {true} of 5 seeds"
    assert verdict == {5: "holds", 0: "does not hold"}.get(true, "undecided")
