"""Verbs of the command line, one file each; `rlflow.cli` puts them together."""
