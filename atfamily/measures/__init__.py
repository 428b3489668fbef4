"""What a student learned and what it costs, one question a file: mistakes, probes, controls, robustness."""
