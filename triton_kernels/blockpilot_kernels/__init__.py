"""Public kernel ops of BlockPilot: a folder an op with its reference, Triton kernel and launcher.

    from blockpilot_kernels import accept_commit, choose, gumbel_noise

`blockpilot_kernels.dispatch` decides which implementation runs and can say why. Triton and the C++ extension
are optional: neither is needed to import this package.
"""

from blockpilot_kernels import dispatch
from blockpilot_kernels.accept_commit import accept_commit
from blockpilot_kernels.choose import choose
from blockpilot_kernels.gumbel_noise import gumbel_noise, philox

__all__ = ["accept_commit", "choose", "dispatch", "gumbel_noise", "philox"]
