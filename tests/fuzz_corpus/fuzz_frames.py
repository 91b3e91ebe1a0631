"""The fuzzer's process: started by `scripts/fuzz`, with the sanitizer's library preloaded."""

import sys

import atheris

with atheris.instrument_imports(include=["tests.fuzz_corpus"]):
    from tests.fuzz_corpus.frame_target import check

if __name__ == "__main__":
    atheris.Setup(sys.argv, lambda data: check(data) and None)
    atheris.Fuzz()
