"""An unknown name is answered by what was meant."""

import pytest

from atlib._util import MANY, require_known


@pytest.mark.parametrize(
    "name, known, said",
    [
        ("mapp", ("map", "q"), "unknown part 'mapp'. Did you mean 'map'? Known: 'map', 'q'."),
        ("zzz", ("map", "q"), "unknown part 'zzz'. Known: 'map', 'q'."),
        (
            "zz",
            [f"name-{i}" for i in range(MANY + 1)],
            "Known: " + ", ".join(f"'name-{i}'" for i in range(MANY + 1)) + ".",
        ),
        ("many-99", [f"many-{i}" for i in range(100, 141)], "? 41 are known."),
    ],
)
def test_close_names_come_first_and_of_many_they_are_enough(name, known, said):
    with pytest.raises(ValueError) as caught:
        require_known("part", name, known)
    assert str(caught.value).endswith(said)
    require_known("part", known[0], known)
