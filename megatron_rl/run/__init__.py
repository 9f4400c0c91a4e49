"""One run: builds its parts from the config, then drives, measures and saves its steps, and shuts it down."""
