"""One run: its parts are built from the config, its steps driven, measured, saved, and ended in order."""
