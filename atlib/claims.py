"""The papers' claims beside what this book's records say about them, as a table."""

from pathlib import Path

from atlib.claims_data import CLAIMS, NOTEBOOKS, Claim
from atlib.evidence import VERDICTS, Evidence
from atlib.names import require_known
from atlib.record import results_folder

__all__ = ["CLAIMS", "NOTEBOOKS", "VERDICTS", "Claim", "Evidence", "claims_table"]


def claims_table(*chapters: str, results: Path | None = None) -> str:
    """The claims of some chapters ("05"), of all when none is named, as a Markdown table with figures and verdicts at two scales.

    results: the folder of the records, by default the book's. With more than one chapter there is a column that links to its notebook.
    Raises `ValueError` for a chapter without claims.
    """
    for chapter in chapters:
        require_known("chapter with claims", chapter, NOTEBOOKS)
    results = results_folder() if results is None else Path(results)
    shown = [claim for claim in CLAIMS if claim.chapter in (chapters or NOTEBOOKS)]
    rows = [["chapter", "claim", "paper", "built-in", "real images"], ["---"] * 5]
    rows += [[f"[{claim.chapter}](../notebooks/{NOTEBOOKS[claim.chapter]}.md)", claim.says, claim.paper, _cell(claim.built_in(results)),
              _cell(claim.real(results))] for claim in shown]
    return "\n".join(f"| {' | '.join(row[len(chapters) == 1:])} |" for row in rows)


def _cell(evidence: Evidence) -> str:
    return f"{evidence.figures}: **{evidence.verdict}**"
