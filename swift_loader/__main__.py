"""Runs `python -m swift_loader`, which is the same as the console script `swift-loader`."""

from __future__ import annotations

import sys

from swift_loader.cli import main

if __name__ == "__main__":
    sys.exit(main())
