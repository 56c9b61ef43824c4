"""Builds what this machine will use, and says what that is. That there is no compiler is no failure: torch serves."""

import sys

from pagoda.kernels.cpu.build import BuildError
from pagoda.kernels.cpu.library import load_best

try:
    sys.stdout.write(f"CPU kernels for {load_best()[0].name}\n")
except BuildError as error:
    sys.stderr.write(f"no CPU kernels, so PyTorch's operators will serve, several times slower: {error}\n")
