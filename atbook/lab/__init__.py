"""The book's experiments: their scales, studies and evaluations, and the claims that their records decide."""
