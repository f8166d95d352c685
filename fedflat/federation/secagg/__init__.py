"""Secure aggregation: the server of a deployment learns a sum, already noisy, and no single update.

``protocol`` has the mathematics of a session, ``sharing`` its verifiable shares, ``dealing`` what clients send and sign
for each other. ``client`` answers the steps, ``rounds`` asks them: the back end of ``trust: distributed``.
"""
