"""The trainer's side of the rollout servers: one HTTP client each, the pool that shares requests among them, the
receiver of new weights, and the supervisor that starts them and starts them again."""
