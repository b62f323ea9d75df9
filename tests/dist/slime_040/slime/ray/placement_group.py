import copy
from types import SimpleNamespace

import ray


def create_rollout_manager(args, *, restore_plan=None):
    from .rollout import RolloutManager
    from .serving import ServingCluster

    args, kept = copy.deepcopy(args), {"namespace": "kept", "lifetime": "detached", "get_if_exists": True}
    serving = ServingCluster.options(name="serving", **kept).remote(args, restore_plan)
    deployment = ray.get(serving.deployment.remote())
    args.sglang_router_ip, args.sglang_router_port = "127.0.0.1", ray.get(serving.router.remote())
    given = {"restore_plan": restore_plan, "serving": serving, "deployment": deployment}
    manager = RolloutManager.options(name="manager", num_gpus=0, **kept).remote(args, None, **given)
    return SimpleNamespace(manager=manager, serving=serving)


def create_training_models(args, pgs, rollout_manager, actor_cls=None):
    raise NotImplementedError
