"""A rank ends with its own status, also while a thread of its process group releases tensors."""

import subprocess
import sys

import pytest

# Without end_rank, three of four starts ended in "terminate called without an active exception".
SCRIPT = """
import sys, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
import torch.distributed.checkpoint  # keeps the groups of meshes until the process ends
from ropewalk.lab.ranks import end_rank

dist.init_process_group("gloo", init_method=sys.argv[1], rank=int(sys.argv[2]), world_size=2)
mesh = init_device_mesh("cpu", (2,))
for _ in range(49):
    x = torch.zeros(300_000)
    x.note = "kept in Python"
    dist.all_reduce(x, async_op=True)
    del x  # the thread has the last reference
dist.destroy_process_group()
print("complete")
end_rank(3)
"""


@pytest.mark.slow
@pytest.mark.xdist_group("ranks")
def test_ranks_end_with_their_status(tmp_path):
    store = (tmp_path / "store").as_uri()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, store, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=300) for rank in ranks]
    # A rank that ends first can break the connections of the other, which is still in its loop of collectives.
    assert [rank.returncode for rank in ranks] == [3, 3], outputs
    assert [out for out, _ in outputs] == ["complete\n"] * 2
