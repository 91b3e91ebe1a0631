"""The Cython extensions. Everything else about the package is in pyproject.toml.

Switches (environment): FLEXSTREAM_DEBUG=1, FLEXSTREAM_SANITIZE=thread|address, FLEXSTREAM_ANNOTATE=1,
FLEXSTREAM_EXT=name,name to build only some extensions, FLEXSTREAM_NO_MOVES=1 for benchmarks.statecost.
"""

import os
import sys
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup

SOURCES = "flexstream/cython_ext"  # a symlink to cython_ext/: the import name, so that .pxd lookup works
debug = os.environ.get("FLEXSTREAM_DEBUG") == "1"
sanitize = os.environ.get("FLEXSTREAM_SANITIZE", "")
only = [name for name in os.environ.get("FLEXSTREAM_EXT", "").split(",") if name]

compile_args = ["-std=gnu11", "-march=x86-64-v2", "-pthread", "-Wall", "-Wno-unused-function"]
compile_args += ["-O1", "-g"] if debug or sanitize else ["-O3"]
link_args = ["-pthread"]
if os.environ.get("FLEXSTREAM_NO_MOVES") == "1":
    compile_args += ["-DFS_NO_MOVES"]
if sanitize:
    compile_args += [f"-fsanitize={sanitize}", "-fno-omit-frame-pointer"]
    link_args += [f"-fsanitize={sanitize}"]


def extension(source: Path) -> Extension:
    return Extension(
        ".".join(source.with_suffix("").parts),
        [str(source)],
        include_dirs=[f"{SOURCES}/includes"],
        extra_compile_args=compile_args,
        extra_link_args=link_args,
    )


sources = sorted(Path(SOURCES).rglob("*.pyx"))
if "bdist_wheel" in sys.argv:  # probes are for the tests in the tree
    sources = [source for source in sources if source.parent.name != "testing"]
setup(
    package_dir={"": "."},
    options={"build_ext": {"parallel": os.cpu_count() or 1}},
    ext_modules=cythonize(
        [extension(source) for source in sources if not only or source.stem in only],
        compiler_directives={
            "language_level": 3,
            "boundscheck": debug,
            "wraparound": False,
            "cdivision": True,
            "initializedcheck": False,
        },
        annotate=os.environ.get("FLEXSTREAM_ANNOTATE") == "1",
        nthreads=2,
        quiet=True,
    ),
)
