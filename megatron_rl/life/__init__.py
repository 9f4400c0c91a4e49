"""Process lifecycle of a run: how processes end, which signals stop them, and how hangs are detected."""
