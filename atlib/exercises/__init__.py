"""The book's exercises, each with a check that names the mistake: `check("6.1", map_loss)`."""

from atlib.exercises.judging import assigned as assigned
from atlib.exercises.judging import check as check
from atlib.exercises.judging import every as every
from atlib.exercises.judging import find as find
from atlib.exercises.judging import judge as judge
