"""The book's exercises, each with a check that names the mistake: `check("6.1", map_loss)`. A file holds the
exercises of a chapter: right answers, and wrong ones under what is said of them to a student."""

from atbook.exercises.commands import headings as headings
from atbook.exercises.judging import check as check
from atbook.exercises.judging import checker as checker
from atbook.exercises.judging import every as every
from atbook.exercises.judging import find as find
from atbook.exercises.judging import judge as judge
