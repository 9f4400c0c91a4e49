"""What training does not need: the embedded rollout server, the planner, reports, and conversions of models."""
