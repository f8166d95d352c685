"""Seconds per MB from one Ray object store to another, over this machine's loopback: what a message from another
machine costs besides the network itself. A process of its own, for Ray ends a driver whose cluster goes away.
"""

from __future__ import annotations

import json
import statistics
import time

import numpy as np

SIZE = 2_500_000
"""Entries of a message of 10 MB."""


def message(fill: float) -> np.ndarray:
    """A task on the other node."""
    return np.full(SIZE, fill, np.float32)


def main() -> None:
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    cluster.add_node(num_cpus=1, resources={"other": 1})
    ray.init(address=cluster.address, log_to_driver=False)
    task = ray.remote(num_cpus=1, resources={"other": 1})(message)
    seconds = []
    for _ in range(6):
        made = [task.remote(float(index)) for index in range(8)]
        ray.wait(made, num_returns=len(made), fetch_local=False)
        began = time.perf_counter()
        ray.wait(made, num_returns=len(made))  # as the back end does: several on their way at a time
        seconds.append((time.perf_counter() - began) / len(made))
        del made
    print(json.dumps(statistics.median(seconds[1:]) / (4 * SIZE / 1e6)), flush=True)
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
