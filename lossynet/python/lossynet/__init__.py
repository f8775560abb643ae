"""lossynet: averages and broadcasts vectors over a network that loses packets.

``Comm`` exchanges bare vectors (NumPy). ``lossynet.torch.ShardedOptimizer`` trains a PyTorch model; it
is imported only by ``import lossynet.torch``.
"""
from ._library import LIBRARY, LossynetError
from .comm import GRADIENT, PARAMETER, Comm, Place, options
from .rule import Part, Rule

__version__: str = LIBRARY.lossynet_version().decode()
__all__ = ["Comm", "GRADIENT", "LossynetError", "PARAMETER", "Part", "Place", "Rule", "options", "__version__"]
