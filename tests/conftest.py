"""What holds for every test: its share of the cores, NaN in new memory, and how a failure of Hypothesis is replayed."""

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
# For `make test`. `make test-all` draws 100 examples, the default.
hypothesis.settings.register_profile("quick", hypothesis.settings.get_profile("ropewalk"), max_examples=30)

# The workers of pytest-xdist share the cores. More threads than cores wait for each other in every parallel loop.
THREADS = max(1, (os.cpu_count() or 1) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
torch.set_num_threads(THREADS)
# For processes that tests start.
os.environ["OMP_NUM_THREADS"] = str(THREADS)

# Without a GPU the Triton kernels run in Triton's interpreter, which has to be known before Triton is loaded.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    # On a GPU several processes compile the kernels of one graph; for a CPU their start takes longer than their work.
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"

# torch.empty gives NaN from here on, so that an output element nobody wrote fails every comparison.
torch.use_deterministic_algorithms(True)
deterministic.fill_uninitialized_memory = True  # pyright: ignore[reportAttributeAccessIssue]


@pytest.fixture
def as_a_user() -> Iterator[None]:
    """Switches the checks of jaxtyping off: users do not have them, and the library's own errors are under test."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
