"""What every test shares: seeds, float64 by request, few threads, and shape checks when asked for.

``NWFLOW_TYPECHECK=1 make test`` checks each annotation of nwflow at run time, shapes included. It is off by default: it
is slow, and a test that hands over a wrong type then meets the checker before it meets nwflow's own error. The hook has
to be in place before nwflow is first imported, which is why it stands here at module level.
"""

import os
from collections.abc import Callable

import hypothesis
import pytest
import torch
from torch import Tensor

if os.environ.get("NWFLOW_TYPECHECK") == "1":
    from jaxtyping import install_import_hook

    install_import_hook("nwflow", "typechecker.check")

# Small tensors gain nothing from many threads, and a busy machine loses by them.
torch.set_num_threads(min(2, torch.get_num_threads()))

# The same examples on every run; no limit on time, which a loaded machine would break.
hypothesis.settings.register_profile("nwflow", derandomize=True, deadline=None, max_examples=50)
hypothesis.settings.load_profile("nwflow")


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Whatever draws from torch's global generator draws the same in every order of the tests."""
    torch.manual_seed(0)


@pytest.fixture
def generator() -> torch.Generator:
    """A generator of its own for the test, seeded with 0."""
    return torch.Generator().manual_seed(0)


@pytest.fixture
def randn(generator: torch.Generator) -> Callable[..., Tensor]:
    """``randn(*shape)``: standard normal numbers, float64 unless a dtype is given."""

    def draw(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    return draw
