"""`python -m stagewatch.agents`: the same as its program."""

import sys

from stagewatch.agents.cli import main

if __name__ == "__main__":
    sys.exit(main())
