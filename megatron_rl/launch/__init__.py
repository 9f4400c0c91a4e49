"""Starting processes and ending with them."""
