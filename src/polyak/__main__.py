"""`python -m polyak` is the `polyak` command."""

import sys

from polyak.cli import main

if __name__ == "__main__":
    sys.exit(main())
