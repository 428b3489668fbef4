"""Progress bars in the built pages: the last state of each, and nothing else touched."""

from tools.book_pages import last_of_each_bar


def test_a_bar_is_left_with_its_last_state():
    text = "train:   0%|    | 0/5\ntrain:  60%|██  | 3/5\ntrain: 100%|████| 5/5\ndone\n"
    assert last_of_each_bar(text) == "train: 100%|████| 5/5\ndone\n"


def test_two_bars_of_one_name_and_bars_of_two_names_all_stay():
    text = "a: 100%|█| 1/1\na: 100%|█| 1/1\nb:  50%|█| 1/2\nc:  10%|█| 1/9"
    assert last_of_each_bar(text) == text


def test_other_text_stays():
    text = "accuracy 100%\naccuracy 100%\n50% | no bar"
    assert last_of_each_bar(text) == text
