"""A workflow whose rewards are by token."""

from megatron_rl.workflows import RLVRWorkflow


class RewardsByToken(RLVRWorkflow):
    """Each trained token has an equal share of its trajectory's reward."""

    async def arun_episode(self, engine, data):
        trajectories = await super().arun_episode(engine, data)
        for trajectory in trajectories:
            trained = trajectory.loss_mask.float()
            trajectory.tokens["rewards"] = trajectory.reward * trained / trained.sum()
        return trajectories
