"""An NVFlare aggregator (nvflare 2.9) whose rounds are a guard's, for FedAvg with clients that send differences.

``FedAvg(aggregator=Guarded(sites, model, ledger="ledger.jsonl", clip=0.2, rounds=50, epsilon=8), …)``; sites: the names
of all sites; model: the server's parameters by name, whose order and shapes hold, whatever a site sends.
NVFlare chooses clients by itself, so nothing is amplified: everybody counts as taking part in every round.
A filter sees one site's result at a time; the sum, which the noise is added to, exists in the aggregator only.
"""

import numpy as np
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.aggregators.model_aggregator import ModelAggregator

import fedflat


class Guarded(ModelAggregator):
    def __init__(self, sites, model, **settings):
        super().__init__()
        self.sites, self.settings, self.guard, self.sent = sites, settings, None, {}
        self.shapes = {name: np.shape(value) for name, value in model.items()}

    def accept_model(self, model):
        if {name: np.shape(value) for name, value in model.params.items()} != self.shapes:
            return  # counts as zero
        flat = np.concatenate([np.ravel(model.params[name]) for name in self.shapes])
        self.sent[self.sites.index(model.meta["client_name"])] = flat

    def aggregate_model(self):
        self.guard = self.guard or fedflat.Guard(clients=len(self.sites), **self.settings)
        mean = self.guard.release(self.guard.next_round, self.sent)
        parts = np.split(mean, np.cumsum([int(np.prod(s)) for s in self.shapes.values()])[:-1])
        moved = {name: part.reshape(s) for (name, s), part in zip(self.shapes.items(), parts)}
        return FLModel(params_type=ParamsType.DIFF, params=moved)

    def reset_stats(self):
        self.sent = {}
