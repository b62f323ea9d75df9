class Box:
    def __init__(self, inner):
        self.inner = inner
