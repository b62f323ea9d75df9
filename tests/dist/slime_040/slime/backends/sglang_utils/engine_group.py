import ray
from slime.backends.sglang_utils.sglang_engine import SGLangEngine


class ServerGroup:
    def __init__(self, args):
        self.args, self.update_weights, self.engines = args, True, [None]

    def start_engines(self, port_cursors=None):
        self.engines = [each or ray.remote(SGLangEngine).remote(self.args) for each in self.engines]
        return [engine.init.remote(None, 0, 0) for engine in self.engines], port_cursors
