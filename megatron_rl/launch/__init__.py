"""Starting the processes of a run, and stopping them with it."""
