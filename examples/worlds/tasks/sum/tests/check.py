"""Exit with status 0 if the sum is right, else 1."""

import json
import sys
from pathlib import Path

numbers = [17, 4, 21]
found = json.loads(Path("/app/sum.txt").read_text())
sys.exit(0 if found == sum(numbers) else 1)
