"""What is the book's own: its worlds, experiments, records, exercises, explorer and figures."""
