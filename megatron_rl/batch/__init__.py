"""From ragged trajectories to packed microbatches: exchange over ranks, packing, and the one shift of labels."""
