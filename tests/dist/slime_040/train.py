"""What a script of slime 0.4.0 does with its manager, without trainers; prints what became of it."""

import json

import ray
from slime.ray.placement_group import create_rollout_manager
from slime.utils.arguments import parse_args

from r3channel.errors import R3Error
from r3channel.plan.ticket import Ticket

args, restore_plan = parse_args(return_restore_plan=True)
startup = create_rollout_manager(args, restore_plan=restore_plan)
manager, serving = startup.manager, startup.serving
ray.get(manager.set_train_parallel_config.remote({"dp_size": 2}))
boxes = ray.get(manager.generate.remote(0))
ticket = Ticket.from_bytes(ray.get(boxes[0].r3_ticket))
(engine,) = ray.get(serving.deployment.remote())["default"].engines
told = {
    "sealed": [ray.get(box.inner) for box in boxes],
    "same ticket": boxes[0].r3_ticket == boxes[1].r3_ticket,
}
told |= {
    "step": ticket.step,
    "rows": [sample.tokens for sample in ticket.samples],
    "direct": ray.get(engine.direct.remote()),
}
ray.get(serving.lose.remote())
ray.get(manager.recover_updatable_engines.remote())
ray.get(manager.generate.remote(1))
try:
    ray.get(manager.replay.remote(2))
except R3Error as error:
    told["replay"] = type(error.cause).__name__
told["disposed"] = ray.get(manager.dispose.remote(5))
print(json.dumps(told))
