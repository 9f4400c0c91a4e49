"""Tools beside training: the embedded rollout server, the planner, reports, and conversions of models."""
