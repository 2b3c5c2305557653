"""What holds for every test: uninitialised memory is NaN, and Hypothesis prints how to replay a failure."""

import os
from collections.abc import Iterator

import hypothesis
import jaxtyping
import pytest
import torch
import torch.utils.deterministic as deterministic

# Nothing that measures time: on a busy machine every example is slow.
hypothesis.settings.register_profile(
    "ropewalk", deadline=None, print_blob=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("ropewalk")

# Without a GPU the Triton kernels run in Triton's interpreter, which has to be known before Triton is loaded.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# torch.empty gives NaN from here on, so that an output element nobody wrote fails every comparison.
torch.use_deterministic_algorithms(True)
deterministic.fill_uninitialized_memory = True  # pyright: ignore[reportAttributeAccessIssue]


@pytest.fixture
def as_a_user() -> Iterator[None]:
    """Switches the checks of jaxtyping off: users do not have them, and the library's own errors are under test."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
