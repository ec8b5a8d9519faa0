"""`python -m stagewatch.monitor`: the same as its program."""

import sys

from stagewatch.monitor.cli import main

if __name__ == "__main__":
    sys.exit(main())
