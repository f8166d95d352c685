"""Let a killed SuperNode back in at once: ``python -m fedflat.federation.rejoin --superlink HOST:PORT …``.

A SuperNode that ends in order signs off. One that was killed cannot, and Flower refuses a second one under its key
until two heartbeat intervals (of 30 s, fixed in Flower 1.41) have passed since its last sign of life. This program
signs off for it, with its own key, and deletes what a secure aggregation left on its disk. Run it before a restart; it
does nothing harmful if there is nothing to sign off.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from fedflat.core.checks import RunError
from fedflat.federation.processes import check_authority, node_options, status_of
from fedflat.federation.store import Store


def sign_off(address: str, certificates: Path, key: Path, node: int) -> bool:
    """Tell the SuperLink at ``address`` (host:port) that the node of this key is gone; whether it was there.

    certificates: PEM file of the authority. key: the client's auth.key. node: Flower's number of it.

    Raises:
        InputError: the key cannot be read. RunError: the SuperLink does not answer, or does not know the key.
    """
    import httpx
    from flwr.proto.fleet_pb2 import DeactivateNodeRequest
    from flwr.supernode.fleet_http_client import FleetHttpClient
    from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

    from fedflat.federation.secagg.client import signing_key

    check_authority(certificates)
    private = signing_key(key)
    signer = NodeAuthHttpInterceptor(private, private.public_key())
    try:
        with FleetHttpClient.from_server_address(address, False, str(certificates), interceptors=[signer]) as client:
            client.DeactivateNode(DeactivateNodeRequest(node_id=node))
    except httpx.HTTPStatusError as error:
        if error.response.status_code == httpx.codes.UNAUTHORIZED:
            hint = "or the SuperLink was started again since, and there is nothing to sign off"
            raise RunError(f"{address}: this key is not that of node {node}; {hint}") from error
        if error.response.is_server_error:
            raise RunError(f"{address}: fails ({error.response.status_code})") from error
        return False  # it is off already
    except httpx.HTTPError as error:
        raise RunError(f"{address}: no answer ({error})") from error
    return True


def main(arguments: Sequence[str]) -> int:
    """Sign off the node whose number is in the client's state folder; exit status 0 unless the SuperLink is away."""
    parser = node_options("rejoin", __doc__)
    parser.add_argument("--state", required=True, type=Path, help="the client's state folder, which knows its number")
    given = parser.parse_args(arguments)

    def work() -> int:
        store = Store(given.state)
        with store.alone():
            store.end_session()  # of a secure aggregation that goes on without this client
        node = store.node()
        if node is None:
            print("this client has never been asked anything: nothing to sign off")
            return 0
        done = sign_off(given.superlink, given.root_certificates, given.auth_supernode_private_key, node)
        print(f"node {node}: {'signed off' if done else 'was off already'}")
        return 0

    return status_of(work)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
