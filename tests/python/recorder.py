"""A dispatch mode that notes which ops run. Called by test_ops.py and test_compile.py."""

from torch.utils._python_dispatch import TorchDispatchMode

VIEWS = {"view", "transpose", "unsqueeze", "select", "slice", "expand", "detach", "alias", "as_strided", "_unsafe_view"}


class Recorder(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.name())
        return func(*args, **(kwargs or {}))


def foreign(names):
    """What is neither plait's own, nor an allocation, nor a view."""
    rest = {name.split(".")[0] for name in names if not name.startswith("plait::")}
    return {name for name in rest if not name.startswith("aten::empty") and name.split("::")[1] not in VIEWS}
