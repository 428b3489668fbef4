"""`python -m atlib`: the command line, which is that of `atrun`."""

import sys
from importlib import import_module

if __name__ == "__main__":
    sys.exit(import_module("atrun.__main__").main())
