import ray
from slime.utils.dp_schedule import build_dp_schedule
from slime.utils.misc import Box


class BatchBuilder:
    def __init__(self, args, *, controller=None):
        self.args, self.controller, self.rollout_id = args, controller, -1

    def convert(self, samples):
        if self.args.use_rollout_routing_replay and any(s.rollout_routed_experts is None for s in samples):
            raise ValueError("routed experts are missing of live samples")
        indices = [sample.index for sample in samples]
        tokens = [sample.tokens for sample in samples]
        return {"tokens": tokens, "sample_indices": indices, "rollout_ids": indices}

    def replay_converted(self, data, batch_id):
        return self.split_by_dp(data)

    def split_by_dp(self, data):
        lengths = [len(tokens) for tokens in data["tokens"]]
        given = {"global_batch_size": len(lengths), "rollout_indices": data["rollout_ids"]}
        partitions, *_ = build_dp_schedule(self.args, self.train_parallel_config, lengths, **given)
        return [Box(ray.put([data["tokens"][at] for at in places])) for places in partitions]
