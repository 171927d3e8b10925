r"""Heads that smooth in subspaces or patches: the closed-form counterpart of multi-head attention.

A Nadaraya-Watson field weighs whole references; near the data (t = 1; noise is t = 0) one of them takes all weight and
the sample is its copy. Here the event is cut into parts, and every head g has its own weights, from what it sees of x:

    l_i^g = log pi_i - |x[V_g] - alpha s_i[V_g]|^2 / (2 sigma^2)    w^g = softmax(l^g)    D[B_g] = sum_i w_i^g s_i[B_g]

B_g, what head g writes, partition the event; V_g is what it sees. Parts of different references are recombined, so a
sample need be no copy, and nothing is trained.

* **Blocks** (:meth:`SubspaceField.columns`, :meth:`SubspaceField.pca`): V_g = B_g, in an orthonormal basis. This is the
  *exact* field of the product of the blocks' marginals, so that density, score and divergence exist.
* **Patches** (:meth:`SubspaceField.patches`): V_g is the window of an image around the pixels B_g. Windows overlap: the
  heads agree with their neighbours, and the field is in general the gradient of no density.

References: Smola 2026, arXiv 2605.13386 (one head is one smoother); Kamb and Ganguli 2024, arXiv 2412.20292 (denoisers
that see patches recombine them).
"""

from nwflow.subspace.base import SubspaceField
from nwflow.subspace.blocks import BlockField
from nwflow.subspace.patches import PatchField

__all__ = ["BlockField", "PatchField", "SubspaceField"]
