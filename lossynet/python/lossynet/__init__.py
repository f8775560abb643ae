"""lossynet: averages and broadcasts vectors over a network that loses packets.

``Comm`` exchanges bare vectors (NumPy). ``lossynet.torch.ShardedOptimizer`` trains a PyTorch model; it
is imported only by ``import lossynet.torch``.
"""
from ._library import LIBRARY, LossynetError
from .comm import Comm, Place, options

__version__: str = LIBRARY.lossynet_version().decode()
__all__ = ["Comm", "LossynetError", "Place", "options", "__version__"]
