"""Tools around training: the embedded rollout server, the planner, run reports and model conversion."""
