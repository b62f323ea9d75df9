import ray
from slime.backends.sglang_utils.engine_group import ServerGroup


@ray.remote
class ServingCluster:
    def __init__(self, args, restore_plan):
        self.group = ServerGroup(args)
        self.recover_updatable_engines()

    def recover_updatable_engines(self):
        handles, _ = self.group.start_engines()
        self.port = ray.get(handles)[0]
        return self.deployment()

    def deployment(self):
        return {"default": self.group}

    def router(self):
        return self.port

    def lose(self):
        ray.kill(self.group.engines.pop())
        self.group.engines.append(None)
