"""`python -m rlflow`."""

from rlflow.cli import main

main()
