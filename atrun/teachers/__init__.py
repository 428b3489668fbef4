"""Weights from elsewhere: read them, build the teacher that they belong to, say what it is."""
