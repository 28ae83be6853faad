"""The dispatch mode that those of the engine and of planning are kinds of."""

from torch.utils._python_dispatch import TorchDispatchMode


class KernelMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees each kernel, and higher-order operators too.

    Where a kind of it says so, a compiled block inside stays compiled: it is one operator then.
    """

    supports_higher_order_operators = True
    keeps_compiled = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Says to torch whether compiled blocks stay compiled."""
        return cls.keeps_compiled

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Has torch not import its compiler to keep it away from here, where it is off anyway."""
        return False
