"""Starting the processes of a run, and stopping them when it ends."""
