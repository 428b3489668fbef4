"""The book's own code: its worlds, experiments, records, exercises, explorer and figures."""
