"""Tables of the book's pages."""

import pytest

from atlib.record import markdown_table, spread


def test_a_table_is_markdown():
    assert (
        markdown_table(["method", "seeds"], ["copy", 3], ["distill", "–"])
        == "| method | seeds |\n| --- | --- |\n| copy | 3 |\n| distill | – |"
    )


def test_a_row_of_another_length_is_refused():
    with pytest.raises(ValueError, match="the head has 2 cells, this row 1"):
        markdown_table(["a", "b"], ["c"])


@pytest.mark.parametrize(
    ("values", "sign", "text"),
    [
        ([1.0, 2.0, 3.0], "", "2.0 ± 1.0"),
        ([5.25], "", "5.2"),
        ([-1.0, -3.0], "+", "−2.0 ± 1.4"),
        ([0.5, 0.5], "+", "+0.5 ± 0.0"),
    ],
)
def test_spread_is_mean_and_sample_standard_deviation(values, sign, text):
    assert spread(values, sign) == text
