"""A trainer that does nothing but count its policy's versions."""

from megatron_rl.types import StepStats


class CountingEngine:
    """What PolicyActor.update needs of a trainer; its data say whether their update is applied."""

    def __init__(self, version):
        self.version = version

    def train(self):
        pass

    def train_batch(self, is_applied, loss, loss_weight_fn=None):
        self.version += is_applied
        return StepStats(loss=0.0, weight=1, grad_norm=1.0, applied=is_applied, lr=0.0)

    def step_lr_scheduler(self):
        pass

    def get_version(self):
        return self.version

    def set_version(self, version):
        self.version = version
