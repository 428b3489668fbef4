"""A real run from the command line: configured, estimated, carried out, gone on with."""
