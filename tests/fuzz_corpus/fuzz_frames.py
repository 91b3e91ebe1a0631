"""The fuzzer's process: started by `scripts/fuzz`, with the sanitizer's library preloaded."""

import os
import sys

import atheris

with atheris.instrument_imports(include=["tests.fuzz_corpus"]):
    from tests.fuzz_corpus.frame_target import check

if __name__ == "__main__":
    # libFuzzer starts itself again by its first argument when it merges.
    atheris.Setup([os.environ.get("FUZZ_TARGET", sys.argv[0]), *sys.argv[1:]], lambda data: check(data) and None)
    atheris.Fuzz()
