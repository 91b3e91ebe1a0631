"""`python -m flexstream.cli` is `flexstream`."""

from flexstream.cli import main

main()
