"""From ragged trajectories to packed microbatches: exchange between ranks, packing, and the label shift."""
