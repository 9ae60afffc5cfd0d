"""How large the largest tensor of a computation is: the same on every machine, unlike the memory of a process."""

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation returned."""

    num_elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else [result]:
            if isinstance(value, Tensor):
                self.num_elements = max(self.num_elements, value.untyped_storage().nbytes() // value.element_size())
        return result
