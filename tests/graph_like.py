"""What a CUDA graph does, on a CPU: a recording bakes in memory, shapes, strides and numbers, and computes nothing; a replay starts kernels alone."""

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class _Recorder(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.kernels = []  # (operator, arguments, what it left, whether it writes to its arguments)
        self._before = {}  # memory that was written to, and what it held
        self._of_graph = set()  # that, and what was made

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default and args[0].untyped_storage().data_ptr() in self._of_graph:
            raise RuntimeError("operation not permitted when stream is capturing")  # what nobody has computed cannot be fetched
        if func.namespace == "profiler" or func is torch.ops.aten._local_scalar_dense.default:
            return func(*args, **kwargs)
        schema = func._schema
        for argument, value in (*zip(schema.arguments, args), *((a, kwargs[a.name]) for a in schema.arguments if a.name in kwargs)):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in pytree.tree_leaves(value):
                    self._keep(tensor.untyped_storage())
                    self._of_graph.add(tensor.untyped_storage().data_ptr())
        found = func(*args, **kwargs)
        if not any(result.alias_info is not None and not result.alias_info.is_write for result in schema.returns):  # no view
            given = [value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
            if any(tensor.dim() or tensor.untyped_storage().data_ptr() in self._of_graph for tensor in given):  # numbers may be the host's
                self._of_graph.update(t.untyped_storage().data_ptr() for t in pytree.tree_leaves(found) if isinstance(t, Tensor))
            self.kernels.append((func, *(pytree.tree_map(_there, value) for value in (args, kwargs, found)), schema.is_mutable))
        return found

    def _keep(self, storage):
        if storage.data_ptr() not in self._before:
            self._before[storage.data_ptr()] = storage, storage.clone()

    def undo(self):
        for storage, before in self._before.values():
            storage.copy_(before)
        self._before.clear()


def _there(value):
    """The memory of a tensor, as it is laid out now."""
    if not isinstance(value, Tensor):
        return value
    return torch.empty(0, dtype=value.dtype).set_(value.untyped_storage(), value.storage_offset(), value.size(), value.stride())


def captured(run, device, generators=(), pool=None):
    """For `captured` and `captured_in_passing`."""
    states, recorder = [generator.get_state() for generator in generators], _Recorder()
    try:
        with recorder:
            run()
    finally:
        recorder.undo()
        for generator, state in zip(generators, states):
            generator.set_state(state)

    def replay():
        with torch.no_grad(), torch._C.DisableTorchFunction():
            for func, args, kwargs, left, writes in recorder.kernels:
                found = func(*args, **kwargs)
                for mine, new in zip(pytree.tree_leaves(left), pytree.tree_leaves(found)) if not writes else ():
                    mine.copy_(new)

    return replay
