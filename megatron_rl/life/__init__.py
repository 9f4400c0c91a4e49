"""Life and death of a run's processes: how each ends, who tells it to, and who notices one that stands still."""
