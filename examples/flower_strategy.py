"""A Flower strategy (flwr 1.41) whose rounds are a guard's: clients reply with trained weights, as to FedAvg.

``strategy = Guarded(fedflat.Guard("ledger.jsonl", clip=0.2, clients=100, cohort=20, rounds=50, epsilon=8))``, with
exactly 100 nodes connected. The number of replies and their metrics are not noised: do not publish them.
"""

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MessageType, RecordDict
from flwr.serverapp.strategy import FedAvg


class Guarded(FedAvg):
    def __init__(self, guard, **options):
        super().__init__(**options)
        self.guard = guard

    def configure_train(self, server_round, arrays, config, grid):
        self.start, self.nodes = arrays, sorted(grid.get_node_ids())
        content = RecordDict({"arrays": arrays, "config": config})
        return [Message(content, self.nodes[i], MessageType.TRAIN) for i in self.guard.cohort(server_round - 1)]

    def aggregate_train(self, server_round, replies):
        old = self.start.to_numpy_ndarrays()
        sent = {}
        for reply in (r for r in replies if r.has_content()):
            new = reply.content["arrays"].to_numpy_ndarrays()
            sent[self.nodes.index(reply.metadata.src_node_id)] = np.concatenate(
                [(b - a).ravel() for a, b in zip(old, new)]
            )
        mean = self.guard.release(server_round - 1, sent)
        moved = zip(self.start.keys(), old, np.split(mean, np.cumsum([a.size for a in old])[:-1]))
        return ArrayRecord({name: Array(a + m.reshape(a.shape)) for name, a, m in moved}), None
