import ray
from slime.data.batch_builder import BatchBuilder
from slime.utils.types import Sample


@ray.remote
class RolloutManager:
    def __init__(self, args, pg, *, restore_plan=None, serving=None, deployment=None):
        self.args, self.serving, self.servers, self.controller = args, serving, deployment, "a controller"
        self.batch_builder = BatchBuilder(args, controller=self.controller)
        self.rollout_id = -1

    def set_train_parallel_config(self, config):
        self.batch_builder.train_parallel_config = config

    def generate(self, rollout_id):
        """Two turns a sample: the second asks for the rows behind the first's."""
        self.rollout_id = self.batch_builder.rollout_id = rollout_id
        samples = [Sample(index) for index in range(4)]
        for sample in samples:
            engine = self._get_updatable_server().engines[0]
            for turn in ([1, 2, 3, 4], [5, 6]):
                first = sample.get_rollout_routed_experts_length()
                asked = f"{rollout_id}.{sample.index}.{first}", len(sample.tokens) + len(turn), first
                reply = ray.get(engine.finish.remote(*asked))["meta_info"]
                reply |= {"routed_experts_start_len": first, "finish_reason": {"type": "stop"}}
                sample.append_response_tokens(self.args, tokens=turn, meta_info=reply)
        self.data = self.batch_builder.convert(samples)
        return self.batch_builder.split_by_dp(self.data)

    def replay(self, rollout_id):
        """As a new manager does with what an old one converted."""
        self.rollout_id = self.batch_builder.rollout_id = rollout_id
        return self.batch_builder.replay_converted(self.data, None)

    def recover_updatable_engines(self):
        self.servers = ray.get(self.serving.recover_updatable_engines.remote())

    def _get_updatable_server(self):
        return self.servers["default"]

    def offload(self):
        pass

    def dispose(self, timeout=None):
        return timeout
