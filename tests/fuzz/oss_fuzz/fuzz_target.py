"""A fuzz target as OSS-Fuzz takes it: `build.sh` packs it once for each target of `tests.fuzz.formats`, by its name."""

import sys
from pathlib import Path

from tests.fuzz.formats import fuzz

if __name__ == "__main__":
    fuzz(Path(sys.argv[0]).name.partition(".")[0].removeprefix("fuzz_"), *sys.argv[1:])
