"""Pure functions that passes compute with."""
