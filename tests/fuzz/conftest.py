"""The fuzzer's own modules can be imported by the tests beside them; it runs as a script too."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
