"""The cost model against published runs: `python -m benchmarks.validation` writes docs/validation.md."""
